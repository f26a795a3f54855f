"""From the engine's deltas to what callers get."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, cast

from octavo.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    EmbeddingOutput,
    FinishReason,
    Logprob,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
    SampleLogprobs,
    StreamOutput,
    TokenScores,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octavo._octavo import Delta, Inbox, Story, Tokenizer
    from octavo.prompts import TokenizedPrompt
    from octavo.sampling_params import SamplingParams

# How long a wait may keep Python from seeing a signal.
_WAIT_SECONDS = 0.05


def deltas(inbox: Inbox, unfinished: int) -> Iterator[Delta]:
    """What arrives until every request has ended. The short waits let Python see signals."""
    while unfinished:
        for delta in inbox.recv(_WAIT_SECONDS):
            unfinished -= delta.last
            yield delta


class Collecting(Protocol):
    """Takes the deltas of one request."""

    finished: bool
    """Whether nothing more comes."""

    def add(self, delta: Delta) -> None:
        """Take the next delta."""


class Collector:
    """Puts the deltas of one request together."""

    def __init__(self, prompt: TokenizedPrompt, request_id: str, seed: int, *, params: SamplingParams) -> None:
        """For a request that was just submitted with `params`."""
        self._prompt = prompt
        self._request_id = request_id
        self._seed = seed
        self._choices = [_Choice(index) for index in range(params.n)]
        self._wants_prompt_logprobs = params.prompt_logprobs is not None
        self._prompt_logprobs: PromptLogprobs | None = None
        self._prompt_logprobs_given = False
        self._story: Story | None = None
        self.finished = False

    def add(self, delta: Delta) -> None:
        """Take the next delta."""
        reports = delta.prompt_logprobs
        if self._wants_prompt_logprobs and self._prompt_logprobs is None and (reports or delta.token_ids):
            # A prompt of one token has no reports.
            self._prompt_logprobs = [None, *_rows(reports or [])]
        self._choices[delta.choice].add(delta)
        self._story = delta.story
        self.finished = delta.last

    def output(self) -> RequestOutput:
        """The request as far as it has come; later deltas do not change what is given out."""
        return self._output([choice.output() for choice in self._choices], self._prompt_logprobs)

    def news(self) -> RequestOutput:
        """What has come since it was asked last: continuations without anything new are left out."""
        news = [choice.news() for choice in self._choices]
        prompt_logprobs = None if self._prompt_logprobs_given else self._prompt_logprobs
        self._prompt_logprobs_given = self._prompt_logprobs is not None
        return self._output([completion for completion in news if completion is not None], prompt_logprobs)

    def _output(self, outputs: list[CompletionOutput], prompt_logprobs: PromptLogprobs | None) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            seed=self._seed,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
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
        self._stop_reason: int | str | None = None
        # Where the news begin: characters, tokens, and whether the end is among what was given out.
        self._given = (0, 0, False)

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
        return self._output(0, 0)

    def news(self) -> CompletionOutput | None:
        now = (len(self._text), len(self._token_ids), self._finish_reason is not None)
        if now == self._given:
            return None
        characters, tokens, _ = self._given
        self._given = now
        return self._output(characters, tokens)

    def _output(self, characters: int, tokens: int) -> CompletionOutput:
        """Text and tokens from these counts on."""
        asked = bool(self._logprobs)
        return CompletionOutput(
            index=self._index,
            text=self._text[characters:],
            token_ids=self._token_ids[tokens:],
            cumulative_logprob=self._cumulative_logprob if asked else None,
            logprobs=self._logprobs[tokens:] if asked else None,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
        )


class BeamCollector:
    """Takes what a beam search found, which comes at its end."""

    def __init__(self, prompt: TokenizedPrompt, request_id: str, tokenizer: Tokenizer | None) -> None:
        """For a search after `prompt`."""
        self._prompt = prompt
        self._request_id = request_id
        self._tokenizer = tokenizer
        self._found: dict[int, BeamSearchSequence] = {}
        self._story: Story | None = None
        self.finished = False

    def add(self, delta: Delta) -> None:
        """Take the next sequence."""
        self._story = delta.story
        self.finished = delta.last
        tokens = [*self._prompt.token_ids, *delta.token_ids]
        logprobs = _logprobs(delta) or []
        total = math.fsum(row[token].logprob for token, row in zip(delta.token_ids, logprobs, strict=False))
        self._found[delta.choice] = BeamSearchSequence(
            tokens=tokens,
            logprobs=logprobs,
            cum_logprob=total if delta.cumulative_logprob is None else delta.cumulative_logprob,
            text=None if self._tokenizer is None else self._tokenizer.decode(tokens, skip_special_tokens=False),
            finish_reason=_finish_reason(delta),
            stop_reason=delta.stop_reason,
        )

    def output(self) -> BeamSearchOutput:
        """All of them, the best first."""
        return BeamSearchOutput(
            request_id=self._request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            metrics=None if self._story is None else _metrics(self._story),
            sequences=[self._found[choice] for choice in sorted(self._found)],
        )


class PooledCollector:
    """Takes a prompt's pooled hidden state."""

    def __init__(self, prompt: TokenizedPrompt, request_id: str) -> None:
        """For one prompt."""
        self._prompt = prompt
        self._request_id = request_id
        self._pooled: list[float] | None = None
        self.finished = False

    def add(self, delta: Delta) -> None:
        """Take the next delta; one of them has it."""
        self.finished = delta.last
        self._pooled = self._pooled or delta.pooled

    def output(self, *, normalize: bool) -> EmbeddingOutput | None:
        """The vector, with `normalize` of length 1; None if the model gave no finite numbers."""
        vector = self._pooled
        if vector is None or not all(map(math.isfinite, vector)):
            return None
        length = math.hypot(*vector)
        if normalize and length > 0.0:
            vector = [value / length for value in vector]
        return EmbeddingOutput(
            request_id=self._request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            embedding=vector,
        )


def token_scores(output: RequestOutput) -> TokenScores | None:
    """What a request that asked for `prompt_logprobs` says about its prompt; None if it has failed."""
    rows = output.prompt_logprobs
    if rows is None or len(rows) != len(output.prompt_token_ids):
        return None
    own = [None if row is None else row[token] for token, row in zip(output.prompt_token_ids, rows, strict=True)]
    return TokenScores(
        prompt=output.prompt,
        prompt_token_ids=output.prompt_token_ids,
        logprobs=[None if entry is None else entry.logprob for entry in own],
        ranks=[None if entry is None else entry.rank for entry in own],
        likeliest=rows,
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
    return None if delta.logprobs is None else _rows(delta.logprobs)


def _rows(reports: Sequence[Sequence[tuple[int, float, int, str | None]]]) -> SampleLogprobs:
    """The token itself comes first and is not repeated among the likeliest."""
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
