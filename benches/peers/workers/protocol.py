"""What each worker speaks: a line of JSON in, a line of JSON out. Standard library only.

The first line out is `{"ready": true, ...}` with facts on the engine. Then each line in is
`{"case": ..., "measure": ..., "rounds": [[{"prompt_token_ids": [...], "max_tokens": n}]]}` and each line out is
`{"seconds": ..., "tokens": ...}`, with `unsupported` or `error` and a reason instead where that is the answer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable


class Unsupported(Exception):
    """The engine cannot do what a case asks."""


@dataclass(frozen=True)
class Timeline:
    """When things happened in one round, in seconds of one clock, and how many tokens came out."""

    submitted: float
    first: float
    """The first token of the last request to get one."""
    ended: float
    tokens: int

    def timed(self, measure: str, prompt_tokens: int, requests: int) -> tuple[float, int]:
        """Seconds and tokens of what `measure` names."""
        if measure == "decode":
            return self.ended - self.first, self.tokens - requests
        if measure in ("prefill", "startup"):
            return self.first - self.submitted, prompt_tokens
        if measure == "all":
            return self.ended - self.submitted, self.tokens
        raise ValueError(f"measure: found {measure!r}, expected decode, prefill, all or startup")


class Engine(Protocol):
    """A loaded model."""

    def facts(self) -> dict[str, Any]:
        """What is worth noting: a version, settings."""

    def run(self, requests: list[dict[str, Any]], measure: str) -> Timeline:
        """Empty the prefix cache, submit all requests at once, greedily and past EOS, and wait for their ends."""


def serve(
    load: Callable[[str, int], Engine], extra: Callable[[Engine, str], dict[str, Any] | None] | None = None
) -> None:
    """Load what the command line names and answer until the input ends; `extra` may answer further cases itself."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    # What engines print must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(reply: dict[str, Any]) -> None:
        answers.write(json.dumps(reply) + "\n")
        answers.flush()

    engine = load(arguments.model, arguments.threads)
    answer({"ready": True} | engine.facts())
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = extra(engine, request["case"]) if extra else None
            answer(_timed(engine, request) if reply is None else reply)
        except Unsupported as reason:
            answer({"unsupported": str(reason)})
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})


def _timed(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    seconds, tokens = 0.0, 0
    for requests in request["rounds"]:
        expected = sum(each["max_tokens"] for each in requests)
        timeline = engine.run(requests, request["measure"])
        if timeline.tokens != expected:
            raise ValueError(f"tokens of {request['case']}: found {timeline.tokens}, expected {expected}")
        prompt_tokens = sum(len(each["prompt_token_ids"]) for each in requests)
        one = timeline.timed(request["measure"], prompt_tokens, len(requests))
        seconds, tokens = seconds + one[0], tokens + one[1]
    return {"seconds": seconds, "tokens": tokens}
