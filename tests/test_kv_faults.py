"""Blocks that are shared, scarce or left behind: faults that users of other engines have met, and the right outcomes.

Each engine is asked the same thing before and after its trial: it must answer alike, and hold nothing.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from octavo import LLM, AsyncLLM, CompletionOutput, EngineMetrics, InvalidRequest, RequestOutput, SamplingParams

FULL: dict[str, Any] = {"ignore_eos": True, "logprobs": 0}
GREEDY = SamplingParams(temperature=0, max_tokens=8, **FULL)


class Place(NamedTuple):
    device: Any
    block_size: int

    def ids(self, start: int, blocks: float) -> list[int]:
        """A prompt of so many blocks, unlike that of any other start."""
        return [(start + 7 * at + 3 * at * at) % 500 for at in range(int(blocks * self.block_size))]


@pytest.fixture(params=[Place("cpu", 16), Place("reference", 4)], ids=lambda place: place.device)
def place(request: pytest.FixtureRequest) -> Place:
    assert isinstance(request.param, Place)
    return request.param


def assert_holds_nothing(metrics: EngineMetrics) -> None:
    assert (metrics.running, metrics.waiting) == (0, 0)
    assert metrics.kv_blocks_free == metrics.kv_blocks_total
    assert (metrics.kv_blocks_shared, metrics.kv_blocks_saved) == (0, 0)


@contextmanager
def serving(folder: Path, place: Place, **options: Any) -> Iterator[LLM]:
    """An engine that answers after its trial as before."""
    sizes = {"num_kv_blocks": 256, "max_model_len": 512} | options
    with LLM(folder, device=place.device, block_size=place.block_size, **sizes) as llm:
        before = llm.generate([[501, 502, 503]], GREEDY, use_tqdm=False)[0].outputs
        assert_holds_nothing(llm.get_metrics())
        yield llm
        assert llm.generate([[501, 502, 503]], GREEDY, use_tqdm=False)[0].outputs == before
        assert_holds_nothing(llm.get_metrics())


def alone(
    folder: Path, place: Place, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[list[CompletionOutput]]:
    """What each prompt gives by itself, without a prefix cache, in a large pool."""
    each = params if isinstance(params, list) else [params] * len(prompts)
    with serving(folder, place, enable_prefix_caching=False) as llm:
        outputs = [llm.generate([prompt], own, use_tqdm=False)[0] for prompt, own in zip(prompts, each, strict=True)]
        assert [output.num_cached_tokens for output in outputs] == [0] * len(prompts)
        return [output.outputs for output in outputs]


def completions(outputs: list[RequestOutput]) -> list[list[CompletionOutput]]:
    return [output.outputs for output in outputs]


def one(llm: LLM, prompt: list[int], **params: Any) -> RequestOutput:
    asked = FULL | {"temperature": 0, "max_tokens": 8} | params
    return llm.generate([prompt], SamplingParams(**asked), use_tqdm=False)[0]


def differing(output: RequestOutput) -> int | None:
    assert output.metrics is not None
    assert output.metrics.cached_tokens == output.num_cached_tokens
    return output.metrics.first_differing_token


def expect_short_outputs(llm: LLM) -> None:
    """From what has ended the scheduler learns what to expect; then it lets in more than can stay."""
    llm.generate([[1]] * 256, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)


# Requests beside one another


def test_a_seeded_request_is_the_same_beside_one_without_a_seed(tiny_folder: Path, place: Place) -> None:
    seeded, free = (SamplingParams(seed=seed, temperature=0.8, max_tokens=16, **FULL) for seed in (42, None))
    first, second = place.ids(1, 1.5), place.ids(2, 2.25)
    with serving(tiny_folder, place) as llm:
        expected = llm.generate([first], seeded, use_tqdm=False)[0].outputs
        neighbours = set()
        for _ in range(4):
            mine, other = llm.generate([first, second], [seeded, free], use_tqdm=False)
            assert mine.outputs == expected
            neighbours.add(tuple(other.outputs[0].token_ids))
            other, mine = llm.generate([second, first], [free, seeded], use_tqdm=False)
            assert mine.outputs == expected
            neighbours.add(tuple(other.outputs[0].token_ids))
        assert len(neighbours) == 8


def test_a_prompt_that_is_cached_to_its_last_token_gives_the_same_again(tiny_folder: Path, place: Place) -> None:
    size = place.block_size
    for length in (size, 2 * size, 2 * size + 1, 1):
        prompt = place.ids(length, 9)[:length]
        [expected] = alone(tiny_folder, place, [prompt], GREEDY)
        with serving(tiny_folder, place) as llm:
            outputs = [one(llm, prompt) for _ in range(3)] + llm.generate([prompt] * 2, GREEDY, use_tqdm=False)
            assert completions(outputs) == [expected] * 5
            found = (length - 1) // size * size
            assert [output.num_cached_tokens for output in outputs] == [0, found, found, found, found]


def test_blocks_that_are_not_computed_yet_count_as_none_for_those_beside(tiny_folder: Path, place: Place) -> None:
    size = place.block_size
    long, common = place.ids(3, 4), place.ids(4, 3)
    ends = [common + place.ids(start, 1) for start in range(5, 9)]
    same, shared = alone(tiny_folder, place, [long], GREEDY) * 4, alone(tiny_folder, place, ends, GREEDY)
    for budget, cached in [(512, [0, 0, 0, 0]), (3 * size, [0, 3 * size, 3 * size, 3 * size])]:
        for prompts, expected in [([long] * 4, same), (ends, shared)]:
            with serving(tiny_folder, place, max_num_batched_tokens=budget) as llm:
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                assert completions(outputs) == expected
                assert [output.num_cached_tokens for output in outputs] == cached
                outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
                assert completions(outputs) == expected
                assert [output.num_cached_tokens for output in outputs] == [3 * size] * 4


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_request_larger_than_the_pool_is_refused_and_blocks_nobody(tiny_folder: Path, device: str) -> None:
    place = Place(device, 16)
    long, short = place.ids(1, 100 / 16), place.ids(2, 10 / 16)
    [expected] = alone(tiny_folder, place, [short], GREEDY)
    with serving(tiny_folder, place, num_kv_blocks=8) as llm:
        reason = "prompt 1: the prompt has 200 tokens, expected at most 127: the KV pool holds 128 tokens"
        with pytest.raises(InvalidRequest, match=f"^{reason}"):
            llm.generate([short, place.ids(3, 200 / 16)], GREEDY, use_tqdm=False)
        assert one(llm, short).outputs == expected
        output = one(llm, long, max_tokens=100)
        assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("length", 28)
        assert llm.get_metrics().preemptions == 0
        both = [SamplingParams(temperature=0, max_tokens=100, **FULL), GREEDY]
        [again, beside] = llm.generate([long, short], both, use_tqdm=False)
        assert (again.outputs, beside.outputs) == (output.outputs, expected)
        assert llm.get_metrics().preemptions <= 1


# Preemption


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
@pytest.mark.parametrize("face", ["plain", "streamed"])
def test_a_preempted_request_goes_on_where_it_was(
    tiny_folder: Path, place: Place, face: str, kind: str, caching: bool
) -> None:
    unit = place.block_size // 4
    prompts = [place.ids(start, 2.5) for start in range(10, 14)]
    params = [
        SamplingParams(temperature=0.9 if kind == "seeded" else 0, seed=start, max_tokens=24 * unit, **FULL)
        for start in range(4)
    ]
    expected = alone(tiny_folder, place, prompts, params)
    with serving(tiny_folder, place, num_kv_blocks=12, enable_prefix_caching=caching) as llm:
        expect_short_outputs(llm)
        if face == "plain":
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert completions(outputs) == expected
            stories = [output.metrics for output in outputs]
        else:
            pieces = list(llm.stream(prompts, params))
            parts = [[piece for piece in pieces if piece.index == index] for index in range(4)]
            for part, [plain] in zip(parts, expected, strict=True):
                assert [token for piece in part for token in piece.token_ids] == plain.token_ids
                assert [row for piece in part for row in piece.logprobs or []] == plain.logprobs
                assert "".join(piece.text for piece in part) == plain.text
                assert [piece.finish_reason for piece in part] == [None] * (len(part) - 1) + [plain.finish_reason]
            stories = [part[-1].metrics for part in parts]
        preemptions = [story.preemptions for story in stories if story is not None]
        assert len(preemptions) == 4
        assert max(preemptions) >= 2
        assert llm.get_metrics().preemptions == sum(preemptions)


# Callers that go away


def test_requests_of_a_dropped_stream_give_their_blocks_back_at_once(tiny_folder: Path, place: Place) -> None:
    for blocks in (4096 // place.block_size, 512 // place.block_size):
        with serving(tiny_folder, place, num_kv_blocks=blocks) as llm:
            prompts = [place.ids(start, 2.5) for start in range(20)]
            stream = llm.stream(prompts, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
            next(stream)
            assert llm.get_metrics().running > 0
            del stream
            # The engine hears of it before it is asked, and takes up both between two steps.
            assert_holds_nothing(llm.get_metrics())


async def _cancelled(_: AsyncLLM, tasks: list["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()


async def _aborted(llm: AsyncLLM, _: list["asyncio.Task[None]"]) -> None:
    for index in range(20):
        await llm.abort(f"caller {index}")


@pytest.mark.parametrize("leave", [_cancelled, _aborted], ids=["cancelled", "aborted"])
@pytest.mark.parametrize("tokens", [16384, 512], ids=["roomy", "scarce"])
def test_requests_of_callers_that_go_away_give_their_blocks_back_at_once(
    tiny_folder: Path,
    place: Place,
    tokens: int,
    leave: Callable[[AsyncLLM, list["asyncio.Task[None]"]], Awaitable[None]],
) -> None:
    short, long = (SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (8, 450))
    [[expected]] = alone(tiny_folder, place, [[501]], short)

    async def read(llm: AsyncLLM, prompt: list[int], params: SamplingParams, name: str | None) -> RequestOutput | None:
        last = None
        async for output in llm.generate(prompt, params, name):
            last = output
        return last

    async def caller(llm: AsyncLLM, index: int) -> None:
        await read(llm, place.ids(index, 2.5), long, f"caller {index}")

    async def trial() -> None:
        blocks = tokens // place.block_size
        llm = AsyncLLM(
            tiny_folder, device=place.device, block_size=place.block_size, num_kv_blocks=blocks, max_model_len=512
        )
        try:
            tasks = [asyncio.create_task(caller(llm, index)) for index in range(20)]
            started = time.monotonic()
            while (metrics := llm.get_metrics()).running + metrics.waiting < 20 or metrics.running == 0:
                assert time.monotonic() - started < 10
                await asyncio.sleep(0.001)
            await leave(llm, tasks)
            await asyncio.wait(tasks, timeout=10)
            assert all(task.done() for task in tasks)
            assert_holds_nothing(llm.get_metrics())
            assert llm.get_metrics().requests_finished["length"] == 0
            served = await read(llm, [501], short, None)
            assert served is not None
            assert served.outputs == [expected]
            assert_holds_nothing(llm.get_metrics())
        finally:
            await llm.shutdown(5)

    asyncio.run(trial())


def test_calls_from_threads_get_what_they_get_alone_while_others_tick(tiny_folder: Path, place: Place) -> None:
    prompts = [place.ids(start // 2, 2.5) for start in range(8)]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=32, **FULL)
    expected = alone(tiny_folder, place, prompts, params)
    ticks = [time.monotonic()]
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.002):
            ticks.append(time.monotonic())

    with serving(tiny_folder, place, num_kv_blocks=24) as llm, ThreadPoolExecutor(4) as pool:
        ticker = threading.Thread(target=tick)
        ticker.start()
        try:
            found = list(pool.map(lambda prompt: llm.generate([prompt], params, use_tqdm=False)[0], prompts * 8))
        finally:
            done.set()
            ticker.join()
        assert completions(found) == expected * 8
        assert max(np.diff(ticks), default=0.0) < 1.0


# The prefix cache


def test_a_hit_never_covers_the_last_token_of_the_prompt(tiny_folder: Path, place: Place) -> None:
    size = place.block_size
    with serving(tiny_folder, place) as llm:
        whole = place.ids(1, 3)
        one(llm, whole)
        for length in range(1, 3 * size + 1):
            output = one(llm, whole[:length])
            assert output.num_cached_tokens == (length - 1) // size * size
            assert differing(output) is None


def test_a_conversation_finds_its_own_answers(tiny_folder: Path, place: Place) -> None:
    size = place.block_size
    with serving(tiny_folder, place) as llm:
        spoken, computed = place.ids(1, 1.25), 0
        for _ in range(4):
            output = one(llm, spoken, max_tokens=size)
            assert output.num_cached_tokens == computed // size * size
            # The last token of an answer is drawn and not computed.
            computed = len(spoken) + size - 1
            spoken = [*spoken, *output.outputs[0].token_ids, 7, 8, 9]


def test_requests_of_two_salts_never_share(tiny_folder: Path, place: Place) -> None:
    prompt, found = place.ids(1, 3.5), 3 * place.block_size
    with serving(tiny_folder, place) as llm:
        first = one(llm, prompt)
        for salt, cached in [("a", 0), ("b", 0), ("ab", 0), ("a", found), ("b", found), ("ab", found)]:
            output = one(llm, prompt, cache_salt=salt)
            assert (output.num_cached_tokens, output.outputs) == (cached, first.outputs), salt
            # Where nothing is, nothing differs.
            assert differing(output) is None
        assert one(llm, prompt).num_cached_tokens == found


def test_a_request_can_pass_by_the_cache_and_still_fill_it(tiny_folder: Path, place: Place) -> None:
    prompt, found = place.ids(1, 3.5), 3 * place.block_size
    with serving(tiny_folder, place) as llm:
        outputs = [one(llm, prompt, skip_reading_prefix_cache=skip) for skip in (True, True, False, True)]
        assert [output.num_cached_tokens for output in outputs] == [0, 0, found, 0]
        assert all(output.outputs == outputs[0].outputs for output in outputs)
        assert [differing(output) for output in outputs] == [None] * 4


def test_a_cache_that_was_reset_holds_nothing(tiny_folder: Path, place: Place) -> None:
    prompt, found = place.ids(1, 3.5), 3 * place.block_size
    with serving(tiny_folder, place) as llm:
        one(llm, prompt)
        assert one(llm, prompt).num_cached_tokens == found
        assert llm.get_metrics().kv_blocks_cached >= 3
        llm.reset_prefix_cache()
        assert llm.get_metrics().kv_blocks_cached == 0
        assert [one(llm, prompt).num_cached_tokens for _ in range(2)] == [0, found]


def test_a_cache_that_is_off_finds_nothing(tiny_folder: Path, place: Place) -> None:
    prompt = place.ids(1, 3.5)
    with serving(tiny_folder, place, enable_prefix_caching=False) as llm:
        outputs = [one(llm, prompt) for _ in range(3)] + llm.generate([prompt] * 2, GREEDY, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [0] * 5
        assert [differing(output) for output in outputs] == [None] * 5
        metrics = llm.get_metrics()
        assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits, metrics.kv_blocks_cached) == (0, 0, 0)


def test_a_miss_names_the_first_token_that_differs(tiny_folder: Path, place: Place) -> None:
    size = place.block_size
    with serving(tiny_folder, place) as llm:
        prompt = place.ids(1, 3.5)
        one(llm, prompt)
        before = llm.get_metrics()
        for at in (0, 1, size - 1, size, size + size // 2, 3 * size - 1):
            other = [*prompt[:at], (prompt[at] + 1) % 500, *prompt[at + 1 :]]
            output = one(llm, other, cache_salt=None)
            assert (differing(output), output.num_cached_tokens) == (at, at // size * size)
        after = llm.get_metrics()
        assert after.prefix_cache_hits - before.prefix_cache_hits == 4 * size
        assert after.prefix_cache_queries > before.prefix_cache_queries


@pytest.mark.parametrize(("blocks", "copies"), [(2.5, 3), (2, 0)], ids=["inside a block", "at its end"])
def test_continuations_share_the_prompt_and_copy_at_most_a_block_each(
    tiny_folder: Path, place: Place, blocks: float, copies: int
) -> None:
    prompt = place.ids(1, blocks)
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=2 * place.block_size, **FULL)
    [expected] = alone(tiny_folder, place, [prompt], params)
    assert len({tuple(completion.token_ids) for completion in expected}) == 4
    for completion in expected:
        # Its last token is as likely as it is when all before it is a prompt.
        *before, last = completion.token_ids
        anew = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
        [[scored]] = alone(tiny_folder, place, [prompt + before], anew)
        assert completion.logprobs is not None
        assert scored.logprobs is not None
        assert completion.logprobs[-1][last].logprob == scored.logprobs[0][last].logprob
    with serving(tiny_folder, place, max_model_len=1024, num_kv_blocks=1024) as llm:
        [output] = llm.generate([prompt], params, use_tqdm=False)
        assert output.outputs == expected
        metrics = llm.get_metrics()
        assert metrics.kv_blocks_copied == copies
        # Each has its own blocks behind the two full ones of the prompt. The last token is never stored, and blocks are
        # counted after steps, when those that ended with the step have none.
        whole = -(-(len(prompt) + 2 * place.block_size - 2) // place.block_size)
        assert metrics.kv_blocks_peak == 2 + 4 * (whole - 2)
        # While they run, three of the four go without blocks of their own for those two.
        stream = llm.stream([prompt], SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=900, ignore_eos=True))
        next(stream)
        assert llm.get_metrics().kv_blocks_saved >= 6
        stream.close()
