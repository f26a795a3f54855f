"""How a request's tokens are drawn, and when it ends."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import Enum

from octavo.errors import InvalidRequest
from octavo.shown import shown

_MAX_SEED = 2**64 - 1
_MAX_TOKEN = 2**32 - 1
_MAX_CHOICES = 2**32 - 1
_LARGEST_FLOAT32 = 3.4028234663852886e38

# Fields that have no effect yet: only their default is taken.
_LATER = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
    "min_tokens",
    "prompt_logprobs",
    "include_stop_str_in_output",
    "output_kind",
    "structured_outputs",
    "speculative",
    "user",
    "deadline_ms",
)


class RequestOutputKind(Enum):
    """What a streaming caller gets with each step."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are drawn, and when it ends.

    The order is: temperature, then the filters min_p, top_k and top_p. A temperature of 0 is greedy, with ties to the
    lowest id. Every field is checked here: a wrong one raises `InvalidRequest` with its name, what was found and what
    was expected.
    """

    n: int = 1
    """How many continuations to generate. They share the prompt's KV blocks and differ in their noise: number 0 is what
    a request for one gives with the same seed, and all of them are equal if the temperature is 0. Prompt and
    `max_tokens` must fit into the KV pool for all of them; without `max_tokens` they divide what the pool holds."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy. Values below 1e-5 are greedy too."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches this; above 0, at most 1."""
    top_k: int = 0
    """Keep the `top_k` likeliest tokens; 0 and -1 keep all."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the likeliest; from 0 to 1."""
    seed: int | None = None
    """Keys the request's noise, from 0 to 2^64 - 1. None takes a fresh one, which the output reports."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the request, besides the model's own. They stand in `token_ids` and not in the text."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens. `stop_token_ids` still count."""
    max_tokens: int | None = 16
    """The most tokens to generate; None goes on to the context's end."""
    logprobs: int | None = None
    """Report the log-probability of each token and of this many likeliest ones; -1 is the whole vocabulary."""
    detokenize: bool = True
    """Turn the tokens into text; without it the text is empty."""
    skip_special_tokens: bool = True
    """Control tokens give no text."""
    cache_salt: str | None = None
    """KV blocks are shared only with requests of the same salt, so that nobody learns from the time to the first token
    what others have asked. None is a salt of its own."""
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt, though the prefix cache may hold its beginning."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: object | None = None
    speculative: bool = True
    user: str | None = None
    deadline_ms: float | None = None

    def __post_init__(self) -> None:
        """Check every field, and keep the numbers in their plain types."""
        self._refuse_what_comes_later()
        self._set("n", _integer("n", self.n, f"an integer from 1 to {_MAX_CHOICES}", 1, _MAX_CHOICES))
        self._set(
            "temperature", _number("temperature", self.temperature, "a finite number from 0", 0.0, _LARGEST_FLOAT32)
        )
        self._set("top_p", _number("top_p", self.top_p, "a number above 0 and at most 1", 0.0, 1.0))
        if self.top_p == 0.0:
            raise _wrong("top_p", self.top_p, "a number above 0 and at most 1")
        self._set("min_p", _number("min_p", self.min_p, "a number from 0 to 1", 0.0, 1.0))
        self._set("top_k", _integer("top_k", self.top_k, "-1, 0 or a positive integer", -1, None))
        if self.seed is not None:
            self._set("seed", _integer("seed", self.seed, f"None or an integer from 0 to {_MAX_SEED}", 0, _MAX_SEED))
        if self.max_tokens is not None:
            self._set("max_tokens", _integer("max_tokens", self.max_tokens, "None or an integer from 1", 1, None))
        if self.logprobs is not None:
            self._set("logprobs", _integer("logprobs", self.logprobs, "None, -1 or an integer from 0", -1, None))
        if self.stop_token_ids is not None:
            self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.cache_salt is not None:
            self._set("cache_salt", _salt(self.cache_salt))
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "skip_reading_prefix_cache"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _refuse_what_comes_later(self) -> None:
        for field in fields(self):
            if field.name in _LATER and field.default is not MISSING:
                value = getattr(self, field.name)
                if not (_same(value, field.default) or _names_nothing(field.name, value)):
                    raise InvalidRequest(
                        f"{field.name} is not available yet: found {shown(value)}, expected {field.default!r}"
                    )
                self._set(field.name, field.default)


def _same(value: object, default: object) -> bool:
    """True == 1 and 0.0 == False, but neither is what a caller means. Only numbers are compared: arrays answer many."""
    if value is default:
        return True
    if isinstance(value, bool) or isinstance(default, bool) or not isinstance(default, (int, float)):
        return False
    return isinstance(value, (int, float, numbers.Real)) and value == default


def _names_nothing(name: str, value: object) -> bool:
    """An empty list of stops means none, as do no banned words and no biases."""
    kinds = {"stop": (list, tuple), "bad_words": (list, tuple), "logit_bias": (Mapping,)}
    return isinstance(value, kinds.get(name, ())) and not value


def _wrong(name: str, found: object, expected: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: found {shown(found)}, expected {expected}")


def _number(name: str, value: object, expected: str, least: float, most: float) -> float:
    if isinstance(value, (bool, str, bytes)):
        raise _wrong(name, value, expected)
    try:
        number = float(value)  # type: ignore[arg-type]  # whatever can be a float is taken, such as a numpy scalar
    except (TypeError, ValueError, OverflowError):
        raise _wrong(name, value, expected) from None
    if math.isnan(number) or not least <= number <= most:
        raise _wrong(name, value, expected)
    return number


def _integer(name: str, value: object, expected: str, least: int, most: int | None) -> int:
    if isinstance(value, bool):
        raise _wrong(name, value, expected)
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # whatever is an integer is taken, such as a numpy scalar
    except TypeError:
        raise _wrong(name, value, expected) from None
    if number < least or (most is not None and number > most):
        raise _wrong(name, value, expected)
    return number


def _salt(value: object) -> str:
    expected = "None or a text of at least one character"
    if not isinstance(value, str) or not value:
        raise _wrong("cache_salt", value, expected)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong("cache_salt", value, f"{expected}, without lone surrogates") from None
    return str(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    expected = f"integers from 0 to {_MAX_TOKEN}"
    if isinstance(value, (str, bytes, Mapping)):
        raise _wrong(name, value, f"a list of {expected}")
    try:
        values = list(value)  # type: ignore[call-overload]
    except TypeError:
        raise _wrong(name, value, f"a list of {expected}") from None
    return tuple(_integer(f"{name}[{index}]", item, expected, 0, _MAX_TOKEN) for index, item in enumerate(values))
