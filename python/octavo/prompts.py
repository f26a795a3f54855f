"""What callers hand in as prompts, as plain token ids, or refused with the place that is wrong."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from octavo.errors import InvalidRequest
from octavo.shown import shown

if TYPE_CHECKING:
    from octavo._octavo import Tokenizer


class TextPrompt(TypedDict):
    """A text to continue."""

    prompt: str


class TokensPrompt(TypedDict, total=False):
    """Token ids to continue; `prompt` is only reported back."""

    prompt_token_ids: Sequence[int]
    prompt: str


Prompt: TypeAlias = str | Sequence[int] | TextPrompt | TokensPrompt
Prompts: TypeAlias = Prompt | Sequence[Prompt]


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as the engine takes it."""

    text: str | None
    token_ids: list[int]


def tokenized_prompts(prompts: object, *, tokenizer: Tokenizer | None, vocab_size: int) -> list[TokenizedPrompt]:
    """One prompt or a list of them, checked and encoded. The first that is wrong refuses all."""
    reader = _Reader(tokenizer, vocab_size)
    return [reader.read(prompt, index) for index, prompt in enumerate(_listed(prompts))]


def tokenized_prompt(prompt: object, *, tokenizer: Tokenizer | None, vocab_size: int) -> TokenizedPrompt:
    """A single prompt, checked and encoded."""
    return _Reader(tokenizer, vocab_size).read(prompt, 0)


def _listed(prompts: object) -> Sequence[object]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not _is_list(prompts):
        raise InvalidRequest(f"prompts: found {type(prompts).__name__}, expected a text, token ids, or a list of these")
    assert isinstance(prompts, Sequence)
    if not prompts:
        raise InvalidRequest("prompts: found an empty list, expected at least one prompt with at least one token")
    # A list that begins with a number is one prompt; whatever else is in it is then a wrong token id.
    return prompts if isinstance(prompts[0], (str, Mapping)) or _is_list(prompts[0]) else [prompts]


def _is_list(value: object) -> bool:
    """Lists and tuples; a text is none."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


class _Reader:
    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def read(self, prompt: object, index: int) -> TokenizedPrompt:
        """Check and encode one prompt."""
        if isinstance(prompt, str):
            read = TokenizedPrompt(prompt, self._encoded(prompt, index))
        elif isinstance(prompt, Mapping):
            read = self._from_mapping(prompt, index)
        elif _is_list(prompt):
            read = TokenizedPrompt(None, self._checked(prompt, index))
        else:
            raise InvalidRequest(f"prompt {index}: found {type(prompt).__name__}, expected a text or token ids")
        if not read.token_ids:
            raise InvalidRequest(f"prompt {index}: found 0 tokens, expected at least 1 to continue from")
        return read

    def _from_mapping(self, prompt: Mapping[object, object], index: int) -> TokenizedPrompt:
        for name in prompt:
            if name not in ("prompt", "prompt_token_ids"):
                raise InvalidRequest(f"prompt {index}: {shown(name)} is not known, expected prompt or prompt_token_ids")
        text = prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise InvalidRequest(f"prompt {index}: prompt: found {type(text).__name__}, expected a text")
        if "prompt_token_ids" in prompt:
            return TokenizedPrompt(text, self._checked(prompt["prompt_token_ids"], index))
        if text is None:
            raise InvalidRequest(f"prompt {index}: found neither prompt nor prompt_token_ids, expected one of them")
        return TokenizedPrompt(text, self._encoded(text, index))

    def _encoded(self, text: str, index: int) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequest(f"prompt {index}: found a text, expected token ids: the model has no tokenizer")
        try:
            ids = self._tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"prompt {index}: found a lone surrogate at {error.start}, expected text") from None
        return self._checked(ids, index)

    def _checked(self, ids: object, index: int) -> list[int]:
        return checked_token_ids(ids, where=f"prompt {index}", vocab_size=self._vocab_size)


def checked_token_ids(ids: object, *, where: str, vocab_size: int) -> list[int]:
    """Plain integers below `vocab_size`, or refused with the position of the first that is none."""
    if not _is_list(ids):
        raise InvalidRequest(f"{where}: found {type(ids).__name__}, expected a list of token ids")
    assert isinstance(ids, Sequence)
    checked = []
    for position, token in enumerate(ids):
        number = _as_integer(token)
        if number is None or not 0 <= number < vocab_size:
            raise InvalidRequest(
                f"{where}: token id {shown(token)} at position {position}, "
                f"expected an integer from 0 to {vocab_size - 1}"
            )
        checked.append(number)
    return checked


def _as_integer(value: object) -> int | None:
    """Whatever is an integer, such as a numpy scalar; True is none."""
    if type(value) is int:
        return value
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
