"""The cases: which tokens each engine gets, and what is timed.

A request is `{"prompt_token_ids": [...], "max_tokens": n}`. A round is a list of requests that are submitted at once; a
run is one or more rounds, one after the other, whose seconds and tokens are added up, so that short ones last long
enough for the machine's own counters.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Round = list[dict[str, Any]]

DATA = Path(__file__).parent / "data"
WORKLOAD = DATA / "workload.json"
SHARED_PREFIX = DATA / "shared_prefix.json"
PROSE = DATA / "prose.txt"

# Ids below are control tokens in most vocabularies; ids above are missing in some.
_IDS = (1000, 30000)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    measure: str
    """What a worker times: `decode` (tokens after the first, from the first on), `prefill` (prompt tokens, until the
    first token), `all` (output tokens, from submission to the end) or `startup` (from the start of the process)."""
    title: str
    unit: str = "tok/s"
    streams: int = 1
    prompt: int = 0
    output: int = 0
    rounds: int = 1
    file: Path | None = None
    """Requests to take from a file; else they are drawn."""

    def requests(self, turn: int) -> list[Round]:
        """The rounds of a run; each `turn` has other prompts, so that no cache can help, save those of a file."""
        if self.file is not None:
            return [read_requests(self.file)]
        return [self._round(turn * 1000 + index) for index in range(self.rounds)]

    def _round(self, seed: int) -> Round:
        drawn = random.Random(seed)
        return [
            {"prompt_token_ids": [drawn.randrange(*_IDS) for _ in range(self.prompt)], "max_tokens": self.output}
            for _ in range(self.streams)
        ]


def all_cases(*, workload: Path = WORKLOAD, shared_prefix: Path = SHARED_PREFIX) -> dict[str, Case]:
    """Each case under its name, in the order of the table."""
    cases = (
        Case(name="decode", measure="decode", title="decode, 1 stream, 32 + 128", prompt=32, output=129, rounds=4),
        Case(name="prefill", measure="prefill", title="prefill of 512", prompt=512, output=1, rounds=4),
        Case(name="batch16", measure="all", title="16 streams, 32 + 128", streams=16, prompt=32, output=128),
        Case(name="batch32", measure="all", title="32 streams, 32 + 128", streams=32, prompt=32, output=128),
        Case(name="mixed", measure="all", title="mixed load", file=workload),
        Case(name="shared_prefix", measure="all", title="shared prefix", file=shared_prefix),
        Case(name="startup", measure="startup", title="start to first token", unit="s", prompt=32, output=1),
    )
    return {case.name: case for case in cases}


def read_requests(path: Path) -> Round:
    """The requests of a file: a JSON list of `{"prompt_token_ids": [...], "max_tokens": n}`."""
    found = json.loads(path.read_text(encoding="utf-8"))
    expected = "a list of objects with prompt_token_ids and max_tokens"
    if not isinstance(found, list) or not found:
        raise ValueError(f"{path}: found {type(found).__name__}, expected {expected}")
    for index, request in enumerate(found):
        if not isinstance(request, dict) or set(request) != {"prompt_token_ids", "max_tokens"}:
            raise ValueError(f"{path}: request {index}: found {str(request)[:60]}, expected {expected}")
    return found
