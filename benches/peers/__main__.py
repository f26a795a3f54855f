"""`python -m benches.peers install|prepare|run|quality`: see README.md beside this file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benches.peers.cases import PROSE, SHARED_PREFIX, WORKLOAD, all_cases
from benches.peers.comparison import Bench, Noisy, Row, Turn
from benches.peers.engine import Engine, EngineError, Unsupported
from benches.peers.environments import PEERS, Peer, install, python_of, variables
from benches.peers.quiet import Watch
from benches.peers.table import table
from benches.peers.weights import model_file, prepare, written

WORKERS = Path(__file__).parent / "workers"


def main(words: list[str] | None = None) -> int:
    """Run a command; the exit code is 0 if every pair that was asked for, of what is installed, was measured."""
    arguments = _parser().parse_args(words)
    code: int = arguments.command(arguments)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benches.peers", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    one = commands.add_parser("install", help="make a peer's virtual environment", allow_abbrev=False)
    one.add_argument("peer", choices=list(PEERS))
    one.add_argument("--into", type=Path, required=True, metavar="DIR", help="folder of the environments")
    one.set_defaults(command=_install)

    one = commands.add_parser("prepare", help="write the weights in the peers' formats", allow_abbrev=False)
    _add_common(one)
    one.set_defaults(command=_prepare)

    one = commands.add_parser("run", help="measure octavo and the peers in turn", allow_abbrev=False)
    _add_common(one)
    names = list(all_cases())
    every = [f"{peer.name}:{weights}" for peer in PEERS.values() for weights in peer.formats]
    one.add_argument("--cases", type=_listed(names), default=names, metavar="A,B", help=f"of {', '.join(names)}")
    one.add_argument("--peers", type=_listed(every), default=every, metavar="A,B", help=f"of {', '.join(every)}")
    one.add_argument("--pairs", type=int, default=7, metavar="N", help="pairs that count (default: 7)")
    one.add_argument("--tries", type=int, default=20, metavar="N", help="most times a run is made (default: 20)")
    one.add_argument("--patience", type=float, default=600, metavar="S", help="wait for a quiet machine (default: 600)")
    one.add_argument("--workload", type=Path, default=WORKLOAD, metavar="FILE", help="requests of the case mixed")
    one.add_argument("--shared-prefix", type=Path, default=SHARED_PREFIX, metavar="FILE", help="of shared_prefix")
    one.add_argument("--output-json", type=Path, metavar="FILE", help="also write all that was measured")
    one.set_defaults(command=_run)

    one = commands.add_parser("quality", help="how far octavo and llama.cpp are from float32", allow_abbrev=False)
    _add_common(one)
    files = PEERS["llama.cpp"].formats
    one.add_argument("--formats", type=_listed(list(files)), default=["Q4_1"], metavar="A,B",
                     help=f"of {', '.join(files)} (default: Q4_1)")  # fmt: skip
    one.add_argument("--text", type=Path, default=PROSE, metavar="FILE", help="what is predicted")
    one.add_argument("--length", type=int, default=448, metavar="N", help="tokens of a sequence (default: 448)")
    one.add_argument("--output-json", type=Path, metavar="FILE", help="also write the figures")
    one.set_defaults(command=_quality)
    return parser


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a .gguf file in Q4_1, or a pulled model's name")
    parser.add_argument("--environments", type=Path, required=True, metavar="DIR", help="what `install` filled")
    parser.add_argument("--octavo-python", type=Path, default=Path(sys.executable), metavar="PATH",
                        help="interpreter with a release build of octavo (default: this one)")  # fmt: skip


def _listed(known: list[str]) -> Any:
    def parse(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"found {name!r}, expected some of {', '.join(known)}")
        return found

    return parse


def _install(arguments: argparse.Namespace) -> int:
    install(arguments.peer, arguments.into)
    return 0


def _prepare(arguments: argparse.Namespace) -> int:
    model = model_file(arguments.model, arguments.octavo_python)
    formats = sorted({weights for peer in PEERS.values() for weights in peer.formats} - {"Q4_1"})
    prepare(model, arguments.environments, arguments.octavo_python, formats, _say)
    return 0


def _run(arguments: argparse.Namespace) -> int:
    known = all_cases(workload=arguments.workload, shared_prefix=arguments.shared_prefix)
    cases = [known[name] for name in arguments.cases]
    model = model_file(arguments.model, arguments.octavo_python)
    cpus = sorted(os.sched_getaffinity(0))
    watch = Watch()
    bench = Bench(watch, patience=arguments.patience, tries=arguments.tries, report=_say)
    start = partial(_start, "octavo", arguments.octavo_python, "run_octavo.py", model, cpus, dict(os.environ))
    rows: list[Row] = []
    engines: dict[str, dict[str, Any]] = {}
    with start() as octavo:
        watch.sessions.add(octavo.session)
        engines["octavo"] = octavo.ready()
        octavo.stop()
        ours = Turn(octavo, start, watch)
        for name in arguments.peers:
            peer, weights = PEERS[name.partition(":")[0]], name.partition(":")[2]
            fresh = [Row(case, peer.name, weights) for case in cases]
            rows += fresh
            try:
                _measure(bench, ours, peer, fresh, arguments, cpus, model, engines)
            except (EngineError, Noisy) as reason:
                for row in fresh:
                    row.note = row.note or ("" if len(row.octavo) == arguments.pairs else str(reason))
                _say(str(reason))
            _write(arguments, rows, engines, cpus)
    print("\n".join(table(rows, engines["octavo"])))
    return 0 if all(len(row.octavo) == arguments.pairs or row.note in _EXCUSED for row in rows) else 1


_EXCUSED = ("not installed",)


def _measure(
    bench: Bench,
    ours: Turn,
    peer: Peer,
    rows: list[Row],
    arguments: argparse.Namespace,
    cpus: list[int],
    model: Path,
    engines: dict[str, dict[str, Any]],
) -> None:
    """Fill the rows of a peer; what is not there is noted in them."""
    python = python_of(peer, arguments.environments)
    file = written(rows[0].weights, model, arguments.environments)
    missing = "not installed" if python is None else "" if file.exists() else f"{file} missing: run `prepare`"
    if python is None or missing:
        _say(f"{peer.name} {rows[0].weights}: {missing}")
        for row in rows:
            row.note = missing
        return
    label = f"{peer.name} {rows[0].weights}"
    start = partial(_start, label, python, peer.worker, file, cpus, variables(peer, python, cpus))
    with start() as engine:
        bench.watch.sessions.add(engine.session)
        engines[label] = engine.ready()
        engine.stop()
        theirs = Turn(engine, start, bench.watch)
        for row in rows:
            _one(bench, row, ours, theirs, arguments.pairs)


def _one(bench: Bench, row: Row, ours: Turn, theirs: Turn, pairs: int) -> None:
    try:
        bench.compare(row, ours, theirs, lambda: ours.engine.ask({"case": "limits"}), pairs)
    except (Unsupported, Noisy) as reason:
        row.note = str(reason)
        _say(f"{row.case.name}: {reason}")


def _quality(arguments: argparse.Namespace) -> int:
    # numpy is needed for this command alone.
    from benches.peers.quality import Line, Quality, table

    lines: list[Line] = []
    try:
        quality = Quality(arguments.environments, arguments.octavo_python, _say)
        model = model_file(arguments.model, arguments.octavo_python)
        sequences = quality.sequences(model, arguments.text, arguments.length)
        for weights in arguments.formats:
            lines += quality.measure(weights, model, sequences)
            _write_json(arguments, {"sequences": sequences, "lines": [line.figures() for line in lines]})
    except EngineError as reason:
        _say(str(reason))
        return 1
    print("\n".join(table(lines)))
    missed = [reason for line in lines for reason in line.missed()]
    print("\n".join(missed or ["octavo holds every limit."]))
    return 1 if missed else 0


def _start(name: str, python: Path, worker: str, model: Path, cpus: list[int], environment: dict[str, str]) -> Engine:
    command = [str(python), str(WORKERS / worker), "--model", str(model), "--threads", str(len(cpus))]
    return Engine(name, command, environment)


def _write(arguments: argparse.Namespace, rows: list[Row], engines: dict[str, dict[str, Any]], cpus: list[int]) -> None:
    _write_json(arguments, {"cpus": cpus, "engines": engines, "rows": [row.as_dict() for row in rows]})


def _write_json(arguments: argparse.Namespace, found: dict[str, Any]) -> None:
    if arguments.output_json is not None:
        text = json.dumps({"model": arguments.model} | found, indent=1)
        arguments.output_json.write_text(text + "\n", encoding="utf-8")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
