"""`octavo bench latency MODEL`, `octavo bench startup MODEL` and `octavo bench sampling`."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from octavo.cli.options import UsageError, add_engine_options, engine_settings, load

if TYPE_CHECKING:
    import argparse

    from octavo.bench.latency import Latency
    from octavo.bench.sampling import Agreement
    from octavo.bench.startup import Startup

_MOST_DRAWS = 10_000_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo bench`."""
    benches = parser.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    summary = "prefill and decode of one stream, beside the limits of the machine"
    latency = benches.add_parser("latency", help=summary, description=f"{summary.capitalize()}.", allow_abbrev=False)
    _add_measurement(latency)
    latency.set_defaults(run=run_latency)
    summary = "a fresh process from the import to the first token"
    startup = benches.add_parser("startup", help=summary, description=f"{summary.capitalize()}.", allow_abbrev=False)
    _add_measurement(startup)
    startup.set_defaults(run=run_startup)
    summary = "whether draws follow the distribution that the sampling parameters describe"
    sampling = benches.add_parser("sampling", help=summary, description=f"{summary.capitalize()}.", allow_abbrev=False)
    sampling.add_argument(
        "--draws", type=int, default=200_000, metavar="N", help="draws for each distribution (default: 200000)"
    )
    sampling.set_defaults(run=run_sampling)


def _add_measurement(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, a Hugging Face folder, or a pulled model's name")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="repeats that count (default: 5)")
    parser.add_argument("--output-json", metavar="FILE", help="also write the figures to FILE")
    add_engine_options(parser)


def _output_file(arguments: argparse.Namespace, cleanup: ExitStack) -> TextIO | None:
    """Opened before anything is measured: minutes are not lost to a folder that is not there."""
    if arguments.repeats < 1:
        raise UsageError(f"argument --repeats: found {arguments.repeats}, expected at least 1")
    if not arguments.output_json:
        return None
    return cleanup.enter_context(Path(arguments.output_json).open("w", encoding="utf-8"))


def run_startup(arguments: argparse.Namespace) -> int:
    """Measure, print a table, and write the figures if a file was named."""
    with ExitStack() as cleanup:
        file = _output_file(arguments, cleanup)
        settings = engine_settings(arguments)
        from octavo.bench.startup import measure

        startup = measure(arguments.model, settings, repeats=arguments.repeats, report=_to_stderr)
        print("\n".join(_startup_table(startup)))
        if file is not None:
            file.write(json.dumps(startup.as_dict(), indent=1) + "\n")
    return 0


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def run_latency(arguments: argparse.Namespace) -> int:
    """Measure, print a table, and write the figures if a file was named."""
    with ExitStack() as cleanup:
        file = _output_file(arguments, cleanup)
        from octavo.bench.latency import measure

        llm = cleanup.enter_context(load(arguments))
        latency = measure(llm, repeats=arguments.repeats, report=_to_stderr)
        print("\n".join(_table(latency)))
        if file is not None:
            file.write(json.dumps(latency.as_dict(), indent=1) + "\n")
    return 0


def run_sampling(arguments: argparse.Namespace) -> int:
    """Compare draws with distributions; fail if one of them does not fit."""
    if not 1000 <= arguments.draws <= _MOST_DRAWS:
        raise UsageError(f"argument --draws: found {arguments.draws}, expected 1000 to {_MOST_DRAWS}")
    from octavo.bench.sampling import LEAST_P, measure

    print("vocabulary  parameters                                            kept  chi-square / freedom  p-value")
    found = measure(draws=arguments.draws, report=lambda agreement: print(_line(agreement), flush=True))
    broken = sum(not agreement.holds for agreement in found)
    print(
        f"{len(found) - broken} of {len(found)} distributions fit: p above {LEAST_P}, no token that was filtered out, "
        "the same tokens again"
    )
    return 1 if broken else 0


def _line(agreement: Agreement) -> str:
    verdict = "" if agreement.holds else "  does not fit"
    return (
        f"{agreement.vocab_size:10}  {agreement.filters}  {agreement.tokens_kept:4}  "
        f"{agreement.chi_square:10.1f} / {agreement.degrees_of_freedom:<7}  {agreement.p_value:7.4f}{verdict}"
    )


def _startup_table(startup: Startup) -> list[str]:
    table = [
        "                            median  [least to most]",
        f"import                s {startup.import_s}",
        f"load                  s {startup.load_s}",
        f"first token           s {startup.first_token_s}",
        f"in all                s {startup.total_s}",
    ]
    if startup.resident_bytes.median > 0:
        resident, planned = startup.resident_bytes.median / 1e6, startup.planned_bytes / 1e6
        table.append(
            f"memory above the import: {resident:.0f} MB, of {planned:.0f} MB of weights, KV cache and work memory"
        )
    return table


def _table(latency: Latency) -> list[str]:
    memory_limit, reread_limit = latency.decode_limit(latency.read_gb_s), latency.decode_limit(latency.reread_gb_s)
    megabytes = latency.bytes_per_token / 1e6
    prefill_limit = latency.dot_gops.median * 1e9 / (2 * latency.products_per_token)
    return [
        "                            median  [least to most]",
        f"ttft, 512 tokens      s {latency.ttft_s}",
        f"prefill 512       tok/s {latency.prefill_tok_s}",
        f"decode 32 + 128   tok/s {latency.decode_tok_s}",
        f"read 1 GiB         GB/s {latency.read_gb_s}",
        f"read weights again GB/s {latency.reread_gb_s}",
        f"dot-product peak  Gop/s {latency.dot_gops}",
        f"kernels, cached   Gop/s {latency.kernel_gops}",
        f"decode is {latency.decode_share_of_memory():.0%} of {memory_limit:.0f} tok/s, what memory allows at "
        f"{megabytes:.1f} MB of weights a token,",
        f"and {latency.decode_share():.0%} of {reread_limit:.0f} tok/s, what re-reading as many bytes allows",
        f"prefill is {latency.prefill_share():.0%} of {prefill_limit:.0f} tok/s, the dot-product peak over "
        f"{2 * latency.products_per_token / 1e6:.0f} Mop of layer weights a token,",
        f"and {latency.prefill_share_of_kernels():.0%} of what the kernels of these weights do while they are cached",
    ]
