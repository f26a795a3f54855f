"""From the engine's deltas to what callers get."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from octavo.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
    StreamOutput,
)

if TYPE_CHECKING:
    from octavo._octavo import Delta
    from octavo.prompts import TokenizedPrompt


class Collector:
    """Puts the deltas of one request together."""

    def __init__(self, prompt: TokenizedPrompt, request: int, seed: int) -> None:
        self._prompt = prompt
        self._request = request
        self._seed = seed
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: SampleLogprobs = []
        self._cumulative_logprob = 0.0
        self._last: Delta | None = None

    def add(self, delta: Delta) -> None:
        """Take the next delta."""
        token_ids = delta.token_ids
        self._texts.append(delta.text)
        self._token_ids += token_ids
        for token, logprobs in zip(token_ids, _logprobs(delta) or (), strict=False):
            self._logprobs.append(logprobs)
            self._cumulative_logprob += logprobs[token].logprob
        self._last = delta

    def output(self) -> RequestOutput:
        """The request as far as it has come."""
        last = self._last
        asked = bool(self._logprobs)
        completion = CompletionOutput(
            index=0,
            text="".join(self._texts),
            token_ids=self._token_ids,
            cumulative_logprob=self._cumulative_logprob if asked else None,
            logprobs=self._logprobs if asked else None,
            finish_reason=None if last is None else _finish_reason(last),
            stop_reason=None if last is None else last.stop_reason,
        )
        return RequestOutput(
            request_id=str(self._request),
            seed=self._seed,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            prompt_logprobs=None,
            outputs=[completion],
            finished=completion.finish_reason is not None,
            metrics=None if last is None else _metrics(last),
            num_cached_tokens=0,
        )


def stream_output(delta: Delta, index: int) -> StreamOutput:
    """One delta for whoever reads a stream."""
    return StreamOutput(
        index=index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=_logprobs(delta),
        finished=delta.finish_reason is not None,
        finish_reason=_finish_reason(delta),
        stop_reason=delta.stop_reason,
        metrics=_metrics(delta),
    )


def _finish_reason(delta: Delta) -> FinishReason | None:
    return cast("FinishReason | None", delta.finish_reason)


def _logprobs(delta: Delta) -> SampleLogprobs | None:
    """The drawn token comes first and is not repeated among the likeliest."""
    reports = delta.logprobs
    if reports is None:
        return None
    rows = []
    for report in reports:
        row: dict[int, Logprob] = {}
        for token, logprob, rank, text in report:
            row.setdefault(token, Logprob(logprob, rank, text))
        rows.append(row)
    return rows


def _metrics(delta: Delta) -> RequestMetrics | None:
    if delta.times is None:
        return None
    arrival, scheduled, first_token, last_token = delta.times
    return RequestMetrics(
        arrival_time=arrival, scheduled_time=scheduled, first_token_time=first_token, last_token_time=last_token
    )
