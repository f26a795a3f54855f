"""`octavo chat MODEL`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from octavo.cli.generate import NO_TOKEN
from octavo.cli.options import (
    UsageError,
    add_engine_options,
    add_sampling_options,
    load,
    sampling_params,
    sampling_settings,
)
from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    import argparse

    from octavo import LLM, SamplingParams

Message = dict[str, str]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo chat`."""
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, a Hugging Face folder, or a pulled model's name")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the talk")
    add_sampling_options(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the user leaves."""
    settings = {"max_tokens": None} | sampling_settings(arguments)
    if settings.get("n", 1) != 1:
        raise UsageError(f"argument --n: found {settings['n']}, expected 1: a talk goes on from one answer")
    beginning: list[Message] = [{"role": "system", "content": arguments.system}] if arguments.system else []
    with load(arguments) as llm:
        params = sampling_params(llm, settings)
        print("Ctrl-C stops an answer, /new starts over, /exit or Ctrl-D leaves.")
        messages = list(beginning)
        while (question := _ask()) is not None:
            if question == "/new":
                messages = list(beginning)
            elif question:
                messages.append({"role": "user", "content": question})
                answered = _answer(llm, messages, params)
                if not answered and not sys.stdin.isatty():
                    return 1
    return 0


def _ask() -> str | None:
    """The next line of the user; None when the user leaves."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  # gives `input` a history and cursor keys
    try:
        line = input("> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        return ""
    return None if line == "/exit" else line


def _answer(llm: LLM, messages: list[Message], params: SamplingParams) -> bool:
    """Print the answer as it comes and add it to `messages`; a question that cannot be answered is taken back.

    False when the model failed.
    """
    text = ""
    reason = None
    try:
        for delta in llm.stream_chat(messages, params):
            print(delta.text, end="", flush=True)
            text += delta.text
            reason = delta.finish_reason
    except InvalidRequest as error:
        messages.pop()
        print(f"octavo: {error} (/new starts over)", file=sys.stderr)
        return True
    except KeyboardInterrupt:
        pass
    print()
    if reason == "error":
        messages.pop()
        print(f"octavo: error: no token could be drawn: {NO_TOKEN}", file=sys.stderr)
        return False
    messages.append({"role": "assistant", "content": text})
    return True
