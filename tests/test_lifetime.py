"""`LLM` under threads, signals and forks, and how it ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from calls import GREEDY, assert_alive
from octavo import LLM, EngineDeadError, SamplingParams
from processes import interruptible


def test_calls_from_several_threads_get_their_own_outputs(tiny_llm: LLM) -> None:
    prompts = [[start, 2 * start, 7] for start in range(8)]
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=16, ignore_eos=True, logprobs=1)
    alone = [tiny_llm.generate([prompt], params, use_tqdm=False)[0].outputs for prompt in prompts]
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.002):
            ticks.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    with ThreadPoolExecutor(4) as pool:
        together = list(
            pool.map(lambda prompt: tiny_llm.generate([prompt], params, use_tqdm=False)[0].outputs, prompts * 4)
        )
    done.set()
    ticker.join()
    assert together == alone * 4
    assert max(np.diff(ticks), default=0.0) < 1.0


def test_a_signal_ends_a_call_and_leaves_the_object_usable(tiny_llm: LLM) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupted)
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    finished = tiny_llm.get_metrics().requests_finished["abort"]
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            tiny_llm.generate([[1, 2, 3]] * 8, params, use_tqdm=False)
        ended = time.monotonic()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    metrics = tiny_llm.get_metrics()
    assert time.monotonic() - ended < 1
    assert (metrics.running, metrics.waiting, metrics.kv_blocks_free) == (0, 0, metrics.kv_blocks_total)
    assert metrics.requests_finished["abort"] == finished + 8
    [output] = tiny_llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8


def test_ctrl_c_ends_the_process(tiny_folder: Path) -> None:
    program = (
        "import sys; from octavo import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], device='reference')\n"
        "print('loaded', flush=True)\n"
        "llm.generate([[1]] * 64, SamplingParams(max_tokens=1000, ignore_eos=True), use_tqdm=False)\n"
    )
    command = [sys.executable, "-c", program, str(tiny_folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=interruptible) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loaded\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        sent = time.monotonic()
        _, stderr = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in stderr
    assert time.monotonic() - sent < 5


def test_a_closed_engine_says_so_and_closes_again(successor_folder: Path) -> None:
    with LLM(successor_folder, device="reference", max_model_len=64) as llm:
        assert_alive(llm)
    llm.close()
    for use in (
        lambda: llm.generate([[1]], GREEDY),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.stream([[1]]),
        llm.get_metrics,
    ):
        with pytest.raises(EngineDeadError, match="closed"):
            use()


def test_a_second_thread_that_closes_waits_for_the_first(tiny_folder: Path) -> None:
    """The engine ends after its current step, which is a long one here."""
    llm = LLM(tiny_folder, device="reference", max_model_len=1024, max_num_batched_tokens=4096)
    stream = llm.stream([[1] * 1000] * 4, SamplingParams(max_tokens=None, ignore_eos=True))
    ended: list[float] = []

    def close() -> None:
        llm.close()
        ended.append(time.monotonic())

    threads = [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert abs(ended[0] - ended[1]) < 0.1
    with pytest.raises(EngineDeadError, match="closed"):
        list(stream)


def test_closing_ends_a_call_in_another_thread(tiny_folder: Path) -> None:
    llm = LLM(tiny_folder, device="reference", max_model_len=1024)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.generate, [[1]] * 8, params, use_tqdm=False)
        while llm.get_metrics().running == 0:
            time.sleep(0.01)
        llm.close()
        with pytest.raises(EngineDeadError, match="closed"):
            call.result(timeout=30)


def test_a_fork_cannot_use_the_object_and_does_not_hang_on_it(successor_folder: Path) -> None:
    program = (
        "import os, sys, warnings; from octavo import LLM, EngineDeadError\n"
        "warnings.simplefilter('ignore')\n"
        "llm = LLM(sys.argv[1], device='reference', max_model_len=64)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        "        llm.generate([[1]], use_tqdm=False)\n"
        "    except EngineDeadError as error:\n"
        "        assert 'fork' in str(error)\n"
        "    else:\n"
        "        os._exit(1)\n"
        "    llm.close()\n"
        "    del llm\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "assert llm.generate([[1]], use_tqdm=False)[0].finished\n"
    )
    subprocess.run([sys.executable, "-c", program, str(successor_folder)], check=True, timeout=60)


def test_nothing_grows_over_many_requests(successor: LLM) -> None:
    def resident_pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
    for _ in range(3):
        successor.generate([[token] for token in range(200)], params, use_tqdm=False)
    before = resident_pages()
    for _ in range(10):
        successor.generate([[token] for token in range(200)], params, use_tqdm=False)
    assert (resident_pages() - before) * os.sysconf("SC_PAGE_SIZE") < 8 << 20
    assert_alive(successor)


def test_importing_octavo_loads_nothing_heavy() -> None:
    program = "import json, sys, octavo; print(json.dumps(sorted(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    heavy = {"octavo._octavo", "octavo.llm", "jinja2", "tqdm", "numpy", "rich"}
    assert not heavy & set(json.loads(shown))


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_an_idle_engine_uses_no_processor(tiny_folder: Path, device: Literal["cpu", "reference"]) -> None:
    with LLM(tiny_folder, device=device, max_model_len=64) as llm:
        llm.generate([[1]], GREEDY, use_tqdm=False)
        # Workers stay awake for a few milliseconds after a step.
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.01
