"""`LLM` as callers use it, and as they misuse it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import tiny
from octavo import LLM, EngineDeadError, InvalidRequest, ModelLoadError, OctavoError, RequestOutput, SamplingParams
from processes import interruptible

GREEDY = SamplingParams(temperature=0, max_tokens=8)


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def assert_alive(llm: LLM) -> None:
    """The engine answers as ever and holds nothing."""
    assert ids(llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)) == [[4, 5, 6, 7, 8, 9, 10, 11]]
    metrics = llm.get_metrics()
    assert (metrics.running, metrics.waiting, metrics.kv_blocks_free) == (0, 0, metrics.kv_blocks_total)


def test_all_forms_of_a_prompt_mean_the_same(successor: LLM) -> None:
    text, tokens = "ab", successor.encode("ab")
    forms: list[Any] = [
        text,
        [text],
        {"prompt": text},
        [{"prompt": text}],
        tokens,
        tuple(tokens),
        [tokens],
        [np.int64(token) for token in tokens],
        {"prompt_token_ids": tokens},
        [{"prompt_token_ids": tokens, "prompt": text}],
    ]
    for form in forms:
        [output] = successor.generate(form, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == tokens
        assert output.outputs[0].token_ids[0] == tokens[-1] + 1
    mixed: Any = [text, tokens, {"prompt": "a"}]
    assert ids(successor.generate(mixed, GREEDY, use_tqdm=False)) == ids(
        successor.generate(["ab", "ab", "a"], GREEDY, use_tqdm=False)
    )


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [
        ("", "prompt 0: found 0 tokens"),
        ([""], "prompt 0: found 0 tokens"),
        ([], "prompts: found an empty list"),
        ([[]], "prompt 0: found 0 tokens"),
        ([[1], []], "prompt 1: found 0 tokens"),
        ([[1], [2, 512]], "prompt 1: token id 512 at position 1, expected an integer from 0 to 511"),
        ([1, 4294967295], "prompt 0: token id 4294967295 at position 1, expected an integer from 0 to 511"),
        ([-1], "prompt 0: token id -1 at position 0"),
        ([1.5], "prompt"),
        ([[1, 1.5]], r"prompt 0: token id 1\.5 at position 1"),
        ([[1, True]], "prompt 0: token id True at position 1"),
        ([[2**70]], "prompt 0: token id 1180591620717411303424 at position 0"),
        ([10**5000], "prompt 0: token id an integer of 16610 bits at position 0, expected an integer from 0 to 511"),
        ([1, [10**5000]], "prompt 0: token id a value of type list at position 1"),
        ([1, "a"], "prompt 0: token id 'a' at position 1"),
        (["a", 1], "prompt 1: found int"),
        (5, "prompts: found int"),
        (None, "prompts: found NoneType"),
        (b"abc", "prompts: found bytes"),
        ({}, "prompt 0: found neither prompt nor prompt_token_ids"),
        ({"prompt": 5}, "prompt 0: prompt: found int"),
        ({"text": "a"}, "prompt 0: 'text' is not known"),
        ({"prompt_token_ids": "ab"}, "prompt 0: found str"),
        ("a\ud800", "prompt 0: found a lone surrogate at 1"),
        ([[1], [1] * 512], "prompt 1: the prompt has 512 tokens, expected at most 511"),
    ],
)
def test_a_wrong_prompt_is_refused_with_its_place_and_queues_nothing(successor: LLM, prompts: Any, reason: str) -> None:
    admitted = successor.get_metrics().requests_admitted
    with pytest.raises(InvalidRequest, match=f"^{reason}"):
        successor.generate(prompts, GREEDY, use_tqdm=False)
    assert successor.get_metrics().requests_admitted == admitted
    assert_alive(successor)


def test_the_last_id_of_the_vocabulary_is_a_prompt(successor: LLM) -> None:
    assert ids(successor.generate([[511]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)) == [[0]]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ("greedy", "sampling_params: found 'greedy'"),
        ([GREEDY], "sampling_params: found 1, expected one for all or one for each of 2 prompts"),
        ([GREEDY, None], "sampling_params: found"),
        (SamplingParams(stop_token_ids=[3, 512]), r"prompt 0: stop_token_ids\[1\]: found 512, expected 0 to 511"),
        (SamplingParams(logprobs=513), "prompt 0: logprobs: found 513, expected at most 512"),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_queued(successor: LLM, params: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{reason}"):
        successor.generate([[1], [2]], params, use_tqdm=False)
    assert_alive(successor)


def test_each_prompt_can_have_its_own_parameters(successor: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (1, 3, 2)]
    assert ids(successor.generate([[5], [6], [7]], params, use_tqdm=False)) == [[6], [7, 8, 9], [8, 9]]


@pytest.fixture(scope="module")
def ender(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Ends at 7 or 9, and recommends how to sample."""
    generation = {"eos_token_id": [7, 9], "temperature": 0.7, "top_k": 20, "top_p": 0.9, "do_sample": True}
    folder = tiny.write(tmp_path_factory.mktemp("ender"), tiny.successor_weights(), generation_config=generation)
    return LLM(folder, device="reference", max_model_len=64, num_kv_blocks=16)


def test_end_tokens_are_no_stop_ids_of_the_caller(ender: LLM) -> None:
    def run(**params: Any) -> tuple[int, str | None, int | str | None]:
        [output] = ender.generate([[3]], SamplingParams(temperature=0, max_tokens=20, **params), use_tqdm=False)
        completion = output.outputs[0]
        assert completion.token_ids == list(range(4, 4 + len(completion.token_ids)))
        return completion.token_ids[-1], completion.finish_reason, completion.stop_reason

    assert run(ignore_eos=True) == (23, "length", None)
    assert run() == (7, "stop", None)
    assert run(ignore_eos=True, stop_token_ids=[12]) == (12, "stop", 12)
    assert run(stop_token_ids=[5]) == (5, "stop", 5)
    assert run(stop_token_ids=[7]) == (7, "stop", None)
    assert run(stop_token_ids=[7], ignore_eos=True) == (7, "stop", 7)


def test_the_checkpoints_recommendation_counts_only_where_no_parameters_are_given(ender: LLM) -> None:
    recommended = ender.default_sampling_params()
    assert recommended == SamplingParams(temperature=0.7, top_k=20, top_p=0.9)
    assert SamplingParams().temperature == 1.0
    [output] = ender.generate([[3]], use_tqdm=False)
    assert ids(
        ender.generate([[3]], SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=output.seed), use_tqdm=False)
    ) == ids([output])


def test_a_recommendation_can_be_ignored_and_one_that_cannot_be_followed_is_an_error(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, tiny.successor_weights(), generation_config={"repetition_penalty": 1.3})
    with pytest.raises(InvalidRequest, match=r"generation config: repetition_penalty is not available yet.*'octavo'"):
        LLM(folder, device="reference", max_model_len=64)
    with LLM(folder, device="reference", max_model_len=64, generation_config="octavo") as llm:
        assert llm.default_sampling_params() == SamplingParams()
    (folder / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.6, "repetition_penalty": 1.0}'
    )
    with LLM(folder, device="reference", max_model_len=64) as llm:
        assert llm.default_sampling_params() == SamplingParams(temperature=0)


def test_logprobs_count_what_is_asked_for(successor: LLM) -> None:
    for asked, expected in [(None, None), (0, 1), (1, 1), (5, 5), (512, 512), (-1, 512)]:
        params = SamplingParams(temperature=0, max_tokens=2, logprobs=asked)
        completion = successor.generate([[64]], params, use_tqdm=False)[0].outputs[0]
        assert (completion.logprobs is None) == (expected is None)
        if completion.logprobs is not None:
            assert [len(row) for row in completion.logprobs] == [expected, expected]
            assert completion.logprobs[0][65].rank == 1
            assert completion.logprobs[0][65].decoded_token == successor.decode([65])
            drawn = [row[token].logprob for row, token in zip(completion.logprobs, [65, 66], strict=True)]
            assert completion.cumulative_logprob == pytest.approx(sum(drawn))


def test_a_drawn_token_outside_the_likeliest_is_reported_beside_them(tiny_llm: LLM) -> None:
    params = SamplingParams(temperature=50.0, seed=1, max_tokens=8, logprobs=2, ignore_eos=True)
    completion = tiny_llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0]
    assert completion.logprobs is not None
    for token, row in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(row)) == token
        ranks = [logprob.rank for logprob in row.values()]
        assert len(row) == 3 if ranks[0] not in (1, 2) else len(row) == 2
        assert sorted(row.values(), key=lambda known: -known.logprob) == sorted(
            row.values(), key=lambda known: known.rank or 0
        )


def test_the_reported_seed_repeats_a_request(tiny_llm: LLM) -> None:
    first, second = tiny_llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=12), use_tqdm=False)
    assert first.seed != second.seed
    assert ids([first]) != ids([second])
    for output in (first, second):
        params = SamplingParams(max_tokens=12, seed=output.seed)
        again = tiny_llm.generate([[9, 9], [1, 2, 3]], params, use_tqdm=False)[1]
        assert (again.seed, ids([again])) == (output.seed, ids([output]))


def test_a_prompt_larger_than_the_pool_is_refused_and_a_long_output_ends_at_the_pool(successor_folder: Path) -> None:
    with LLM(successor_folder, device="reference", block_size=16, num_kv_blocks=8, max_model_len=512) as llm:
        with pytest.raises(
            InvalidRequest, match="prompt 0: the prompt has 200 tokens, expected at most 127: the KV pool"
        ):
            llm.generate([[1] * 200], GREEDY, use_tqdm=False)
        assert_alive(llm)
        [output] = llm.generate([[1] * 100], SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 28
        assert_alive(llm)


def test_many_requests_share_a_small_pool(successor_folder: Path) -> None:
    with LLM(successor_folder, device="reference", block_size=4, num_kv_blocks=10, max_model_len=64) as llm:
        prompts = [[start] * (1 + start % 5) for start in range(20)]
        expected = [list(range(start + 1, start + 9)) for start in range(20)]
        assert ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
        metrics = llm.get_metrics()
        assert metrics.requests_finished == {"stop": 0, "length": 20, "abort": 0, "error": 0}
        assert metrics.kv_blocks_peak <= metrics.kv_blocks_total == 10
        assert 0 < metrics.kv_waste_mean < 1
        assert (metrics.prompt_tokens, metrics.generation_tokens) == (sum(map(len, prompts)), 160)


def test_a_bar_counts_requests_and_shows_the_rate(successor: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    successor.generate([[1], [2]], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tok/s" in shown
    successor.generate([[1], [2]], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


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


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        *[
            ({name: 0}, f"{name}: found 0, expected an integer from 1")
            for name in ("threads", "block_size", "max_num_seqs")
        ],
        ({"max_num_batched_tokens": True}, "max_num_batched_tokens: found True"),
        ({"num_kv_blocks": 1.5}, r"num_kv_blocks: found 1\.5"),
        ({"seed": -1}, "seed: found -1"),
        ({"max_model_len": 1025}, "max_model_len: found 1025, expected from 2 to the model's context length, 1024"),
        ({"max_model_len": 1}, "max_model_len: found 1, expected an integer from 2 to"),
        ({"threads": 10**5000}, "threads: found an integer of 16610 bits, expected an integer from 1 to 1024"),
        ({"kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes: found 100, expected at least"),
        ({"kv_cache_memory_bytes": 10**6, "num_kv_blocks": 4}, "kv_cache_memory_bytes and num_kv_blocks: found both"),
        ({"dtype": "float16"}, "dtype: found 'float16', expected 'auto'"),
        ({"device": "cuda"}, "device: found 'cuda', expected 'auto' or 'cpu' or 'reference'"),
        ({"device": None}, "device: found None, expected"),
        ({"served_model_name": 5}, "served_model_name: found 5, expected a text"),
        ({"generation_config": "x"}, "generation_config: found 'x'"),
        ({"quantization": "awq"}, "quantization is not available yet in this version: found 'awq', expected None"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config is not available yet .* found {'method"),
        ({"scheduling_policy": "fair"}, "scheduling_policy is not available yet .* found 'fair', expected 'fcfs'"),
        ({"kv_cache_dtype": np.zeros(2)}, "kv_cache_dtype is not available yet .* found array"),
        ({"scheduler": "static"}, "scheduler is not available yet .* expected 'continuous'"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching is not available yet .* found True, expected False"),
        ({"enable_prefix_caching": 0}, "enable_prefix_caching is not available yet .* found 0, expected False"),
        ({"chat_template": "{% for %}"}, "chat template, line 1"),
        ({"chat_template": ""}, "chat_template: found '', expected a template or the file"),
        ({"chat_template": 5}, "chat_template: found 5, expected a template or the file"),
        ({"chat_template": "~no-such-user/a"}, "chat_template: found '~no-such-user/a', expected a path"),
        ({"tokenizer": 5}, "tokenizer: found 5, expected a path or a model's name"),
        ({"tokenizer": ""}, "tokenizer: found '', expected a path or a model's name"),
    ],
)
def test_a_wrong_option_is_refused_by_name(tiny_folder: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{reason}"):
        LLM(tiny_folder, **{"device": "reference", **options})


def test_options_of_later_versions_are_taken_where_they_ask_for_nothing(successor_folder: Path) -> None:
    options: dict[str, Any] = {
        "quantization": None,
        "speculative_config": None,
        "scheduling_policy": "fcfs",
        "kv_cache_dtype": "auto",
        "scheduler": "continuous",
    }
    for prefix_caching in (None, False):
        options["enable_prefix_caching"] = prefix_caching
        with LLM(successor_folder, device="reference", max_model_len=64, **options) as llm:
            assert_alive(llm)


def test_an_unknown_option_is_refused_by_name(tiny_folder: Path) -> None:
    with pytest.raises(TypeError, match="gpu_memory_utilization"):
        LLM(tiny_folder, gpu_memory_utilization=0.9)


def test_a_model_too_large_for_the_memory_is_refused_with_numbers(tiny_folder: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"memory: weights \d+ \+ KV cache \d+ .* exceed the limit"):
        LLM(tiny_folder, device="reference", kv_cache_memory_bytes=2**50)


def test_a_checkpoint_that_is_broken_is_refused_by_file(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, tiny.random_weights())
    whole = (folder / "model.safetensors").read_bytes()
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:length])
        with pytest.raises(OctavoError, match=r"model\.safetensors"):
            LLM(folder, device="reference")
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"safetensors"):
        LLM(folder, device="reference")


@pytest.mark.parametrize("length", [0, 3, 8, 24, 1000, 9 * 98362432 // 10, 98362431])
def test_a_gguf_file_cut_short_is_an_ordinary_error(smollm2_file: Path, tmp_path: Path, length: int) -> None:
    cut = tmp_path / "cut.gguf"
    with smollm2_file.open("rb") as whole:
        cut.write_bytes(whole.read(length))
    with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
        LLM(cut)


def test_a_chat_template_can_be_given_as_text_or_as_a_file(tiny_folder: Path, tmp_path: Path) -> None:
    source = "{{ messages[0].content }}!"
    file = tmp_path / "template.jinja"
    file.write_text(source)
    for given in (source, file, str(file)):
        with LLM(tiny_folder, device="reference", max_model_len=64, chat_template=given) as llm:
            assert llm.render_chat([{"role": "user", "content": "x"}])[0]["prompt"] == "x!"
    with pytest.raises(FileNotFoundError, match="nowhere"):
        LLM(tiny_folder, device="reference", chat_template="nowhere.jinja")


def test_a_model_without_text_takes_token_ids_only(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, tiny.successor_weights())
    (folder / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    (folder / "tokenizer_config.json").unlink()
    with LLM(folder, device="reference", max_model_len=64) as llm:
        [output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, logprobs=1), use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [4, 5])
        with pytest.raises(
            InvalidRequest, match="prompt 0: found a text, expected token ids: the model has no tokenizer"
        ):
            llm.generate("abc")
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "x"}])
    with LLM(folder, device="reference", max_model_len=64, tokenizer=tmp_path / "elsewhere.json") as llm:
        assert llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].text != ""
        with pytest.raises(InvalidRequest, match="no chat template"):
            llm.chat([{"role": "user", "content": "x"}])


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
