"""Cold start: a fresh process from `import octavo` to the first token, and the memory that stays.

Each start is a process of its own. The model's file has been read before, so that octavo counts and not the disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.bench.latency import Series
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PROMPT_TOKENS = 32
_TIMES = ("import_s", "load_s", "first_token_s", "total_s")

_CHILD = """
import json, sys, time
from pathlib import Path

def resident():
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))

model, settings = json.loads(sys.argv[1])
begun = time.perf_counter()
from octavo import LLM, SamplingParams
imported, before = time.perf_counter(), resident()
llm = LLM(model, **settings)
loaded = time.perf_counter()
params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
llm.generate([{"prompt_token_ids": list(range(PROMPT_TOKENS))}], params, use_tqdm=False)
answered = time.perf_counter()
print(json.dumps({
    "import_s": imported - begun,
    "load_s": loaded - imported,
    "first_token_s": answered - loaded,
    "total_s": answered - begun,
    "resident_bytes": resident() - before,
    "planned_bytes": sum(llm.memory[part] for part in ("weight_bytes", "kv_bytes", "arena_bytes")),
}))
""".replace("PROMPT_TOKENS", str(PROMPT_TOKENS))


@dataclass(frozen=True, kw_only=True)
class Startup:
    """What was measured."""

    import_s: Series
    load_s: Series
    first_token_s: Series
    """Seconds that a prompt of 32 tokens takes to its first one."""
    total_s: Series
    resident_bytes: Series
    """Memory above that of the import, at the first token; 0 where the system does not tell. Pages of the KV cache come
    with their use, or soon after."""
    planned_bytes: int
    """Weights as stored, KV cache and work memory."""

    def as_dict(self) -> dict[str, float]:
        """Each median under its name, with `_min` and `_max` beside it."""
        figures: dict[str, float] = {"planned_bytes": self.planned_bytes}
        for name in (*_TIMES, "resident_bytes"):
            series: Series = getattr(self, name)
            figures.update({name: series.median, f"{name}_min": min(series.values), f"{name}_max": max(series.values)})
        return figures


def measure(
    model: str | os.PathLike[str],
    settings: Mapping[str, Any],
    *,
    repeats: int,
    report: Callable[[str], None] = lambda _: None,
) -> Startup:
    """Start `repeats` processes that load `model` with these options of `LLM`, after one that does not count."""
    found = []
    for turn in range(repeats + 1):
        figures = _start(os.fspath(model), settings)
        if turn > 0:
            report(f"{turn}/{repeats}: {figures['total_s']:.3f} s")
            found.append(figures)

    def series(name: str) -> Series:
        return Series(tuple(figures[name] for figures in found))

    return Startup(
        import_s=series("import_s"),
        load_s=series("load_s"),
        first_token_s=series("first_token_s"),
        total_s=series("total_s"),
        resident_bytes=series("resident_bytes"),
        planned_bytes=int(found[0]["planned_bytes"]),
    )


def _start(model: str, settings: Mapping[str, Any]) -> dict[str, float]:
    command = [sys.executable, "-c", _CHILD, json.dumps([model, settings])]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"]
        raise OctavoError(f"a process that was to load {model}: {lines[-1]}")
    figures: dict[str, float] = json.loads(ended.stdout)
    return figures
