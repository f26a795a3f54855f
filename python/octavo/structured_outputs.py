"""Outputs that follow a form: a JSON schema, a regular expression, a list of texts or a grammar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json import dumps
from typing import TYPE_CHECKING

from octavo.errors import InvalidRequest
from octavo.shown import shown

if TYPE_CHECKING:
    from octavo._octavo import Core, Grammar

_FORMS = ("json", "json_object", "regex", "choice", "grammar")

# Known to other engines, with the values that ask for nothing.
_NOT_HERE: dict[str, tuple[object, ...]] = {
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
    "whitespace_pattern": (None,),
    "structural_tag": (None,),
}


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """The form that an output has to follow; exactly one is given.

    The form itself is compiled for the model's vocabulary when the request comes in. One that cannot be is refused with
    `InvalidRequest`, which names the field and the place in it; nothing is queued then. docs/structured-output.md has
    the details.
    """

    json: str | Mapping[str, object] | None = None
    """A JSON schema, as a text or as Python values. It is kept as a text."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: Sequence[str] | None = None
    """The texts of which the output is one."""
    grammar: str | None = None
    """A context-free grammar in Lark's notation, whose first rule is called `start`."""

    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        """Check every field, and keep what was given as texts."""
        for name, values in _NOT_HERE.items():
            value = getattr(self, name)
            if not any(value is allowed for allowed in values):
                raise InvalidRequest(f"structured_outputs.{name} is not available: found {shown(value)}, expected None")
        if self.json_object is False:
            self._set("json_object", None)
        given = [name for name in _FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise InvalidRequest(f"structured_outputs: found {found}, expected exactly one of {', '.join(_FORMS)}")
        self._set(given[0], _CHECKS[given[0]](getattr(self, given[0])))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def lowered_grammar(structured: StructuredOutputsParams | None, core: Core) -> Grammar | None:
    """The form, compiled for the vocabulary of `core`.

    Equal forms are compiled once; the interpreter lock is free meanwhile.
    """
    if structured is None:
        return None
    if structured.json is not None:
        return core.compile_grammar("json", str(structured.json))
    if structured.regex is not None:
        return core.compile_grammar("regex", structured.regex)
    if structured.choice is not None:
        return core.compile_grammar("choice", dumps(structured.choice))
    if structured.grammar is not None:
        return core.compile_grammar("grammar", structured.grammar)
    return core.compile_grammar("json_object", "")


def _wrong(name: str, found: object, expected: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs.{name}: found {shown(found)}, expected {expected}")


def _text(name: str, value: object, expected: str) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(name, value, expected)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _wrong(name, value, f"{expected}, without lone surrogates") from None
    return str(value)


def _json(value: object) -> str:
    expected = "a JSON schema as a text or a dict"
    if isinstance(value, str):
        return _text("json", value, expected)
    if not isinstance(value, Mapping):
        raise _wrong("json", value, expected)
    try:
        return dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong("json", value, f"{expected} that JSON can carry ({error})") from None


def _json_object(value: object) -> bool:
    if value is not True:
        raise _wrong("json_object", value, "True, False or None")
    return True


def _regex(value: object) -> str:
    return _text("regex", value, "a regular expression of at least one character")


def _choice(value: object) -> tuple[str, ...]:
    expected = "a list of at least one text"
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence) or not value:
        raise _wrong("choice", value, expected)
    return tuple(
        _text(f"choice[{index}]", item, "a text of at least one character") for index, item in enumerate(value)
    )


def _grammar(value: object) -> str:
    return _text("grammar", value, "a grammar in Lark's notation")


_CHECKS = {"json": _json, "json_object": _json_object, "regex": _regex, "choice": _choice, "grammar": _grammar}
