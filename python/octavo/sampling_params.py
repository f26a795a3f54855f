"""How a request's tokens are drawn or searched for, and when it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import TYPE_CHECKING

from octavo.checks import flag, integer, number, text, texts, token_id_key, token_ids, wrong
from octavo.errors import InvalidRequest
from octavo.shown import shown

if TYPE_CHECKING:
    from octavo.structured_outputs import StructuredOutputsParams

MAX_STOPS = 64
"""The most stop strings of a request."""
MAX_BAD_WORDS = 1024
"""The most bad words of a request."""
MAX_WORD = 1024
"""The most characters of a stop string or a bad word."""

_MAX_SEED = 2**64 - 1
_MAX_CHOICES = 2**32 - 1
_LARGEST_FLOAT32 = 3.4028234663852886e38
_LARGEST_FLOAT64 = 1.7976931348623157e308


class RequestOutputKind(Enum):
    """What a reader of an `AsyncLLM` stream gets with each output."""

    CUMULATIVE = 0
    """Everything from the first token on."""
    DELTA = 1
    """Only what is new since the output that was read before."""
    FINAL_ONLY = 2
    """One output, when the request has ended."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are drawn, and when it ends.

    The order is: logit_bias, then the masks (allowed_token_ids, bad_words, min_tokens, structured_outputs), the
    penalties, the temperature, the filters min_p, top_k and top_p, then noise; the largest wins, the lowest id on a
    tie. Every field is checked here: a wrong one raises `InvalidRequest` with its name, what was found and what was
    expected. What depends on the model is checked when a request is made.
    """

    n: int = 1
    """How many continuations to generate. They share the prompt's KV blocks and differ in their noise: number 0 is what
    a request for one gives with the same seed, and all of them are equal if the temperature is 0. Prompt and
    `max_tokens` must fit into the KV pool for all of them; without `max_tokens` they divide what the pool holds."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token that the output has already; from -2 to 2. The prompt does not count."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the output has it already; from -2 to 2. The prompt does
    not count."""
    repetition_penalty: float = 1.0
    """Divides the logit of every token that prompt or output have already if it is positive, and multiplies it
    otherwise; from 0.01 to 100."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy. Values below 1e-5 are greedy too."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probability reaches this; above 0, at most 1."""
    top_k: int = 0
    """Keep the `top_k` likeliest tokens; 0 and -1 keep all, as does any number from the vocabulary's size on."""
    min_p: float = 0.0
    """Keep tokens at least this likely, relative to the likeliest; from 0 to 1."""
    seed: int | None = None
    """Keys the request's noise, from 0 to 2^64 - 1. None takes a fresh one, which the output reports."""
    stop: str | Sequence[str] | None = None
    """Texts that end the request: at most 64, of at most 1024 characters each. The match that is complete first counts,
    wherever in a token it begins or ends; of several that end there, the longest. The text ends before it, and
    `token_ids` with the token that completes it. It is looked for in the output alone, and needs `detokenize`."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the request, besides the model's own. They stand in `token_ids` and not in the text."""
    bad_words: Sequence[str] | None = None
    """Texts that the output does not have: at most 1024, of at most 1024 characters each. A word is banned as the
    tokens that the tokenizer makes of it, alone and after a space: where the output ends with all of these but the
    last, the last is not drawn. The same letters may still come from other tokens, or begin in the prompt."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be drawn. The model's end tokens are drawn only if they are among them, or where
    `structured_outputs` is complete."""
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = None
    """Added to the logits of tokens before anything else: a number from -100 to 100 by token id, which may be spelled
    in digits."""
    ignore_eos: bool = False
    """Go on past the model's own end tokens. `stop_token_ids` still count."""
    max_tokens: int | None = 16
    """The most tokens to generate; None goes on to the context's end."""
    min_tokens: int = 0
    """Neither the model's end tokens nor `stop_token_ids` are drawn before this many tokens are there, and a stop
    string that these complete is text like any other; at most `max_tokens`. Where `structured_outputs` allows nothing
    but the end, it ends earlier."""
    logprobs: int | None = None
    """Report the log-probability of each token and of this many likeliest ones; -1 is the whole vocabulary. They are
    those of the distribution after bias, masks and penalties, before temperature and filters."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first, given what is before it. Bias, masks and penalties do not
    act on the prompt."""
    detokenize: bool = True
    """Turn the tokens into text; without it the text is empty."""
    skip_special_tokens: bool = True
    """Control tokens give no text."""
    include_stop_str_in_output: bool = False
    """The text ends after the stop string that was found, and not before it."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What a reader of an `AsyncLLM` stream gets with each output. It has no meaning for `LLM.generate`, which gives
    one output a prompt, nor for `LLM.stream`, which gives what each step added."""
    structured_outputs: StructuredOutputsParams | None = None
    """What the output has to follow: a JSON schema, a regex, a choice or a grammar. It is compiled before the request
    is queued."""
    speculative: bool = True
    """False: no drafts for this request. No effect yet, since nothing drafts."""
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt, though the prefix cache may hold its beginning."""
    cache_salt: str | None = None
    """KV blocks are shared only with requests of the same salt, so that nobody learns from the time to the first token
    what others have asked. None is a salt of its own."""
    user: str | None = None
    """Whom the request is for. No effect yet."""
    deadline_ms: float | None = None
    """How many milliseconds after its submission the request ends at the latest, with the finish reason "deadline" and
    what it has by then; one that still waits in the queue ends without a token."""

    def __post_init__(self) -> None:
        """Check every field, and keep the values in their plain types."""
        self._check_numbers()
        self._check_lengths()
        self._check_tokens()
        self._check_texts()
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
            "speculative",
            "skip_reading_prefix_cache",
        ):
            flag(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise wrong("output_kind", self.output_kind, "a RequestOutputKind")
        if self.structured_outputs is not None:
            from octavo.structured_outputs import StructuredOutputsParams

            if not isinstance(self.structured_outputs, StructuredOutputsParams):
                raise wrong("structured_outputs", self.structured_outputs, "None or a StructuredOutputsParams")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        for name, expected, least, most in (
            ("presence_penalty", "a number from -2 to 2", -2.0, 2.0),
            ("frequency_penalty", "a number from -2 to 2", -2.0, 2.0),
            ("repetition_penalty", "a number from 0.01 to 100", 0.01, 100.0),
            ("temperature", "a finite number from 0", 0.0, _LARGEST_FLOAT32),
            ("top_p", "a number above 0 and at most 1", 0.0, 1.0),
            ("min_p", "a number from 0 to 1", 0.0, 1.0),
        ):
            self._set(name, number(name, getattr(self, name), expected, least, most))
        if self.top_p == 0.0:
            raise wrong("top_p", self.top_p, "a number above 0 and at most 1")
        self._set("top_k", integer("top_k", self.top_k, "-1, 0 or a positive integer", -1, None))
        if self.seed is not None:
            self._set("seed", integer("seed", self.seed, f"None or an integer from 0 to {_MAX_SEED}", 0, _MAX_SEED))
        if self.deadline_ms is not None:
            expected = "None or a finite number above 0"
            self._set("deadline_ms", number("deadline_ms", self.deadline_ms, expected, 0.0, _LARGEST_FLOAT64))
            if self.deadline_ms == 0.0:
                raise wrong("deadline_ms", self.deadline_ms, expected)

    def _check_lengths(self) -> None:
        self._set("n", integer("n", self.n, f"an integer from 1 to {_MAX_CHOICES}", 1, _MAX_CHOICES))
        if self.max_tokens is not None:
            self._set("max_tokens", integer("max_tokens", self.max_tokens, "None or an integer from 1", 1, None))
        at_most = "" if self.max_tokens is None else f" to {shown(self.max_tokens)}, which is max_tokens"
        expected = f"an integer from 0{at_most}"
        self._set("min_tokens", integer("min_tokens", self.min_tokens, expected, 0, self.max_tokens))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, integer(name, getattr(self, name), "None, -1 or an integer from 0", -1, None))

    def _check_tokens(self) -> None:
        if self.stop_token_ids is not None:
            self._set("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids: found an empty list, expected at least one token, or None")
        if self.logit_bias is not None:
            self._set("logit_bias", _biases(self.logit_bias) or None)

    def _check_texts(self) -> None:
        """Lists of nothing mean none."""
        if self.stop is not None:
            stops = (self.stop,) if isinstance(self.stop, str) else self.stop
            expected = "None, a text or a list of texts"
            self._set("stop", texts("stop", stops, expected, most=MAX_STOPS, longest=MAX_WORD) or None)
            if self.stop is not None and self.detokenize is False:
                raise wrong("stop", self.stop, "None where detokenize is False: it is looked for in the text")
        if self.bad_words is not None:
            expected = "None or a list of texts"
            found = texts("bad_words", self.bad_words, expected, most=MAX_BAD_WORDS, longest=MAX_WORD)
            self._set("bad_words", found or None)
        for name in ("cache_salt", "user"):
            if getattr(self, name) is not None:
                expected = "None or a text of at least one character"
                self._set(name, text(name, getattr(self, name), expected))


def _biases(given: object) -> dict[int, float]:
    """A copy by token id."""
    if not isinstance(given, Mapping):
        raise wrong("logit_bias", given, "None or an object from token ids to numbers from -100 to 100")
    biases: dict[int, float] = {}
    for key, bias in given.items():
        token = token_id_key("logit_bias", key)
        if token in biases:
            raise InvalidRequest(f"logit_bias: found token {token} twice, expected each once")
        biases[token] = number(f"logit_bias[{token}]", bias, "a number from -100 to 100", -100.0, 100.0)
    return biases


@dataclass(frozen=True)
class BeamSearchParams:
    """A search for the likeliest continuations: at each step the `beam_width` best of all that go on are kept.

    A sequence's score is the sum of its log-probabilities divided by its length to the power of `length_penalty`; the
    length counts the prompt and leaves out the end token. Nothing is drawn: the outcome depends on prompt and model
    alone. Continuations that have reached the model's end token leave the beam and are ranked with those that
    `max_tokens` ends.
    """

    beam_width: int
    """How many sequences are kept at each step, and how many come back."""
    max_tokens: int
    """The most tokens to generate."""
    _: KW_ONLY
    ignore_eos: bool = False
    """Go on past the model's own end tokens."""
    temperature: float = 0.0
    """Only 0: the log-probabilities are those of the model."""
    length_penalty: float = 1.0
    """From -10 to 10. Above 0 favours longer sequences, since their sums are the more negative ones; 0 compares the
    sums."""
    include_stop_str_in_output: bool = False
    """Only False: a beam search has no stop strings."""

    def __post_init__(self) -> None:
        """Check every field, and keep the values in their plain types."""
        most = _MAX_CHOICES // 2
        width = integer("beam_width", self.beam_width, f"an integer from 1 to {most}", 1, most)
        object.__setattr__(self, "beam_width", width)
        object.__setattr__(self, "max_tokens", integer("max_tokens", self.max_tokens, "an integer from 1", 1, None))
        penalty = number("length_penalty", self.length_penalty, "a number from -10 to 10", -10.0, 10.0)
        object.__setattr__(self, "length_penalty", penalty)
        flag("ignore_eos", self.ignore_eos)
        object.__setattr__(self, "temperature", number("temperature", self.temperature, "0", 0.0, 0.0))
        if flag("include_stop_str_in_output", self.include_stop_str_in_output):
            raise wrong("include_stop_str_in_output", True, "False: a beam search has no stop strings")
