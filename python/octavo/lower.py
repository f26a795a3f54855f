"""From the parameters of callers to what the engine takes; what depends on the model is checked here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from octavo.errors import InvalidRequest
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.shown import shown

if TYPE_CHECKING:
    from octavo._octavo import Core, Grammar, RequestParams
    from octavo.structured_outputs import StructuredOutputsParams

Pooling = Literal["last", "mean"]

# Counts beyond any vocabulary or context all mean the same.
_MAX_COUNT = 2**32 - 1
_LEAST_TOP_P = 1e-37


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


def lowered(params: Sequence[SamplingParams], *, core: Core) -> list[RequestParams]:
    """As the engine takes them, or refused by the first prompt whose parameters do not fit the model."""
    lowering = _Lowering(core)
    return [lowering.lowered(one, f"prompt {index}") for index, one in enumerate(params)]


def lowered_beam(params: BeamSearchParams, *, core: Core) -> RequestParams:
    """A beam search as the engine takes it."""
    if not isinstance(params, BeamSearchParams):
        raise InvalidRequest(f"params: found {shown(params)}, expected a BeamSearchParams")
    plain = SamplingParams(
        temperature=0.0, max_tokens=params.max_tokens, ignore_eos=params.ignore_eos, logprobs=0, detokenize=False
    )
    [found] = lowered([plain], core=core)
    found["beam"] = (params.beam_width, params.length_penalty)
    return found


def lowered_pooling(pooling: Pooling, *, core: Core) -> RequestParams:
    """A prompt whose hidden states are pooled; the one token that is drawn besides is of no use."""
    [found] = lowered([SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)], core=core)
    found["pooling"] = pooling
    return found


class _Lowering:
    """One call's parameters. Whatever several prompts share is looked at once, and so is each structured output."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._vocab_size = core.vocab_size
        self._known: dict[int, RequestParams] = {}
        self._grammars: dict[StructuredOutputsParams | None, Grammar | None] = {None: None}

    def lowered(self, params: SamplingParams, where: str) -> RequestParams:
        """`where` names the prompt."""
        found = self._known.get(id(params))
        if found is None:
            found = self._known[id(params)] = self._lowered(params, where)
        return found

    def _lowered(self, params: SamplingParams, where: str) -> RequestParams:
        biases = dict(params.logit_bias or {})
        if params.stop and self._core.tokenizer is None:
            raise InvalidRequest(f"{where}: stop: found texts, expected None: the model has no tokenizer")
        self._check_tokens(params.stop_token_ids, f"{where}: stop_token_ids")
        self._check_tokens(params.allowed_token_ids, f"{where}: allowed_token_ids")
        for token in biases:
            if int(token) >= self._vocab_size:
                raise InvalidRequest(
                    f"{where}: logit_bias: found token {shown(token)}, expected 0 to {self._vocab_size - 1} as keys"
                )
        return {
            "n": params.n,
            "temperature": params.temperature,
            "top_k": min(max(params.top_k, 0), _MAX_COUNT),
            # The engine's numbers are of 32 bits, and 0 would keep nothing.
            "top_p": max(params.top_p, _LEAST_TOP_P),
            "min_p": params.min_p,
            "seed": params.seed,
            "max_tokens": None if params.max_tokens is None else min(params.max_tokens, _MAX_COUNT),
            "min_tokens": min(params.min_tokens, _MAX_COUNT),
            "stop": list(params.stop or ()),
            "include_stop_str_in_output": params.include_stop_str_in_output,
            "stop_token_ids": sorted(set(params.stop_token_ids or ())),
            "ignore_eos": params.ignore_eos,
            "logprobs": self._count(params.logprobs, f"{where}: logprobs"),
            "prompt_logprobs": self._count(params.prompt_logprobs, f"{where}: prompt_logprobs"),
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
            "logit_bias": [(int(token), bias) for token, bias in biases.items()],
            "allowed_token_ids": None if params.allowed_token_ids is None else list(params.allowed_token_ids),
            "bad_words": self._bad_words(params.bad_words or (), where),
            "beam": None,
            "pooling": None,
            "deadline_ms": params.deadline_ms,
            "detokenize": params.detokenize,
            "skip_special_tokens": params.skip_special_tokens,
            "cache_salt": params.cache_salt,
            "skip_reading_prefix_cache": params.skip_reading_prefix_cache,
            "grammar": self._grammar(params.structured_outputs, where),
        }

    def _check_tokens(self, tokens: Sequence[int] | None, where: str) -> None:
        for position, token in enumerate(tokens or ()):
            if token >= self._vocab_size:
                raise InvalidRequest(f"{where}[{position}]: found {shown(token)}, expected 0 to {self._vocab_size - 1}")

    def _count(self, asked: int | None, where: str) -> int | None:
        if asked is not None and asked > self._vocab_size:
            raise InvalidRequest(
                f"{where}: found {shown(asked)}, expected at most {self._vocab_size}, the size of the vocabulary"
            )
        return self._vocab_size if asked == -1 else asked

    def _bad_words(self, words: Sequence[str], where: str) -> list[list[int]]:
        """Each word as it is and as it follows a space: no sequence of tokens twice."""
        tokenizer = self._core.tokenizer if words else None
        found: dict[tuple[int, ...], None] = {}
        for position, word in enumerate(words):
            if tokenizer is None:
                raise InvalidRequest(f"{where}: bad_words: found texts, expected None: the model has no tokenizer")
            for form in (word, f" {word}"):
                tokens = tokenizer.encode(form, add_special_tokens=False)
                if not tokens:
                    raise InvalidRequest(
                        f"{where}: bad_words[{position}]: found {shown(word)}, of which the tokenizer makes no token"
                    )
                found[tuple(tokens)] = None
        return [list(tokens) for tokens in found]

    def _grammar(self, structured: StructuredOutputsParams | None, where: str) -> Grammar | None:
        if structured not in self._grammars:
            from octavo.structured_outputs import lowered_grammar

            try:
                self._grammars[structured] = lowered_grammar(structured, self._core)
            except InvalidRequest as error:
                raise InvalidRequest(f"{where}: {error}") from None
        return self._grammars[structured]
