"""octavo and a peer in turn: A B A B, until enough pairs were quiet."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from benches.peers.quiet import MOST_BY_OTHERS, Usage, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from benches.peers.cases import Case
    from benches.peers.engine import Engine


class Noisy(Exception):
    """The machine did not become quiet, or no run of many was."""


@dataclass(frozen=True)
class Run:
    """One run that counts."""

    seconds: float
    tokens: int
    usage: Usage
    peak_bytes: int | None = None

    def value(self, case: Case) -> float:
        """Tokens per second; of a start, seconds."""
        return self.seconds if case.measure == "startup" else self.tokens / self.seconds


@dataclass
class Row:
    """A case with a peer: the pairs and the limits of the machine between them."""

    case: Case
    peer: str
    weights: str
    octavo: list[Run] = field(default_factory=list)
    other: list[Run] = field(default_factory=list)
    limits: list[dict[str, float]] = field(default_factory=list)
    thrown_away: int = 0
    note: str = ""
    """Why there are no pairs, or fewer than were asked for."""

    def ratios(self) -> list[float]:
        """How many times as fast octavo was, pair by pair."""
        pairs = zip(self.octavo, self.other, strict=True)
        if self.case.measure == "startup":
            return [theirs.seconds / ours.seconds for ours, theirs in pairs]
        return [ours.value(self.case) / theirs.value(self.case) for ours, theirs in pairs]

    def memory_ratios(self) -> list[float]:
        """How many times octavo's memory the peer took, pair by pair."""
        pairs = zip(self.octavo, self.other, strict=True)
        return [(theirs.peak_bytes or 0) / ours.peak_bytes for ours, theirs in pairs if ours.peak_bytes]

    def as_dict(self) -> dict[str, Any]:
        """Everything that was measured."""

        def runs(found: list[Run]) -> list[dict[str, Any]]:
            return [
                {
                    "value": run.value(self.case),
                    "seconds": run.seconds,
                    "tokens": run.tokens,
                    "others_share": run.usage.others,
                    "own_share": run.usage.ours,
                    "peak_bytes": run.peak_bytes,
                }
                for run in found
            ]

        ratios = self.ratios()
        return {
            "case": self.case.name,
            "unit": self.case.unit,
            "peer": self.peer,
            "format": self.weights,
            "ratio": median(ratios) if ratios else None,
            "ratios": ratios,
            "memory_ratio": median(self.memory_ratios()) if self.memory_ratios() else None,
            "octavo": runs(self.octavo),
            "other": runs(self.other),
            "limits": self.limits,
            "thrown_away": self.thrown_away,
            "note": self.note,
        }


class Bench:
    """Makes runs that count."""

    def __init__(self, watch: Watch, *, patience: float, tries: int, report: Callable[[str], None]) -> None:
        """Wait at most `patience` seconds for a quiet machine, and make each run at most `tries` times."""
        self.watch = watch
        self.patience = patience
        self.tries = tries
        self.report = report

    def quiet_run(self, row: Row, turn: Turn, index: int) -> Run:
        """Repeat a turn until others left the machine alone beside it; what is thrown away is counted in `row`."""
        found = Usage(0.0, 0.0)
        for _ in range(self.tries):
            if not self.watch.wait(most=self.patience):
                raise Noisy(f"the machine was not quiet for {self.patience:.0f} s")
            before = self.watch.now()
            seconds, tokens, peak = turn(row.case, index)
            found = self.watch.since(before)
            if found.quiet:
                return Run(seconds, tokens, found, peak)
            row.thrown_away += 1
            self.report(f"thrown away: others took {found.others:.1%} of the cores, at most {MOST_BY_OTHERS:.0%}")
        raise Noisy(f"others took over {MOST_BY_OTHERS:.0%} beside {self.tries} runs, last {found.others:.1%}")

    def compare(self, row: Row, ours: Turn, theirs: Turn, limits: Callable[[], dict[str, float]], pairs: int) -> None:
        """Fill `row` with pairs, after a run of each that does not count."""
        for turn in (ours, theirs):
            turn(row.case, 0)
        for index in range(1, pairs + 1):
            mine = self.quiet_run(row, ours, index)
            other = self.quiet_run(row, theirs, index)
            row.octavo.append(mine)
            row.other.append(other)
            row.limits.append(limits())
            self.report(
                f"{row.case.name}, {row.peer} {row.weights}, pair {index}: "
                f"{mine.value(row.case):.4g} and {other.value(row.case):.4g} {row.case.unit}"
            )


class Turn:
    """One engine's turn at a case."""

    def __init__(self, engine: Engine, start: Callable[[], Engine], watch: Watch) -> None:
        """`engine` is loaded; `start` starts a fresh one, for the case that times that."""
        self.engine = engine
        self.start = start
        self.watch = watch

    def __call__(self, case: Case, turn: int) -> tuple[float, int, int | None]:
        """Seconds, tokens, and of a start the peak of resident memory."""
        request = {"case": case.name, "measure": case.measure, "rounds": case.requests(turn)}
        if case.measure != "startup":
            reply = self.engine.ask(request)
            return reply["seconds"], reply["tokens"], None
        with self.start() as fresh:
            self.watch.sessions.add(fresh.session)
            # Before it is ready: the request waits for the engine.
            fresh.send(request)
            fresh.ready()
            fresh.answer()
            return time.monotonic() - fresh.started, 1, fresh.peak_bytes()
