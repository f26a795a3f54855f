"""From the engine's deltas to what callers get."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
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
    from collections.abc import Mapping

    from octavo._octavo import Delta, Inbox, Story
    from octavo.prompts import TokenizedPrompt

# How long a wait may keep Python from seeing a signal.
_WAIT_SECONDS = 0.05


def deltas(inbox: Inbox, unfinished: int) -> Iterator[Delta]:
    """What arrives until every request has ended. The short waits let Python see signals."""
    while unfinished:
        for delta in inbox.recv(_WAIT_SECONDS):
            unfinished -= delta.last
            yield delta


class Collector:
    """Puts the deltas of one request together."""

    def __init__(self, prompt: TokenizedPrompt, request_id: str, seed: int, *, num_choices: int) -> None:
        self._prompt = prompt
        self._request_id = request_id
        self._seed = seed
        self._choices = [_Choice(index) for index in range(num_choices)]
        self._story: Story | None = None
        self.finished = False
        """Whether nothing more comes."""

    def add(self, delta: Delta) -> None:
        """Take the next delta."""
        self._choices[delta.choice].add(delta)
        self._story = delta.story
        self.finished = delta.last

    def output(self) -> RequestOutput:
        """The request as far as it has come; later deltas do not change what is given out."""
        return RequestOutput(
            request_id=self._request_id,
            seed=self._seed,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            prompt_logprobs=None,
            outputs=[choice.output() for choice in self._choices],
            finished=self.finished,
            metrics=None if self._story is None else _metrics(self._story),
            num_cached_tokens=0 if self._story is None else self._story.cached_tokens,
        )


class _Choice:
    """One continuation as far as it has come."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: SampleLogprobs = []
        self._cumulative_logprob = 0.0
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | None = None

    def add(self, delta: Delta) -> None:
        token_ids = delta.token_ids
        self._text += delta.text
        self._token_ids += token_ids
        for token, logprobs in zip(token_ids, _logprobs(delta) or (), strict=False):
            self._logprobs.append(logprobs)
            self._cumulative_logprob += logprobs[token].logprob
        self._finish_reason = _finish_reason(delta)
        self._stop_reason = delta.stop_reason

    def output(self) -> CompletionOutput:
        asked = bool(self._logprobs)
        return CompletionOutput(
            index=self._index,
            text=self._text,
            token_ids=self._token_ids.copy(),
            cumulative_logprob=self._cumulative_logprob if asked else None,
            logprobs=self._logprobs.copy() if asked else None,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
        )


class OutputStream(Iterator[StreamOutput]):
    """What each step adds to some requests, as it comes. Closing it, or dropping it, ends them.

    A generator would not do: one that is closed before its first step runs nothing of itself. When this is dropped, the
    inbox is, and that ends its requests.
    """

    def __init__(self, inbox: Inbox, places: Mapping[int, int]) -> None:
        """`places` has the prompt's index for each request of `inbox`."""
        self._inbox = inbox
        self._places = places
        self._arrived: deque[Delta] = deque()
        self._unfinished = len(places)

    def __next__(self) -> StreamOutput:
        """Wait for the next output; anything that goes wrong, a signal too, ends the requests."""
        try:
            while not self._arrived and self._unfinished:
                arrived = self._inbox.recv(_WAIT_SECONDS)
                self._unfinished -= sum(delta.last for delta in arrived)
                self._arrived.extend(arrived)
        except BaseException:
            self.close()
            raise
        if not self._arrived:
            raise StopIteration
        delta = self._arrived.popleft()
        return _stream_output(delta, self._places[delta.request])

    def close(self) -> None:
        """End the requests; nothing more comes. May be called again."""
        self._unfinished = 0
        self._arrived.clear()
        self._inbox.abort()


def _stream_output(delta: Delta, index: int) -> StreamOutput:
    """One delta for whoever reads a stream."""
    return StreamOutput(
        index=index,
        choice=delta.choice,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=_logprobs(delta),
        finished=delta.finish_reason is not None,
        finish_reason=_finish_reason(delta),
        stop_reason=delta.stop_reason,
        metrics=None if delta.finish_reason is None else _metrics(delta.story),
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


def _metrics(story: Story) -> RequestMetrics:
    return RequestMetrics(
        arrival_time=story.arrival,
        scheduled_time=story.scheduled,
        first_token_time=story.first_token,
        last_token_time=story.last_token,
        chunks=story.chunks,
        preemptions=story.preemptions,
        cached_tokens=story.cached_tokens,
        first_differing_token=story.first_difference,
    )
