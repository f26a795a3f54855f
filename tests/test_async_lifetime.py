"""How requests of `AsyncLLM` end before their time, and what is left of them: nothing."""

import asyncio
import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from calls import GREEDY
from octavo import AsyncLLM, InvalidRequest, RequestOutput, SamplingParams
from streams import (
    ENDLESS,
    WIDE,
    assert_async_alive,
    assert_holds_nothing,
    assert_no_thread_is_left,
    last,
    read,
    started,
)


def test_an_aborted_request_gives_what_it_has_and_ends(llm: AsyncLLM) -> None:
    async def aborted() -> list[RequestOutput]:
        stream = llm.generate([1, 2, 3], WIDE, "long")
        outputs = [await anext(stream)]
        await llm.abort("long")
        await llm.abort("nobody")
        outputs += await read(stream)
        await llm.abort("long")
        await assert_async_alive(llm)
        return outputs

    *_, before, final = asyncio.run(aborted())
    assert (final.finished, final.outputs[0].finish_reason) == (True, "abort")
    assert final.outputs[0].token_ids[: len(before.outputs[0].token_ids)] == before.outputs[0].token_ids
    with pytest.raises(InvalidRequest, match="request_id: found 5"):
        asyncio.run(llm.abort(5))  # type: ignore[arg-type]


def test_all_continuations_of_an_aborted_request_end(llm: AsyncLLM) -> None:
    async def aborted(begun: bool) -> RequestOutput:
        stream = llm.generate([1], WIDE, "several")
        if begun:
            await anext(stream)
        await llm.abort("several")
        output = await last(stream)
        await assert_async_alive(llm)
        return output

    for begun in (True, False):
        output = asyncio.run(aborted(begun))
        assert [choice.finish_reason for choice in output.outputs] == ["abort"] * 16
        assert output.finished


def test_a_cancelled_task_ends_its_request_at_once(llm: AsyncLLM) -> None:
    async def cancelled() -> None:
        task = asyncio.create_task(read(llm.generate([1], WIDE)))
        await started(llm, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert_holds_nothing(llm)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(read(llm.generate([1], WIDE)), 0.05)
        await assert_async_alive(llm)

    asyncio.run(cancelled())


def test_twenty_clients_that_go_away_leave_the_engine_to_others(llm: AsyncLLM) -> None:
    async def served(num_clients: int) -> None:
        clients = [asyncio.create_task(read(llm.generate([index], ENDLESS))) for index in range(num_clients)]
        await started(llm, num_clients)
        for client in clients:
            client.cancel()
        await asyncio.wait(clients)
        gone = llm.get_metrics()
        assert (gone.running, gone.waiting, gone.kv_blocks_free) == (0, 0, gone.kv_blocks_total)
        await assert_async_alive(llm)
        # Eight tokens for the one request, and no step for any other.
        assert llm.get_metrics().steps - gone.steps == 8

    asyncio.run(served(20))


def test_a_thousand_tasks_cancelled_at_random_moments_leave_nothing(llm: AsyncLLM) -> None:
    moments = random.Random(5)

    async def client(index: int) -> None:
        params = SamplingParams(n=1 + index % 2, seed=index, max_tokens=1 + index % 60, ignore_eos=True)
        async for _ in llm.generate([index % 500, 7] * (1 + index % 20), params):
            if index % 3 == 0:
                await asyncio.sleep(0)

    async def clients() -> int:
        tasks = []
        for index in range(1000):
            task = asyncio.create_task(client(index))
            tasks.append(task)
            asyncio.get_running_loop().call_later(0.03 * moments.random(), task.cancel)
            if moments.random() < 0.2:
                await asyncio.sleep(0.01 * moments.random())
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        assert_holds_nothing(llm)
        await assert_async_alive(llm)
        return sum(outcome is not None for outcome in outcomes)

    num_cancelled = asyncio.run(clients())
    assert 100 < num_cancelled < 1000
    assert llm.get_metrics().requests_finished["abort"] > 50
    assert all(block.owners == 0 for group in llm.block_map() for block in group)


@pytest.mark.parametrize("read_first", [False, True])
def test_dropping_a_stream_ends_its_request(llm: AsyncLLM, read_first: bool) -> None:
    async def dropped() -> None:
        stream = llm.generate([1], ENDLESS)
        if read_first:
            await anext(stream)
        del stream
        assert_holds_nothing(llm)
        async for _ in llm.generate([1], ENDLESS):
            break
        assert_holds_nothing(llm)

    asyncio.run(dropped())


def test_event_loops_in_two_threads_are_served_at_once(llm: AsyncLLM) -> None:
    met = threading.Barrier(2)

    async def answers(first: int) -> list[list[int]]:
        met.wait(10)
        streams = [llm.generate([first + index], GREEDY) for index in range(30)]
        outputs = await asyncio.gather(*map(last, streams))
        return [output.outputs[0].token_ids for output in outputs]

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda first: asyncio.run(answers(first)), (0, 100)))
    for first, found in zip((0, 100), both, strict=True):
        assert found == [list(range(first + index + 1, first + index + 9)) for index in range(30)]
    assert_holds_nothing(llm)


def test_a_loop_that_is_closed_ends_its_requests(llm: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()

    async def begun() -> object:
        stream = llm.generate([1], SamplingParams(n=2, max_tokens=None, ignore_eos=True), "mine")
        await anext(stream)
        return stream

    kept = loop.run_until_complete(begun())
    loop.close()
    assert_no_thread_is_left()
    assert_holds_nothing(llm)

    async def again() -> None:
        assert (await last(llm.generate([1, 2, 3], GREEDY, "mine"))).outputs[0].token_ids[0] == 4

    asyncio.run(again())
    del kept
    gc.collect()
