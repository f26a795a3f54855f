"""How much of the machine other processes take, from the texts of `/proc`.

The kernel counts in ticks of 10 ms, so that spans under half a second are judged roughly.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

MOST_BY_OTHERS = 0.04
"""The share of all cores that others may take beside a run that counts."""

_PROC = Path("/proc")


@dataclass(frozen=True)
class Moment:
    """The counters at one time."""

    seconds: float
    """A monotonic clock."""
    busy: int
    """Ticks in which a core worked, since boot, over all cores; what the host took away (steal) is among them."""
    ours: int
    """Ticks that our processes took, living ones and those that a living one has waited for."""


@dataclass(frozen=True)
class Usage:
    """What a span of time held, as shares of all cores."""

    ours: float
    others: float

    @property
    def quiet(self) -> bool:
        """Whether a run in this span counts."""
        return self.others <= MOST_BY_OTHERS


def busy_ticks(stat: str) -> int:
    """The ticks of work and of steal in the text of `/proc/stat`.

    Its first line is `cpu user nice system idle iowait irq softirq steal guest guest_nice`; guests are in user already.
    """
    fields = stat.split("\n", 1)[0].split()
    if fields[:1] != ["cpu"] or len(fields) < 9:
        raise ValueError(f"/proc/stat: found {' '.join(fields)[:80]!r}, expected 'cpu' and at least 8 counts")
    user, nice, system, _idle, _wait, interrupts, soft, steal = map(int, fields[1:9])
    return user + nice + system + interrupts + soft + steal


def process_ticks(stat: str, *, sessions: Collection[int], own: int) -> int:
    """The ticks of a process by the text of its `/proc/PID/stat`; 0 unless it is `own` or in one of `sessions`.

    The name is in brackets and may itself hold brackets and spaces: the counts begin after the last one.
    """
    head, _, tail = stat.rpartition(")")
    fields = tail.split()
    process, session = int(head.split("(", 1)[0]), int(fields[3])
    if process != own and session not in sessions:
        return 0
    # Of itself, and of children it has waited for: what an engine took stays counted when it has ended.
    return sum(map(int, fields[11:15]))


def share(before: Moment, after: Moment, *, cores: int, tick: float) -> Usage:
    """What was used between two moments; `tick` is in seconds."""
    whole = (after.seconds - before.seconds) * cores
    if whole <= 0:
        return Usage(0.0, 0.0)
    ours = after.ours - before.ours
    others = max(after.busy - before.busy - ours, 0)
    return Usage(ours * tick / whole, others * tick / whole)


class Watch:
    """Watches the machine beside our own processes: this one, and all in the sessions of the engines."""

    def __init__(self, sessions: Iterable[int] = ()) -> None:
        """Watch with `sessions` as ours: the process ids of those that lead them."""
        self.sessions = set(sessions)
        self.cores = os.cpu_count() or 1
        self.tick = 1 / os.sysconf("SC_CLK_TCK")

    def now(self) -> Moment:
        """Read the counters."""
        ours = 0
        for folder in _PROC.iterdir():
            if not folder.name.isdigit():
                continue
            try:
                stat = (folder / "stat").read_text(encoding="utf-8", errors="replace")
            except OSError:
                # It has ended since.
                continue
            ours += process_ticks(stat, sessions=self.sessions, own=os.getpid())
        busy = busy_ticks((_PROC / "stat").read_text(encoding="utf-8"))
        return Moment(time.monotonic(), busy, ours)

    def since(self, before: Moment) -> Usage:
        """What was used since `before`."""
        return share(before, self.now(), cores=self.cores, tick=self.tick)

    def wait(self, *, most: float, window: float = 0.5) -> bool:
        """Wait until others leave the machine alone for `window` seconds; False if that takes over `most` seconds."""
        end = time.monotonic() + most
        while True:
            before = self.now()
            time.sleep(window)
            if self.since(before).quiet:
                return True
            if time.monotonic() >= end:
                return False
