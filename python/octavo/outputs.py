"""What comes back: texts, tokens, log-probabilities, and a request's story in time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

if TYPE_CHECKING:
    from collections.abc import Mapping

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "deadline"]


@dataclass(frozen=True)
class Logprob:
    """The natural log-probability of one token, after bias, masks and penalties, before temperature and filters."""

    logprob: float
    """Never below -9999, so that JSON can carry it: what a mask forbids has that."""
    rank: int | None = None
    """Its place in the vocabulary, 1 the likeliest; equal ones share the better place."""
    decoded_token: str | None = None


SampleLogprobs: TypeAlias = list[dict[int, Logprob]]
"""For each generated token: itself and the likeliest ones, by id."""

PromptLogprobs: TypeAlias = list[dict[int, Logprob] | None]
"""For each token of the prompt the same, but None for the first, which nothing is before."""


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """A request's story, in seconds of `time.monotonic`."""

    arrival_time: float
    scheduled_time: float | None
    """When it left the queue; None if it ended before."""
    first_token_time: float | None
    last_token_time: float | None
    chunks: int
    """Pieces in which the prompt was computed, and whatever a preemption took."""
    preemptions: int
    """Times that it lost its KV blocks to others and was computed again."""
    cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    first_differing_token: int | None
    """Where the prompt parts from what the prefix cache held: the position of the first token that was another one.
    None if there was nothing to differ from, or nobody looked. Full blocks are held, of other requests too: a prompt
    that was found as far as it can be may still part from a longer one in its last block."""

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
    """The sum of the tokens' log-probabilities, if `logprobs` were asked for."""
    logprobs: SampleLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    """The stop token or stop string of the caller that ended it; None at the model's own end, and for other reasons."""


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt and what followed it."""

    request_id: str
    seed: int
    """The seed that was used, given or not: with it the request can be repeated."""
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: PromptLogprobs | None
    """One entry for each token of the prompt, if they were asked for and the prompt has been computed."""
    outputs: list[CompletionOutput]
    """All continuations, by index. A stream of the kind DELTA has those to which something was added."""
    finished: bool
    metrics: RequestMetrics | None
    """The story so far."""
    num_cached_tokens: int
    """Prompt tokens that were found in the prefix cache."""


@dataclass(frozen=True, kw_only=True)
class StreamOutput:
    """What one step added to a continuation of one of the prompts handed to `LLM.stream`."""

    index: int
    """Which prompt, in the order in which they were given."""
    choice: int
    """Which of the prompt's `n` continuations."""
    text: str
    """The text that became complete; may be empty while a character is not."""
    token_ids: list[int]
    logprobs: SampleLogprobs | None
    finished: bool
    """Whether the continuation has ended."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: RequestMetrics | None
    """Present with the last output of a continuation."""


@dataclass(frozen=True, kw_only=True)
class BeamSearchSequence:
    """One of the likeliest continuations."""

    tokens: list[int]
    """The prompt's tokens and those that follow, the end token included."""
    logprobs: SampleLogprobs
    """For each token after the prompt: itself."""
    cum_logprob: float
    """The sum of these."""
    text: str | None
    """All of `tokens` as text, control tokens as they are spelled; None for a model without a tokenizer."""
    finish_reason: FinishReason | None
    stop_reason: int | str | None


@dataclass(frozen=True, kw_only=True)
class BeamSearchOutput:
    """What a beam search found after one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    metrics: RequestMetrics | None
    sequences: list[BeamSearchSequence]
    """As many as the beam is wide, if there are so many, the best first."""


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """How likely a model takes each token of a text to be, given those before it."""

    prompt: str | None
    prompt_token_ids: list[int]
    logprobs: list[float | None]
    """The natural log-probability of each token; None for the first."""
    ranks: list[int | None]
    """The place of each token among all, 1 the likeliest: greedy decoding takes the text from a position on as it is
    if all ranks there are 1. None for the first."""
    likeliest: PromptLogprobs
    """For each token: itself and as many of the likeliest as were asked for, by id; None for the first."""

    @property
    def total(self) -> float:
        """The log-probability of the text given its first token: the sum of `logprobs`."""
        return math.fsum(logprob for logprob in self.logprobs if logprob is not None)


@dataclass(frozen=True, kw_only=True)
class EmbeddingOutput:
    """A prompt as one vector."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    """As long as the model's hidden states."""


@dataclass(frozen=True)
class BlockState:
    """A KV block as it is now."""

    owners: int
    """Sequences that hold it; 0 for a free block."""
    filled: int
    """Token slots that hold something."""
    cached: bool
    """Whether a new request could find what it holds."""


@dataclass(frozen=True, kw_only=True)
class EngineMetrics:
    """A snapshot of the engine. Blocks and slots are summed over the model's layer groups."""

    running: int
    """Sequences that hold KV blocks: continuations of requests, each counted once."""
    waiting: int
    """Requests in the queue."""
    kv_blocks_total: int
    kv_blocks_free: int
    """Blocks without an owner, those included whose content could be found again."""
    kv_blocks_cached: int
    """Blocks, with an owner or without, whose content a new request could find."""
    kv_blocks_shared: int
    """Blocks with more than one owner."""
    kv_blocks_saved: int
    """Blocks that sharing saves: owners beyond the first, summed over all blocks."""
    kv_blocks_copied: int
    """Blocks copied so far, since a sequence was to write where others read."""
    kv_blocks_promised: int
    """Blocks that running sequences are expected to take yet, free now or not."""
    kv_blocks_peak: int
    """Most blocks that were in use after any step."""
    kv_slots_allocated: int
    """Token slots of the blocks that have an owner, each block counted once."""
    kv_slots_used: int
    """Slots among them that hold a token."""
    kv_slots_reserved: int
    """Slots among them that are empty and may be filled yet."""
    kv_slots_internal: int
    """Slots among them that are empty and stay so, since the owner ends before."""
    kv_slots_external: int
    """Slots in free blocks while a request waits that does not fit into them."""
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
    masks: int
    """Tokens before which a structured output was asked what may come."""
    mask_seconds: float
    """How long these questions took, which is part of `busy_seconds`."""
    queue_seconds: float
    """Time that all admitted requests spent waiting."""
    requests_admitted: int
    requests_finished: dict[str, int]
    """Continuations ended, by finish reason."""
    preemptions: int
    """Times that a request lost its blocks and went back to the queue."""
    prefix_cache_queries: int
    """Tokens looked up in the prefix cache."""
    prefix_cache_hits: int
    """Tokens found there."""

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> EngineMetrics:
        """From the engine's own counts."""
        return cls(
            running=counts["running"],
            waiting=counts["waiting"],
            kv_blocks_total=counts["blocks_total"],
            kv_blocks_free=counts["blocks_free"],
            kv_blocks_cached=counts["blocks_cached"],
            kv_blocks_shared=counts["blocks_shared"],
            kv_blocks_saved=counts["blocks_saved"],
            kv_blocks_copied=counts["blocks_copied"],
            kv_blocks_promised=counts["blocks_promised"],
            kv_blocks_peak=counts["blocks_peak"],
            kv_slots_allocated=counts["slots_allocated"],
            kv_slots_used=counts["slots_used"],
            kv_slots_reserved=counts["slots_reserved"],
            kv_slots_internal=counts["slots_internal"],
            kv_slots_external=counts["slots_external"],
            kv_slot_steps_allocated=counts["slot_steps_allocated"],
            kv_slot_steps_used=counts["slot_steps_used"],
            steps=counts["steps"],
            tokens_computed=counts["tokens_scheduled"],
            prompt_tokens=counts["prompt_tokens"],
            generation_tokens=counts["generation_tokens"],
            busy_seconds=counts["busy_time"] * 1e-6,
            masks=counts["masks"],
            mask_seconds=counts["mask_nanos"] * 1e-9,
            queue_seconds=counts["queue_time"] * 1e-6,
            requests_admitted=counts["admitted"],
            requests_finished={reason: counts[f"finished_{reason}"] for reason in get_args(FinishReason)},
            preemptions=counts["preemptions"],
            prefix_cache_queries=counts["prefix_queries"],
            prefix_cache_hits=counts["prefix_hits"],
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
