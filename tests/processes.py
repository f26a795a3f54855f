"""Processes that a test interrupts."""

import signal


def interruptible() -> None:
    """For `preexec_fn`: Ctrl-C counts, even where the tests run in the background and a shell has turned it off."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
