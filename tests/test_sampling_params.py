"""Every field is checked where it is set."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from octavo import InvalidRequest, RequestOutputKind, SamplingParams


def test_the_defaults_are_those_that_callers_know() -> None:
    params = SamplingParams()
    known = (params.n, params.temperature, params.top_p, params.top_k, params.min_p, params.seed, params.max_tokens)
    assert known == (1, 1.0, 1.0, 0, 0.0, None, 16)
    assert (params.cache_salt, params.skip_reading_prefix_cache) == (None, False)
    assert params.output_kind is RequestOutputKind.CUMULATIVE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", bad) for bad in (-0.1, math.nan, math.inf, 1e39, "1", None, True)],
        *[("top_p", bad) for bad in (0, -1, 1.01, math.nan, "0.5", False)],
        *[("min_p", bad) for bad in (-0.1, 1.01, math.nan)],
        *[("top_k", bad) for bad in (-2, 1.0, "5", True, None)],
        *[("seed", bad) for bad in (-1, 2**64, 1.5, True, "1")],
        *[("max_tokens", bad) for bad in (0, -1, 1.0, True)],
        *[("logprobs", bad) for bad in (-2, 1.0, True, "2")],
        *[("stop_token_ids", bad) for bad in (5, "5", [1.0], [-1], [2**32], [True], [None], {1: 2})],
        *[("ignore_eos", bad) for bad in (1, None, "yes")],
        ("detokenize", 1),
        ("skip_special_tokens", 0),
        ("skip_reading_prefix_cache", 1),
        *[("n", bad) for bad in (0, -1, 1.0, True, "2", None, 2**32, np.array([1, 1]))],
        *[("cache_salt", bad) for bad in ("", b"x", 5, "a\ud800")],
    ],
)
def test_a_wrong_value_is_refused_by_field_with_what_was_found(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}.*: found .*, expected "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 1e-12),
        ("temperature", np.float32(0.5)),
        ("top_k", -1),
        ("top_k", 10**30),
        ("top_p", 1),
        ("min_p", 1),
        ("seed", 2**64 - 1),
        ("seed", np.int64(3)),
        ("max_tokens", None),
        ("logprobs", -1),
        ("stop_token_ids", (1, 2)),
        ("stop_token_ids", []),
        ("n", 2**32 - 1),
        ("n", np.int64(3)),
        ("cache_salt", "\u00e9"),
        ("skip_reading_prefix_cache", True),
    ],
)
def test_values_at_the_edge_are_taken(field: str, value: Any) -> None:
    SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.1),
        ("stop", "x"),
        ("bad_words", ["x"]),
        ("allowed_token_ids", [1]),
        ("logit_bias", {1: 5.0}),
        ("logit_bias", np.array([1, 2])),
        ("speculative", 1),
        ("min_tokens", 1),
        ("prompt_logprobs", 0),
        ("include_stop_str_in_output", True),
        ("output_kind", RequestOutputKind.DELTA),
        ("structured_outputs", {}),
        ("speculative", False),
        ("user", "x"),
        ("deadline_ms", 10),
    ],
)
def test_a_field_without_effect_is_refused_by_name_unless_it_has_its_default(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field} is not available yet"):
        SamplingParams(**{field: value})
    default: Any = next(known.default for known in dataclasses.fields(SamplingParams) if known.name == field)
    SamplingParams(**{field: default})


@pytest.mark.parametrize(("field", "value"), [("stop", []), ("stop", ()), ("bad_words", []), ("logit_bias", {})])
def test_an_empty_list_of_what_is_not_available_yet_means_none(field: str, value: Any) -> None:
    assert SamplingParams(**{field: value}) == SamplingParams()


def test_a_number_too_long_to_spell_is_shown_by_its_size() -> None:
    with pytest.raises(InvalidRequest, match=r"^seed: found an integer of 16610 bits, expected None or an integer"):
        SamplingParams(seed=10**5000)


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_parameters_do_not_change_once_they_are_made() -> None:
    stop = [1, 2]
    params = SamplingParams(stop_token_ids=stop)
    stop.append(3)
    assert params.stop_token_ids == (1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]


def test_a_mistake_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1)
