"""Every field is checked where it is set."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from octavo import BeamSearchParams, InvalidRequest, RequestOutputKind, SamplingParams, StructuredOutputsParams


def test_the_defaults_are_those_that_callers_know() -> None:
    params = SamplingParams()
    known = (params.n, params.temperature, params.top_p, params.top_k, params.min_p, params.seed, params.max_tokens)
    assert known == (1, 1.0, 1.0, 0, 0.0, None, 16)
    assert (params.cache_salt, params.skip_reading_prefix_cache) == (None, False)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.stop, params.min_tokens, params.logprobs, params.prompt_logprobs) == (None, 0, None, None)
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
        *[("user", bad) for bad in ("", b"x", 5, "a\ud800")],
        *[("presence_penalty", bad) for bad in (-2.01, 2.01, math.nan, "1", None, True)],
        *[("frequency_penalty", bad) for bad in (-2.01, 2.01, math.inf, "1", None, True)],
        *[("repetition_penalty", bad) for bad in (0, 0.009, 100.1, -1, math.nan, "1", None, True)],
        *[("min_tokens", bad) for bad in (-1, 17, 1.0, True, None)],
        *[("prompt_logprobs", bad) for bad in (-2, 1.0, True, "2")],
        *[("stop", bad) for bad in (5, b"x", {"x": 1}, [5], [None], "", ["a\ud800"])],
        *[("bad_words", bad) for bad in ("word", 5, [b"x"], [""], ["\ud800"])],
        *[("allowed_token_ids", bad) for bad in (5, "5", [1.0], [-1], [2**32], [True], {1: 2})],
        *[
            ("logit_bias", bad)
            for bad in ([1], "x", 5, np.array([1, 2]), {1.0: 1}, {True: 1}, {"\u0665": 1}, {"+5": 1})
        ],
        *[("logit_bias", {5: bad}) for bad in (math.nan, math.inf, 100.5, "1", None, True)],
        *[("output_kind", bad) for bad in (0, "DELTA", None)],
        *[("structured_outputs", bad) for bad in ({}, {"regex": "a"}, "a", True)],
        *[("deadline_ms", bad) for bad in (0, -1, math.nan, math.inf, "5", True)],
        *[("include_stop_str_in_output", bad) for bad in (1, None)],
        *[("speculative", bad) for bad in (1, None)],
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
        ("presence_penalty", -2),
        ("frequency_penalty", 2),
        ("repetition_penalty", 0.01),
        ("repetition_penalty", 100),
        ("min_tokens", 16),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 0),
        ("stop", ["x"] * 64),
        ("stop", "x" * 1024),
        ("bad_words", (" ", "\n")),
        ("allowed_token_ids", [2**32 - 1]),
        ("logit_bias", {2**32 - 1: -100, "0": 100}),
        ("output_kind", RequestOutputKind.FINAL_ONLY),
        ("structured_outputs", StructuredOutputsParams(regex="a")),
        ("speculative", False),
        ("user", "x"),
        ("deadline_ms", 1e-3),
        ("deadline_ms", np.float32(5)),
    ],
)
def test_values_at_the_edge_are_taken(field: str, value: Any) -> None:
    SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"), [("stop", []), ("stop", ()), ("bad_words", []), ("logit_bias", {}), ("stop", None)]
)
def test_an_empty_list_means_none(field: str, value: Any) -> None:
    assert SamplingParams(**{field: value}) == SamplingParams()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logit_bias": {"AI": -100}}, "logit_bias: found 'AI', expected token ids from 0 to 4294967295 as keys"),
        ({"logit_bias": {"-1": 5}}, "logit_bias: found '-1', expected token ids"),
        ({"logit_bias": {-1: 5}}, "logit_bias: found -1, expected token ids"),
        ({"logit_bias": {"2756": 1000}}, r"logit_bias\[2756\]: found 1000, expected a number from -100 to 100"),
        ({"logit_bias": {"2756": "x"}}, r"logit_bias\[2756\]: found 'x', expected a number from -100 to 100"),
        ({"logit_bias": {"5": 1, 5: 2}}, "logit_bias: found token 5 twice"),
        ({"allowed_token_ids": []}, "allowed_token_ids: found an empty list, expected at least one token"),
        (
            {"min_tokens": 5, "max_tokens": 4},
            "min_tokens: found 5, expected an integer from 0 to 4, which is max_tokens",
        ),
        ({"stop": "x", "detokenize": False}, r"stop: found \('x',\), expected None where detokenize is False"),
        ({"stop": ["a", ""]}, r"stop\[1\]: found '', expected a text of at least one character"),
        ({"stop": ["x"] * 65}, "stop: found 65 texts, expected at most 64"),
        ({"stop": "x" * 1025}, r"stop\[0\]: found 1025 characters, expected at most 1024"),
        ({"bad_words": ["x"] * 1025}, "bad_words: found 1025 texts, expected at most 1024"),
    ],
)
def test_what_is_wrong_in_a_field_is_said(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{reason}"):
        SamplingParams(**fields)


def test_values_are_kept_in_plain_types() -> None:
    allowed: Any = np.array([3, 4])
    biases: Any = {"5": 1, np.int64(6): np.float32(0.5)}
    params = SamplingParams(stop="x", bad_words=["a"], allowed_token_ids=allowed, logit_bias=biases)
    assert (params.stop, params.bad_words, params.allowed_token_ids) == (("x",), ("a",), (3, 4))
    assert params.logit_bias == {5: 1.0, 6: 0.5}
    assert [(type(key), type(bias)) for key, bias in params.logit_bias.items()] == [(int, float)] * 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"beam_width": 0}, "beam_width: found 0, expected an integer from 1"),
        ({"beam_width": True}, "beam_width: found True"),
        ({"beam_width": 2**31}, "beam_width: found 2147483648"),
        ({"max_tokens": 0}, "max_tokens: found 0, expected an integer from 1"),
        ({"max_tokens": None}, "max_tokens: found None"),
        ({"ignore_eos": 1}, "ignore_eos: found 1, expected True or False"),
        ({"temperature": 0.5}, "temperature: found 0.5, expected 0"),
        ({"length_penalty": math.inf}, "length_penalty: found inf, expected a number from -10 to 10"),
        ({"length_penalty": math.nan}, "length_penalty: found nan, expected a number from -10 to 10"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output: found True, expected False"),
    ],
)
def test_a_wrong_field_of_a_beam_search_is_refused_by_name(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{reason}"):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 4} | fields))


def test_a_beam_search_may_be_given_in_order() -> None:
    assert BeamSearchParams(3, 8) == BeamSearchParams(
        beam_width=3, max_tokens=8, ignore_eos=False, temperature=0.0, length_penalty=1.0
    )


def test_a_number_too_long_to_spell_is_shown_by_its_size() -> None:
    with pytest.raises(InvalidRequest, match=r"^seed: found an integer of 16610 bits, expected None or an integer"):
        SamplingParams(seed=10**5000)


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_parameters_do_not_change_once_they_are_made() -> None:
    stop, biases = [1, 2], {1: 2.0}
    params = SamplingParams(stop_token_ids=stop, logit_bias=biases)
    stop.append(3)
    biases[2] = 1.0
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {1: 2.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.5  # type: ignore[misc]


def test_a_mistake_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=-1)


# Python refuses to spell integers of so many digits.
@pytest.mark.parametrize("field", ["min_tokens", "seed", "n"])
def test_a_number_that_cannot_be_spelled_is_refused_by_name(field: str) -> None:
    huge: dict[str, Any] = {field: 10**5000}
    with pytest.raises(InvalidRequest, match=f"^{field}: found an integer of 16610 bits"):
        SamplingParams(**huge)
    assert SamplingParams(max_tokens=10**5000, top_k=10**5000).top_k == 10**5000


@pytest.mark.parametrize("penalty", [10.5, -11, 1e38])
def test_a_length_penalty_of_which_no_power_can_be_taken_is_refused(penalty: float) -> None:
    with pytest.raises(InvalidRequest, match=r"^length_penalty: found .*, expected a number from -10 to 10"):
        BeamSearchParams(4, 8, length_penalty=penalty)
