"""Reading what `AsyncLLM` streams, and looking at what is left of it."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from calls import GREEDY
from octavo import AsyncLLM, RequestOutput, SamplingParams
from octavo.delivery import RequestStream

ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
# Takes so long that whatever a test does meanwhile comes before its end.
WIDE = SamplingParams(n=16, temperature=0, max_tokens=None, ignore_eos=True)


def loaded(folder: Path, *, max_num_seqs: int = 64) -> AsyncLLM:
    return AsyncLLM(folder, device="reference", max_model_len=512, num_kv_blocks=2048, max_num_seqs=max_num_seqs)


@contextmanager
def closed_at_the_end(llm: AsyncLLM) -> Iterator[AsyncLLM]:
    yield llm
    llm.close()
    assert_no_thread_is_left()


async def read(stream: RequestStream) -> list[RequestOutput]:
    """All outputs of a stream."""
    return [output async for output in stream]


async def last(stream: RequestStream) -> RequestOutput:
    """The last output of a stream."""
    return (await read(stream))[-1]


async def started(llm: AsyncLLM, count: int) -> None:
    """Wait until `count` requests have been admitted, and every task has begun."""
    await asyncio.sleep(0)
    while llm.get_metrics().requests_admitted < count:
        await asyncio.sleep(0.002)


def assert_holds_nothing(llm: AsyncLLM) -> None:
    """No request runs or waits, and all blocks are at home."""
    metrics = llm.get_metrics()
    assert (metrics.running, metrics.waiting, metrics.kv_blocks_free) == (0, 0, metrics.kv_blocks_total)


async def assert_async_alive(llm: AsyncLLM) -> None:
    """A model in which token t is followed by t + 1 answers as ever and holds nothing."""
    assert (await last(llm.generate([1, 2, 3], GREEDY))).outputs[0].token_ids == [4, 5, 6, 7, 8, 9, 10, 11]
    assert_holds_nothing(llm)


def assert_no_thread_is_left() -> None:
    """The threads that wait for outputs end with the last request."""
    deadline = time.monotonic() + 5
    while any(thread.name == "octavo-delivery" for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a thread goes on without requests"
        time.sleep(0.005)
