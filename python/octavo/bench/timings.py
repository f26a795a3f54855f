"""What the stories of requests say about speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo import RequestOutput


def timings(outputs: Sequence[RequestOutput]) -> dict[str, float]:
    """Time to first token and tokens per second over requests that were submitted together and have tokens.

    `ttft_s` is the mean over the requests. Prefill is all prompt tokens over the time from the first admission to the
    last first token; decode is all further tokens over the time from the first of the first tokens to the last token.
    With a single request both are its own; with several the two spans overlap, as the work does.
    """
    starts, firsts, lasts, waits = [], [], [], []
    for output in outputs:
        story = output.metrics
        if (
            story is None
            or story.scheduled_time is None
            or story.first_token_time is None
            or story.last_token_time is None
        ):
            continue
        starts.append(story.scheduled_time)
        firsts.append(story.first_token_time)
        lasts.append(story.last_token_time)
        waits.append(story.first_token_time - story.arrival_time)
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    further_tokens = sum(max(len(answer.token_ids) - 1, 0) for output in outputs for answer in output.outputs)
    if not firsts:
        return {"ttft_s": 0.0, "prefill_tok_s": 0.0, "decode_tok_s": 0.0}
    return {
        "ttft_s": sum(waits) / len(waits),
        "prefill_tok_s": per_second(prompt_tokens, max(firsts) - min(starts)),
        "decode_tok_s": per_second(further_tokens, max(lasts) - min(firsts)),
    }


def per_second(count: int, seconds: float) -> float:
    """A rate; 0 where no time has passed."""
    return count / seconds if seconds > 0 else 0.0
