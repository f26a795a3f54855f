"""`octavo export MODEL -o DIR`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable
    from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo export`."""
    add_arguments(parser)
    parser.set_defaults(run=run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is exported, and where to."""
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, a Hugging Face folder, or a pulled model's name")
    parser.add_argument("-o", "--output", metavar="DIR", required=True, help="the folder to make; must not have files")


def run(arguments: argparse.Namespace) -> int:
    """Write the folder and list its files."""
    from octavo.export import export_model

    print_files(export_model(arguments.model, arguments.output))
    return 0


def print_files(files: Iterable[Path]) -> None:
    """One line a file: its size in bytes, and where it is."""
    for path in files:
        print(f"{path.stat().st_size:14,}  {path}")
