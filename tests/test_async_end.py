"""How `AsyncLLM` ends, and the death of its engine, and a fork, and the end of the program."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from calls import GREEDY, ids
from octavo import LLM, AsyncLLM, EngineDeadError, InvalidRequest, RequestOutput
from streams import (
    ENDLESS,
    WIDE,
    assert_async_alive,
    assert_no_thread_is_left,
    last,
    loaded,
    read,
    started,
)


def test_a_shutdown_with_enough_time_lets_requests_finish_and_takes_no_new_ones(llm: AsyncLLM) -> None:
    async def shut_down(timeout: float | None) -> RequestOutput:
        running = asyncio.create_task(last(llm.generate([1], WIDE)))
        await asyncio.sleep(0)
        ending = asyncio.create_task(llm.shutdown(timeout))
        await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="shutting down"):
            llm.generate([1])
        await asyncio.gather(ending, llm.shutdown(timeout))
        await llm.shutdown(0)
        with pytest.raises(EngineDeadError, match="closed"):
            llm.generate([1])
        await llm.abort("nobody")
        return await running

    output = asyncio.run(shut_down(60))
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == 511


@pytest.mark.parametrize("hurried", [False, True])
def test_a_shutdown_without_enough_time_ends_what_runs(tiny_folder: Path, hurried: bool) -> None:
    llm = loaded(tiny_folder, max_num_seqs=2)

    async def shut_down() -> tuple[list[RequestOutput], float]:
        running = [asyncio.create_task(last(llm.generate([index], ENDLESS))) for index in range(40)]
        await started(llm, 1)
        began = time.monotonic()
        patient = [asyncio.create_task(llm.shutdown())] if hurried else []
        await llm.shutdown(0.05)
        await asyncio.gather(*patient)
        return await asyncio.gather(*running), time.monotonic() - began

    outputs, seconds = asyncio.run(shut_down())
    assert outputs[-1].outputs[0].finish_reason == "abort"
    assert {output.outputs[0].finish_reason for output in outputs} <= {"length", "abort"}
    assert seconds < 1
    assert_no_thread_is_left()


@pytest.mark.parametrize("timeout", [-1, float("nan"), "5", True])
def test_a_wrong_timeout_is_refused(llm: AsyncLLM, timeout: float) -> None:
    with pytest.raises(InvalidRequest, match=r"timeout: found .*, expected None or a number of seconds from 0"):
        asyncio.run(llm.shutdown(timeout))
    asyncio.run(assert_async_alive(llm))


def test_closing_fails_every_stream_once(llm: AsyncLLM) -> None:
    async def closed() -> None:
        async with llm:
            streams = [llm.generate([index], WIDE) for index in range(3)]
            readers = [asyncio.create_task(read(stream)) for stream in streams]
            await started(llm, 3)
        for outcome in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(outcome, EngineDeadError)
            assert "closed" in str(outcome)
        assert [await read(stream) for stream in streams] == [[], [], []]
        llm.close()

    asyncio.run(closed())


def failures_of_tasks(folder: Path) -> tuple[list[object], float]:
    """What eight tasks get when the engine's thread panics, and how long they wait for it. Two are served till then."""
    llm = loaded(folder, max_num_seqs=32)

    async def failed() -> tuple[list[object], float]:
        tasks = [asyncio.create_task(read(llm.generate([index], WIDE))) for index in range(8)]
        await started(llm, 2)
        llm._core.inject_panic("a kernel met a NaN")
        began = time.monotonic()
        outcomes: list[object] = list(await asyncio.gather(*tasks, return_exceptions=True))
        seconds = time.monotonic() - began
        for use in (lambda: llm.generate([1]), llm.get_metrics, llm.block_map, llm.reset_prefix_cache):
            with pytest.raises(EngineDeadError, match="a kernel met a NaN"):
                use()
        await llm.shutdown()
        return outcomes, seconds

    return asyncio.run(failed())


def failures_of_threads(folder: Path) -> tuple[list[object], float]:
    """The same of eight threads."""
    llm = LLM(folder, device="reference", max_model_len=512, num_kv_blocks=2048, max_num_seqs=32)
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(llm.generate, [[index]], WIDE, use_tqdm=False) for index in range(8)]
        while llm.get_metrics().running < 32 or llm.get_metrics().waiting < 6:
            time.sleep(0.002)
        llm._core.inject_panic("a kernel met a NaN")
        began = time.monotonic()
        outcomes = [call.exception(timeout=30) for call in calls]
    return list(outcomes), time.monotonic() - began


@pytest.mark.parametrize("failures", [failures_of_tasks, failures_of_threads])
def test_the_death_of_the_engine_fails_everyone_who_waits_and_says_why(
    tiny_folder: Path, failures: Callable[[Path], tuple[list[object], float]]
) -> None:
    outcomes, seconds = failures(tiny_folder)
    assert len(outcomes) == 8
    for outcome in outcomes:
        assert isinstance(outcome, EngineDeadError)
        assert str(outcome) == "the engine has ended: a panic: a kernel met a NaN"
    assert len(set(map(id, outcomes))) == 8
    assert seconds < 1
    assert_no_thread_is_left()
    with LLM(tiny_folder, device="reference", max_model_len=64) as llm:
        assert len(ids(llm.generate([[1]], GREEDY, use_tqdm=False))[0]) == 8
    asyncio.run(alive_and_closed(loaded(tiny_folder)))


async def alive_and_closed(llm: AsyncLLM) -> None:
    async with llm:
        assert len((await last(llm.generate([1], GREEDY))).outputs[0].token_ids) == 8


def test_a_request_can_be_aborted_and_the_engine_shut_down_from_another_loop(llm: AsyncLLM) -> None:
    ready = threading.Event()

    async def client() -> list[RequestOutput]:
        streams = [llm.generate([1], WIDE, name) for name in ("one", "two")]
        await anext(streams[1])
        ready.set()
        return list(await asyncio.gather(*map(last, streams)))

    async def other() -> None:
        with pytest.raises(InvalidRequest, match="found 'one', which a request has"):
            llm.generate([1], GREEDY, "one")
        await llm.abort("one")
        await llm.shutdown(0)

    with ThreadPoolExecutor(1) as pool:
        outputs = pool.submit(asyncio.run, client())
        assert ready.wait(10)
        asyncio.run(other())
        assert [output.outputs[0].finish_reason for output in outputs.result(10)] == ["abort", "abort"]


def test_an_idle_model_has_no_thread_and_uses_no_processor(llm: AsyncLLM) -> None:
    async def idle() -> float:
        await assert_async_alive(llm)
        await asyncio.to_thread(assert_no_thread_is_left)
        before = time.process_time()
        await asyncio.sleep(0.5)
        return time.process_time() - before

    assert asyncio.run(idle()) < 0.02


def test_nothing_is_printed_and_nothing_hangs_when_a_program_just_ends(successor_folder: Path) -> None:
    """With a loop that was never closed, one in a thread that nobody waits for, and one that Ctrl-C ends."""
    program = (
        "import asyncio, signal, sys, threading; from octavo import AsyncLLM, SamplingParams\n"
        "llm = AsyncLLM(sys.argv[1], device='reference', max_model_len=1024)\n"
        "params = SamplingParams(n=60, max_tokens=None, ignore_eos=True)\n"
        "async def begin():\n"
        "    streams = [llm.generate([1], params) for _ in range(4)]\n"
        "    await anext(streams[0])\n"
        "    return streams\n"
        "async def client():\n"
        "    while True:\n"
        "        async for output in llm.generate([1], params):\n"
        "            began.set()\n"
        "async def interrupted():\n"
        "    streams = await begin()\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    async for output in streams[1]: pass\n"
        "began = threading.Event()\n"
        "if sys.argv[2] == 'open':\n"
        "    loop = asyncio.new_event_loop()\n"
        "    streams = loop.run_until_complete(begin())\n"
        "elif sys.argv[2] == 'thread':\n"
        "    threading.Thread(target=lambda: asyncio.run(client()), daemon=True).start()\n"
        "    began.wait()\n"
        "else:\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "    try: asyncio.run(interrupted())\n"
        "    except KeyboardInterrupt: pass\n"
    )
    for kind in ("open", "thread", "interrupted"):
        command = [sys.executable, "-c", program, str(successor_folder), kind]
        outcome = subprocess.run(command, check=False, timeout=12, capture_output=True, text=True)
        assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "", ""), kind


def test_a_fork_cannot_use_the_object_and_does_not_hang_on_it(successor_folder: Path) -> None:
    program = (
        "import asyncio, os, sys, warnings; from octavo import AsyncLLM, EngineDeadError, SamplingParams\n"
        "warnings.simplefilter('ignore')\n"
        "llm = AsyncLLM(sys.argv[1], device='reference', max_model_len=64)\n"
        "def refused(use):\n"
        "    try:\n"
        "        use()\n"
        "    except EngineDeadError as error:\n"
        "        assert 'fork' in str(error)\n"
        "    else:\n"
        "        os._exit(1)\n"
        "async def main():\n"
        "    global llm\n"
        "    stream = llm.generate([1], SamplingParams(max_tokens=40, ignore_eos=True), 'mine')\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        for use in (\n"
        "            lambda: llm.generate([1]),\n"
        "            lambda: stream.__anext__().send(None),\n"
        "            lambda: llm.abort('mine').send(None),\n"
        "            llm.get_metrics,\n"
        "        ):\n"
        "            refused(use)\n"
        "        try:\n"
        "            llm.shutdown().send(None)\n"
        "        except StopIteration:\n"
        "            pass\n"
        "        llm.close()\n"
        "        del stream, llm\n"
        "        os._exit(7)\n"
        "    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "    outputs = [output async for output in stream]\n"
        "    assert outputs[-1].finished and len(outputs[-1].outputs[0].token_ids) == 40\n"
        "asyncio.run(main())\n"
    )
    subprocess.run([sys.executable, "-c", program, str(successor_folder)], check=True, timeout=60)


def test_a_thread_that_outlives_the_main_thread_closes_its_engine(tiny_folder: Path) -> None:
    program = (
        "import asyncio, sys, threading\n"
        "from octavo import AsyncLLM, SamplingParams\n"
        "async def main():\n"
        "    async with AsyncLLM(sys.argv[1], device='reference', max_model_len=512) as llm:\n"
        "        threading.main_thread().join()\n"
        "        stream = llm.generate([1], SamplingParams(max_tokens=40, ignore_eos=True))\n"
        "        outputs = [output async for output in stream]\n"
        "    print(len(outputs[-1].outputs[0].token_ids), llm._core is not None and llm._closed)\n"
        "threading.Thread(target=lambda: asyncio.run(main())).start()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tiny_folder)], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "40 True\n", "")
