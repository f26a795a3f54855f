"""`octavo tokenizer export MODEL -o DIR`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.cli.export import add_arguments, print_files

if TYPE_CHECKING:
    import argparse


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo tokenizer`."""
    actions = parser.add_subparsers(title="what to do", metavar="ACTION", required=True)
    summary = "write a model's tokenizer as a Hugging Face folder"
    export = actions.add_parser("export", help=summary, description=f"{summary.capitalize()}.", allow_abbrev=False)
    add_arguments(export)
    export.set_defaults(run=run_export)


def run_export(arguments: argparse.Namespace) -> int:
    """Write the folder and list its files."""
    from octavo.export import export_tokenizer

    print_files(export_tokenizer(arguments.model, arguments.output))
    return 0
