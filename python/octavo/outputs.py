"""What comes back: texts, tokens, log-probabilities, and a request's story in time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "deadline"]


@dataclass(frozen=True)
class Logprob:
    """The natural log-probability of one token, before temperature and filters."""

    logprob: float
    rank: int | None = None
    """Its place in the vocabulary, 1 the likeliest; equal ones share the better place."""
    decoded_token: str | None = None


SampleLogprobs: TypeAlias = list[dict[int, Logprob]]
"""For each generated token: itself and the likeliest ones, by id."""


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """A request's story, in seconds of `time.monotonic`."""

    arrival_time: float
    scheduled_time: float | None
    """When it left the queue; None if it ended before."""
    first_token_time: float | None
    last_token_time: float | None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from arrival until it left the queue."""
        return None if self.scheduled_time is None else self.scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    """All generated tokens; one that ended the request stands here and not in `text`."""
    cumulative_logprob: float | None
    logprobs: SampleLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The stop token that the caller had asked for, or None at the model's own end."""


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt and what followed it."""

    request_id: str
    seed: int
    """The seed that was used, given or not: with it the request can be repeated."""
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None
    num_cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class StreamOutput:
    """What one step added to one of the prompts handed to `LLM.stream`."""

    index: int
    """Which prompt, in the order in which they were given."""
    text: str
    """The text that became complete; may be empty while a character is not."""
    token_ids: list[int]
    logprobs: SampleLogprobs | None
    finished: bool
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: RequestMetrics | None
    """Present with the last output of a prompt."""


@dataclass(frozen=True, kw_only=True)
class EngineMetrics:
    """A snapshot of the engine. Blocks and slots are summed over the model's layer groups."""

    running: int
    """Requests that hold or are promised KV blocks."""
    waiting: int
    kv_blocks_total: int
    kv_blocks_free: int
    kv_blocks_promised: int
    """Free blocks that running requests may yet take."""
    kv_blocks_peak: int
    """Most blocks that were in use after any step."""
    kv_slots_allocated: int
    kv_slots_used: int
    kv_slot_steps_allocated: int
    """Allocated slots summed over all steps so far."""
    kv_slot_steps_used: int
    steps: int
    tokens_computed: int
    """Tokens that went through the model."""
    prompt_tokens: int
    generation_tokens: int
    busy_seconds: float
    """Time spent in steps."""
    queue_seconds: float
    """Time that all admitted requests spent waiting."""
    requests_admitted: int
    requests_finished: dict[str, int]
    """By finish reason."""

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> EngineMetrics:
        """From the engine's own counts."""
        return cls(
            running=counts["running"],
            waiting=counts["waiting"],
            kv_blocks_total=counts["blocks_total"],
            kv_blocks_free=counts["blocks_free"],
            kv_blocks_promised=counts["blocks_promised"],
            kv_blocks_peak=counts["blocks_peak"],
            kv_slots_allocated=counts["slots_allocated"],
            kv_slots_used=counts["slots_used"],
            kv_slot_steps_allocated=counts["slot_steps_allocated"],
            kv_slot_steps_used=counts["slot_steps_used"],
            steps=counts["steps"],
            tokens_computed=counts["tokens_scheduled"],
            prompt_tokens=counts["prompt_tokens"],
            generation_tokens=counts["generation_tokens"],
            busy_seconds=counts["busy_time"] * 1e-6,
            queue_seconds=counts["queue_time"] * 1e-6,
            requests_admitted=counts["admitted"],
            requests_finished={reason: counts[f"finished_{reason}"] for reason in ("stop", "length", "abort", "error")},
        )

    @property
    def kv_blocks_used(self) -> int:
        """Blocks that have an owner."""
        return self.kv_blocks_total - self.kv_blocks_free

    @property
    def kv_waste(self) -> float:
        """The share of allocated token slots that hold nothing now."""
        return _waste(self.kv_slots_used, self.kv_slots_allocated)

    @property
    def kv_waste_mean(self) -> float:
        """The same, over all steps so far."""
        return _waste(self.kv_slot_steps_used, self.kv_slot_steps_allocated)


def _waste(used: int, allocated: int) -> float:
    return 1 - used / allocated if allocated else 0.0
