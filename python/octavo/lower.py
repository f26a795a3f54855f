"""From `SamplingParams` to what the engine takes; what depends on the model is checked here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams
from octavo.shown import shown

if TYPE_CHECKING:
    from octavo._octavo import RequestParams

# Counts beyond any vocabulary or context all mean the same.
_MAX_COUNT = 2**32 - 1


def params_of_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, *, default: SamplingParams, count: int
) -> list[SamplingParams]:
    """One for each of `count` prompts."""
    if sampling_params is None:
        return [default] * count
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    each = list(sampling_params) if isinstance(sampling_params, Sequence) else None
    if each is None or not all(isinstance(params, SamplingParams) for params in each):
        raise InvalidRequest(
            f"sampling_params: found {shown(sampling_params)}, expected a SamplingParams or a list of them"
        )
    if len(each) != count:
        raise InvalidRequest(
            f"sampling_params: found {len(each)}, expected one for all or one for each of {count} prompts"
        )
    return each


def params_of_one(sampling_params: SamplingParams | None, *, default: SamplingParams) -> SamplingParams:
    """Those given, or the default."""
    if sampling_params is None:
        return default
    if not isinstance(sampling_params, SamplingParams):
        raise InvalidRequest(f"sampling_params: found {shown(sampling_params)}, expected a SamplingParams or None")
    return sampling_params


def lowered(params: list[SamplingParams], *, vocab_size: int) -> list[RequestParams]:
    """As the engine takes them, or refused by the first prompt whose parameters do not fit the model."""
    return [_lowered(one, index, vocab_size) for index, one in enumerate(params)]


def _lowered(params: SamplingParams, index: int, vocab_size: int) -> RequestParams:
    stop_token_ids = list(params.stop_token_ids or ())
    for position, token in enumerate(stop_token_ids):
        if token >= vocab_size:
            raise InvalidRequest(
                f"prompt {index}: stop_token_ids[{position}]: found {token}, expected 0 to {vocab_size - 1}"
            )
    logprobs = params.logprobs
    if logprobs is not None and logprobs > vocab_size:
        raise InvalidRequest(
            f"prompt {index}: logprobs: found {logprobs}, expected at most {vocab_size}, the size of the vocabulary"
        )
    return {
        "n": params.n,
        "temperature": params.temperature,
        "top_k": min(max(params.top_k, 0), _MAX_COUNT),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "seed": params.seed,
        "max_tokens": None if params.max_tokens is None else min(params.max_tokens, _MAX_COUNT),
        "min_tokens": params.min_tokens,
        "stop": [],
        "include_stop_str_in_output": False,
        "stop_token_ids": stop_token_ids,
        "ignore_eos": params.ignore_eos,
        "logprobs": vocab_size if logprobs == -1 else logprobs,
        "prompt_logprobs": None,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": [],
        "allowed_token_ids": None,
        "bad_words": [],
        "beam": None,
        "pooling": None,
        "deadline_ms": None,
        "detokenize": params.detokenize,
        "skip_special_tokens": params.skip_special_tokens,
        "cache_salt": params.cache_salt,
        "skip_reading_prefix_cache": params.skip_reading_prefix_cache,
    }
