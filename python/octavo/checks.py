"""Checks of single values that callers hand in. Each refuses by name, with what was found and what was expected."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

from octavo.errors import InvalidRequest
from octavo.shown import shown

MAX_TOKEN = 2**32 - 1
"""The largest token id that can be asked for; the vocabulary's own limit comes later."""


def wrong(name: str, found: object, expected: str) -> InvalidRequest:
    """The error that says so."""
    return InvalidRequest(f"{name}: found {shown(found)}, expected {expected}")


def number(name: str, value: object, expected: str, least: float, most: float) -> float:
    """A number within bounds, as a plain float."""
    if isinstance(value, (bool, str, bytes)):
        raise wrong(name, value, expected)
    try:
        found = float(value)  # type: ignore[arg-type]  # whatever can be a float is taken, such as a numpy scalar
    except (TypeError, ValueError, OverflowError):
        raise wrong(name, value, expected) from None
    if math.isnan(found) or not least <= found <= most:
        raise wrong(name, value, expected)
    return found


def integer(name: str, value: object, expected: str, least: int, most: int | None) -> int:
    """An integer within bounds, as a plain one."""
    if isinstance(value, bool):
        raise wrong(name, value, expected)
    try:
        found = operator.index(value)  # type: ignore[arg-type]  # whatever is an integer is taken, such as a numpy scalar
    except TypeError:
        raise wrong(name, value, expected) from None
    if found < least or (most is not None and found > most):
        raise wrong(name, value, expected)
    return found


def flag(name: str, value: object) -> bool:
    """True or False, and nothing that only counts as one of them."""
    if not isinstance(value, bool):
        raise wrong(name, value, "True or False")
    return value


def text(name: str, value: object, expected: str, *, most: int | None = None) -> str:
    """A text of at least one character, of at most `most` of them, that UTF-8 can carry."""
    if not isinstance(value, str) or not value:
        raise wrong(name, value, expected)
    if most is not None and len(value) > most:
        raise InvalidRequest(f"{name}: found {len(value)} characters, expected at most {most}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise wrong(name, value, f"{expected}, without lone surrogates") from None
    return str(value)


def texts(name: str, value: object, expected: str, *, most: int, longest: int) -> tuple[str, ...]:
    """Texts as `text` takes them, at most `most`."""
    listed = _listed(name, value, expected)
    if len(listed) > most:
        raise InvalidRequest(f"{name}: found {len(listed)} texts, expected at most {most}")
    one = "a text of at least one character"
    return tuple(text(f"{name}[{index}]", item, one, most=longest) for index, item in enumerate(listed))


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """Token ids, whatever the vocabulary."""
    expected = f"integers from 0 to {MAX_TOKEN}"
    listed = _listed(name, value, f"a list of {expected}")
    return tuple(integer(f"{name}[{index}]", item, expected, 0, MAX_TOKEN) for index, item in enumerate(listed))


def token_id_key(name: str, key: object) -> int:
    """A token id as a key: an integer, or its digits, since JSON has no other keys."""
    expected = f"token ids from 0 to {MAX_TOKEN} as keys"
    if isinstance(key, str):
        # Python's int() also takes signs, blanks and the digits of other scripts, and refuses thousands of digits.
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(MAX_TOKEN))):
            raise wrong(name, key, expected)
        return integer(name, int(key), expected, 0, MAX_TOKEN)
    return integer(name, key, expected, 0, MAX_TOKEN)


def _listed(name: str, value: object, expected: str) -> list[object]:
    """The items of a list; a text or an object is none."""
    if isinstance(value, (str, bytes, Mapping)):
        raise wrong(name, value, expected)
    try:
        return list(value)  # type: ignore[call-overload, no-any-return]
    except TypeError:
        raise wrong(name, value, expected) from None
