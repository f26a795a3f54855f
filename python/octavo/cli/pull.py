"""`octavo pull NAME`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.models import BUNDLED

if TYPE_CHECKING:
    import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo pull`."""
    parser.add_argument("name", metavar="NAME", choices=tuple(BUNDLED), help=f"one of: {', '.join(BUNDLED)}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fetch the model and say where it is."""
    from octavo.pull import pull

    pulled = pull(arguments.name, report=print)
    print(f"{arguments.name} is {'now' if pulled.downloaded else 'already'} at {pulled.path}")
    return 0
