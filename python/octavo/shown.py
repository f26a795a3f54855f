"""How messages show what a caller handed in."""

from __future__ import annotations

# Python itself refuses to spell integers of more than some thousand digits.
_MOST_BITS = 256
_MOST_CHARACTERS = 200


def shown(value: object) -> str:
    """`repr`, cut where it is long. A value that cannot be spelled is shown by its type."""
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception:  # A caller's own type, or a list with too large an integer in it: the message matters more.
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."
