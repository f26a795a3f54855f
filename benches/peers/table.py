"""The one table: a line for each case and peer."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benches.peers.comparison import Row, Run

HEADINGS = ("case", "octavo", "peer", "ratio [spread]", "limit")


def table(rows: Sequence[Row], facts: dict[str, float]) -> list[str]:
    """Lines in Markdown; `facts` are the bytes and weights that octavo reads and multiplies for a token."""
    return aligned(HEADINGS, [line for row in rows for line in _lines(row, facts)])


def aligned(headings: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> list[str]:
    """A table in Markdown whose columns are as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
    printed = [headings, tuple("-" * width for width in widths), *lines]
    return [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in printed
    ]


def _lines(row: Row, facts: dict[str, float]) -> list[tuple[str, ...]]:
    peer = f"{row.peer} {row.weights}"
    if not row.octavo:
        return [(row.case.title, "-", f"- ({peer}: {row.note})", "-", "-")]
    ours, theirs = _middle(row, row.octavo), _middle(row, row.other)
    note = f"; {row.note}" if row.note else ""
    lines: list[tuple[str, ...]] = [
        (
            row.case.title,
            f"{ours:.4g} {row.case.unit}",
            f"{theirs:.4g} ({peer}{note})",
            spread(row.ratios()),
            limit(row, ours, facts),
        )
    ]
    if row.case.measure == "startup":
        mine, other = (median((run.peak_bytes or 0) / 1e6 for run in runs) for runs in (row.octavo, row.other))
        lines.append((f"{row.case.title}: peak memory", f"{mine:.0f} MB", f"{other:.0f} ({peer})",
                      spread(row.memory_ratios()), "-"))  # fmt: skip
    return lines


def spread(ratios: Sequence[float]) -> str:
    """Median, and least to most in brackets, of how many pairs."""
    return f"{median(ratios):.2f} [{min(ratios):.2f} to {max(ratios):.2f}] n={len(ratios)}"


def limit(row: Row, value: float, facts: dict[str, float]) -> str:
    """What the machine allowed in the same minutes, and octavo's share of it: of one stream's decode and prefill."""
    if row.case.measure == "decode":
        most = median(each["reread_gb_s"] for each in row.limits) * 1e9 / facts["bytes_per_token"]
        return f"{most:.0f} by re-reading the weights ({value / most:.0%})"
    if row.case.measure == "prefill":
        dots, kernels = (
            median(each[name] for each in row.limits) * 1e9 / (2 * facts["layer_weights"])
            for name in ("dot_gops", "kernel_gops")
        )
        return f"{dots:.0f} by int8 products ({value / dots:.0%}), {kernels:.0f} by the kernels ({value / kernels:.0%})"
    return "-"


def _middle(row: Row, runs: Sequence[Run]) -> float:
    return median(run.value(row.case) for run in runs)
