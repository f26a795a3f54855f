"""The kinds of error that octavo raises, besides `FileNotFoundError`."""

from __future__ import annotations


class OctavoError(Exception):
    """Whatever octavo refuses or fails at."""


class InvalidRequest(OctavoError, ValueError):
    """The caller's mistake. It is found before anything is queued; the engine goes on as before."""


class ModelLoadError(OctavoError):
    """A checkpoint cannot be used: the message names file, field, what was found and what was expected."""


class EngineDeadError(OctavoError):
    """The engine has ended: it was closed, it failed, or this process is a fork of the one that owns it."""
