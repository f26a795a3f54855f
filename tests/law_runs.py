"""Models, prompts, and the ways to hand requests to an engine, for the tests of the law."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from octavo import LLM, AsyncLLM, BeamSearchOutput, BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams

Options: TypeAlias = dict[str, Any]
Params: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model on a device, its prompts, and the sizes at which features show."""

    name: str
    letter: str
    """Stands for it in the page."""
    device: str
    block_size: int
    step_tokens: int
    """A step budget smaller than most prompts, and no multiple of a block."""
    prompts: Sequence[list[int]]
    max_tokens: int
    """The first prompt is continued by this many, each further one by one more."""
    long_tokens: int
    """The same where outputs are to outgrow the block that the scheduler expects at least."""
    pool_tokens: int
    """Room for all requests at once."""

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def scarce_blocks(self, choices: int) -> int:
        """Room for the largest request, and for two neighbours as they begin; for no more.

        Continuations share the full blocks of the prompt and nothing else.
        """

        def to_the_end(index: int) -> int:
            shared = len(self.prompts[index]) // self.block_size
            whole = self.blocks(len(self.prompts[index]) + self.long_tokens + index)
            return shared + choices * (whole - shared)

        begun = [self.blocks(len(prompt)) + 1 for prompt in self.prompts]
        return max(*map(to_the_end, range(len(self.prompts))), *map(sum, pairwise(begun)))


def _sequence(start: int, count: int) -> list[int]:
    """Ids without a pattern that a tiny model could follow."""
    return [(start + 7 * at + 3 * at * at) % 500 for at in range(count)]


# From one token to past the 256 positions at which attention is cut. Several begin alike, to inside a block or its end.
_COMMON = _sequence(11, 250)
TINY_PROMPTS = [
    [5],
    _COMMON[:16],
    _COMMON[:33],
    _COMMON[:33],
    _COMMON[:40] + _sequence(200, 20),
    _COMMON[:40] + _sequence(300, 9),
    # The same tokens at the same places, behind another beginning.
    _sequence(400, 16) + _COMMON[16:48],
    _COMMON,
]


def _smollm2_prompts() -> list[list[int]]:
    """Texts with the beginnings that the independent engine of the oracle gave them."""
    known = json.loads((Path(__file__).parent / "data" / "reference_greedy.json").read_text())["prompts"]
    texts = [prompt["prompt_ids"] + prompt["tokens"] for prompt in known]
    return [texts[0][:20], texts[0][:18] + texts[1][:6], texts[3][:25]]


CPU = Subject(
    name="the CPU backend",
    letter="C",
    device="cpu",
    block_size=16,
    step_tokens=29,
    prompts=TINY_PROMPTS,
    max_tokens=20,
    long_tokens=80,
    pool_tokens=8192,
)
REFERENCE = Subject(
    name="Reference",
    letter="R",
    device="reference",
    block_size=4,
    step_tokens=13,
    prompts=TINY_PROMPTS,
    max_tokens=20,
    long_tokens=80,
    pool_tokens=8192,
)
SMOLLM2 = Subject(
    name="SmolLM2 on the CPU backend",
    letter="S",
    device="cpu",
    block_size=16,
    step_tokens=13,
    prompts=_smollm2_prompts(),
    max_tokens=12,
    long_tokens=34,
    pool_tokens=2048,
)
# Only where there is a GPU, or the driver that stands for one: tests/cuda.
CUDA = Subject(
    name="the CUDA backend",
    letter="G",
    device="cuda",
    block_size=16,
    step_tokens=29,
    # One fewer: the prefix cache knows no device.
    prompts=[TINY_PROMPTS[at] for at in (0, 1, 2, 3, 7, 4, 6)],
    max_tokens=9,
    long_tokens=50,
    pool_tokens=2048,
)
SUBJECTS = (CPU, REFERENCE, SMOLLM2)


@dataclass(frozen=True)
class Ask:
    """One request."""

    prompt: list[int]
    params: SamplingParams | BeamSearchParams


@dataclass(frozen=True)
class Answer:
    """What came of it."""

    index: int
    """Which of the subject's prompts."""
    output: RequestOutput


@dataclass(frozen=True)
class Run:
    """The answers of a case, in the order in which the requests were handed in."""

    answers: list[Answer]
    threads: int

    @property
    def outputs(self) -> list[RequestOutput]:
        return [answer.output for answer in self.answers]

    @property
    def completions(self) -> list[CompletionOutput]:
        return [completion for output in self.outputs for completion in output.outputs]


class Face(Protocol):
    """One of the ways to hand requests to an engine."""

    threads: int

    def together(self, asks: Sequence[Ask]) -> list[RequestOutput]: ...


class Blocking:
    """`LLM`."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.threads = llm.threads

    def together(self, asks: Sequence[Ask]) -> list[RequestOutput]:
        prompts = [ask.prompt for ask in asks]
        searches = [ask.params for ask in asks if isinstance(ask.params, BeamSearchParams)]
        if searches:
            return [searched(found) for found in self._llm.beam_search(prompts, searches)]
        params = [ask.params for ask in asks if isinstance(ask.params, SamplingParams)]
        return self._llm.generate(prompts, params, use_tqdm=False)


class Concurrent:
    """`AsyncLLM`, with a task for each request."""

    def __init__(self, llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        self._llm = llm
        self._loop = loop
        self.threads = llm.threads

    def together(self, asks: Sequence[Ask]) -> list[RequestOutput]:
        async def all_of_them() -> list[RequestOutput]:
            return await asyncio.gather(*(self._answer(ask, f"task {place}") for place, ask in enumerate(asks)))

        return self._loop.run_until_complete(all_of_them())

    async def _answer(self, ask: Ask, name: str) -> RequestOutput:
        if isinstance(ask.params, BeamSearchParams):
            return searched(await self._llm.beam_search(ask.prompt, ask.params, name))
        last: RequestOutput | None = None
        async for output in self._llm.generate(ask.prompt, ask.params, name):
            for before, now in zip(last.outputs if last else [], output.outputs, strict=False):
                assert now.token_ids[: len(before.token_ids)] == before.token_ids
            last = output
        assert last is not None
        return last


def searched(found: BeamSearchOutput) -> RequestOutput:
    """What a search found, as an answer like others."""
    begin = len(found.prompt_token_ids)
    outputs = [
        CompletionOutput(
            index=index,
            text=sequence.text or "",
            token_ids=sequence.tokens[begin:],
            cumulative_logprob=sequence.cum_logprob,
            logprobs=sequence.logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )
        for index, sequence in enumerate(found.sequences)
    ]
    return RequestOutput(
        request_id=found.request_id,
        seed=0,
        prompt=found.prompt,
        prompt_token_ids=found.prompt_token_ids,
        prompt_logprobs=None,
        outputs=outputs,
        finished=True,
        metrics=found.metrics,
        num_cached_tokens=found.metrics.cached_tokens if found.metrics else 0,
    )


@contextmanager
def blocking(path: Path, options: Options) -> Iterator[Face]:
    with LLM(path, **options) as llm:
        yield Blocking(llm)


@contextmanager
def concurrent(path: Path, options: Options) -> Iterator[Face]:
    loop = asyncio.new_event_loop()
    try:
        llm = AsyncLLM(path, **options)
        try:
            yield Concurrent(llm, loop)
        finally:
            loop.run_until_complete(llm.shutdown(5))
            loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
