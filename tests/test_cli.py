"""The command line as a user runs it: a process, its output, its exit code."""

import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

import tiny
from octavo import LLM, SamplingParams
from octavo.cli import COMMANDS
from octavo.cli.generate import InOrder
from octavo.cli.options import ENGINE_OPTIONS, SAMPLING_OPTIONS
from processes import interruptible

MODEL = "smollm2-135m"
CAPITAL = [504, 3575, 282, 4649, 314]
# The bytes that follow "B" in the order of the alphabet of the tests' tokenizer.
TEXT_AFTER_B = "CDEFGHIJ"
HEAVY = ("octavo._octavo", "octavo.llm", "jinja2", "rich", "tqdm", "tokenizers", "numpy", "asyncio")


def octavo(*words: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "octavo", *words],
        input=stdin,
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


def assert_one_line_error(outcome: subprocess.CompletedProcess[str], code: int, *facts: str) -> None:
    assert outcome.returncode == code, outcome.stderr
    assert outcome.stderr.startswith("octavo: error: ")
    assert outcome.stderr.count("\n") == 1
    for fact in facts:
        assert fact in outcome.stderr


def test_help_lists_every_command() -> None:
    outcome = octavo("--help")
    assert outcome.returncode == 0
    for name in COMMANDS:
        assert re.search(rf"\n    {name}\s", outcome.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_its_own_help(name: str) -> None:
    outcome = octavo(name, "--help")
    assert outcome.returncode == 0
    assert outcome.stdout.startswith(f"usage: octavo {name} ")


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["generate", "--help"], ["bench", "latency", "--help"]])
def test_help_and_version_import_nothing_heavy(words: list[str]) -> None:
    program = f"""
import sys
from octavo.cli import main
try:
    main({words})
except SystemExit:
    pass
print(sorted(set({HEAVY}) & set(sys.modules)), file=sys.stderr)
"""
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert outcome.stdout
    # The version is that of the extension.
    assert outcome.stderr == ("['octavo._octavo']\n" if words == ["--version"] else "[]\n")


def test_version_names_octavo_and_its_version() -> None:
    outcome = octavo("--version")
    assert outcome.returncode == 0
    assert outcome.stdout == "octavo 0.1.0\n"


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        ([], ["COMMAND"]),
        (["frobnicate"], ["frobnicate", "generate"]),
        (["generate"], ["MODEL"]),
        (["generate", MODEL], ["prompt"]),
        (["generate", MODEL, "x", "--frobnicate"], ["--frobnicate"]),
        (["generate", MODEL, "x", "--max-token", "1"], ["--max-token"]),
        (["generate", MODEL, "x", "--threads", "two"], ["--threads", "'two'", "a whole number"]),
        (["generate", MODEL, "x", "--device", "abacus"], ["--device", "'abacus'", "reference"]),
        (["generate", MODEL, "x", "--temperature", "-1"], ["temperature", "-1"]),
        (["generate", MODEL, "x", "--top-p", "nan"], ["top_p", "nan"]),
        (["--frobnicate"], ["--frobnicate"]),
        (["doctor", "--threads", "1", MODEL, "more"], ["more"]),
        (["generate", MODEL, "--max-tokens", "1", "x", "--frobnicate", "y"], ["--frobnicate"]),
        (["pull", "nope"], ["'nope'", "smollm2-135m"]),
    ],
)
def test_a_wrong_command_line_is_one_line_and_exit_2(words: list[str], facts: list[str]) -> None:
    assert_one_line_error(octavo(*words), 2, *facts)


def test_a_wrong_variable_is_named() -> None:
    outcome = octavo("generate", MODEL, "x", OCTAVO_THREADS="two")
    assert_one_line_error(outcome, 2, "OCTAVO_THREADS", "'two'", "a whole number")


def test_a_missing_model_names_octavo_pull(tmp_path: Path) -> None:
    outcome = octavo("generate", MODEL, "x", OCTAVO_HOME=str(tmp_path))
    assert_one_line_error(outcome, 1, f"octavo pull {MODEL}")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    outcome = octavo("generate", str(tmp_path / "no.gguf"), "x")
    assert_one_line_error(outcome, 1, "no.gguf")


def test_a_traceback_is_printed_only_for_debugging(tmp_path: Path) -> None:
    outcome = octavo("generate", str(tmp_path / "no.gguf"), "x", OCTAVO_DEBUG="1")
    assert outcome.returncode == 1
    assert "Traceback" in outcome.stderr
    assert outcome.stderr.splitlines()[-1].startswith("octavo: error: ")


def test_generate_prints_the_text() -> None:
    outcome = octavo("generate", MODEL, "The capital of France is", "--temperature", "0", "--max-tokens", "4")
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.startswith(" Paris")
    assert outcome.stdout.endswith("\n")


def test_generate_prints_several_texts_in_the_order_of_the_prompts() -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    outcome = octavo("generate", MODEL, *prompts, "--temperature", "0", "--max-tokens", "4")
    assert outcome.returncode == 0, outcome.stderr
    paris, rome = outcome.stdout.index("Paris"), outcome.stdout.index("Rome")
    assert paris < rome


@pytest.mark.parametrize(
    "words", [["--max-tokens", "4", "A", "B"], ["A", "--max-tokens", "4", "B"], ["--max-tokens", "4", "A", "--", "B"]]
)
def test_prompts_may_stand_before_and_after_options(successor_folder: Path, words: list[str]) -> None:
    for order in (["--json", str(successor_folder), *words], [str(successor_folder), "--json", *words]):
        outcome = octavo("generate", *order)
        assert outcome.returncode == 0, outcome.stderr
        assert [output["prompt"] for output in json.loads(outcome.stdout)["outputs"]] == ["A", "B"]


def test_what_follows_two_dashes_is_a_prompt_whatever_it_looks_like(successor_folder: Path) -> None:
    outcome = octavo("generate", str(successor_folder), "A", "--json", "--max-tokens", "1", "--", "--frobnicate", "-5")
    assert outcome.returncode == 0, outcome.stderr
    assert [output["prompt"] for output in json.loads(outcome.stdout)["outputs"]] == ["A", "--frobnicate", "-5"]


def test_json_for_a_terminal_without_the_characters_has_escapes(successor_folder: Path) -> None:
    words = ["generate", str(successor_folder), "é", "--json", "--max-tokens", "1"]
    outcome = octavo(*words, PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert outcome.returncode == 0, outcome.stderr
    assert json.loads(outcome.stdout)["outputs"][0]["prompt"] == "é"
    assert "\\u00e9" in outcome.stdout


def test_generate_json_has_what_the_documentation_says() -> None:
    options = ["--temperature", "0", "--max-tokens", "4", "--json"]
    outcome = octavo("generate", MODEL, "The capital of France is", *options)
    assert outcome.returncode == 0, outcome.stderr
    answer = json.loads(outcome.stdout)
    assert set(answer) == {"model", "outputs", "usage", "timings"}
    assert set(answer["outputs"][0]) == {"prompt", "text", "token_ids", "finish_reason"}
    assert set(answer["timings"]) == {"load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"}
    assert answer["model"] == MODEL
    assert answer["outputs"][0]["text"].startswith(" Paris")
    assert answer["outputs"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    assert all(value > 0 for value in answer["timings"].values())


def test_several_answers_to_each_prompt_are_listed_in_order(successor_folder: Path) -> None:
    options = ["--n", "3", "--max-tokens", "2", "--temperature", "0"]
    outcome = octavo("generate", str(successor_folder), "A", "B", *options)
    assert outcome.returncode == 0, outcome.stderr
    first, second = outcome.stdout.splitlines()[0], outcome.stdout.splitlines()[3]
    assert outcome.stdout.splitlines() == [first] * 3 + [second] * 3
    outcome = octavo("generate", str(successor_folder), "A", "B", *options, "--json")
    assert outcome.returncode == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    listed = [(answer["prompt"], answer["index"], answer["text"]) for answer in found["outputs"]]
    assert listed == [(prompt, index, text) for prompt, text in (("A", first), ("B", second)) for index in range(3)]
    assert found["usage"] == {"prompt_tokens": 2, "completion_tokens": 12, "total_tokens": 14}


def test_json_carries_what_was_asked_for(successor_folder: Path) -> None:
    words = ["generate", str(successor_folder), "AB", "--json", "--temperature", "0", "--max-tokens", "8"]
    outcome = octavo(*words, "--prompt-logprobs", "2", "--logprobs", "0", "--stop", "never", "--stop", TEXT_AFTER_B[3])
    assert outcome.returncode == 0, outcome.stderr
    [answer] = json.loads(outcome.stdout)["outputs"]
    assert set(answer) == {
        "prompt",
        "text",
        "token_ids",
        "finish_reason",
        "stop_reason",
        "logprobs",
        "prompt_logprobs",
    }
    assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == (
        TEXT_AFTER_B[:3],
        "stop",
        TEXT_AFTER_B[3],
    )
    assert [len(row) for row in answer["logprobs"]] == [1] * len(answer["token_ids"])
    first, second = answer["prompt_logprobs"]
    assert first is None
    assert 2 <= len(second) <= 3


def test_a_sampling_option_can_be_an_object_or_a_file_that_holds_one(successor_folder: Path, tmp_path: Path) -> None:
    words = ["generate", str(successor_folder), "A", "--json", "--temperature", "0", "--max-tokens", "2"]
    file = tmp_path / "biases.json"
    file.write_text('{"7": 100}')
    for value in ('{"7": 100}', f"@{file}"):
        outcome = octavo(*words, "--logit-bias", value)
        assert outcome.returncode == 0, outcome.stderr
        assert json.loads(outcome.stdout)["outputs"][0]["token_ids"] == [7, 7]
    outcome = octavo(*words, "--structured-outputs", '{"choice": ["no"]}')
    assert outcome.returncode == 0, outcome.stderr
    assert json.loads(outcome.stdout)["outputs"][0]["text"] == "no"


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--logit-bias", "[1]"], ["--logit-bias", "an object in JSON"]),
        (["--logit-bias", "{"], ["--logit-bias", "an object in JSON"]),
        (["--logit-bias", '{"AI": 1}'], ["logit_bias", "'AI'", "token ids"]),
        (["--structured-outputs", '{"shape": "round"}'], ["--structured-outputs", "shape"]),
        (["--structured-outputs", '{"regex": "a", "choice": ["b"]}'], ["structured_outputs", "exactly one"]),
        (["--stop", ""], ["stop", "''"]),
        (["--min-tokens", "17"], ["min_tokens", "17", "16"]),
        (["--output-kind", "delta"], ["--output-kind"]),
    ],
)
def test_a_wrong_sampling_option_is_found_before_the_model_is_loaded(words: list[str], facts: list[str]) -> None:
    assert_one_line_error(octavo("generate", "no-such-model", "x", *words), 2, *facts)


def test_chat_goes_on_from_one_answer(successor_folder: Path) -> None:
    assert_one_line_error(octavo("chat", str(successor_folder), "--n", "2"), 2, "--n", "found 2", "expected 1")


def test_a_switch_can_be_turned_on_and_off_and_set_in_the_environment(successor_folder: Path) -> None:
    words = ["generate", str(successor_folder), "x", "--max-tokens", "1", "--cache-salt", "mine"]
    assert octavo(*words, "--no-enable-prefix-caching", "--skip-reading-prefix-cache").returncode == 0
    assert octavo(*words, "--enable-prefix-caching", OCTAVO_ENABLE_PREFIX_CACHING="0").returncode == 0
    outcome = octavo(*words, OCTAVO_ENABLE_PREFIX_CACHING="perhaps")
    assert_one_line_error(outcome, 2, "OCTAVO_ENABLE_PREFIX_CACHING", "'perhaps'", "1, true, 0 or false")


@pytest.mark.parametrize("content", [json.dumps(CAPITAL), json.dumps([CAPITAL])], ids=["one", "list"])
def test_generate_takes_token_ids_from_a_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "ids.json"
    file.write_text(content)
    options = ["--temperature", "0", "--max-tokens", "1", "--json"]
    outcome = octavo("generate", MODEL, "--prompt-token-ids", str(file), *options)
    assert outcome.returncode == 0, outcome.stderr
    [output] = json.loads(outcome.stdout)["outputs"]
    assert output["token_ids"] == [7042]
    assert output["text"] == " Paris"


@pytest.mark.parametrize("content", ["", "{}", "[]", "[1, 2.5]", "[[1], 2]", '["a"]', "[true]", "[[]]"])
def test_a_file_that_holds_no_token_ids_is_refused_by_name(tmp_path: Path, content: str) -> None:
    file = tmp_path / "ids.json"
    file.write_text(content)
    outcome = octavo("generate", MODEL, "--prompt-token-ids", str(file))
    assert_one_line_error(outcome, 2, "ids.json", "expected")


@pytest.mark.parametrize(
    "content", [b"[\xff]", b"[" + b"9" * 5000 + b"]", b"[" * 100_000], ids=["no UTF-8", "long number", "deep"]
)
def test_a_file_that_json_cannot_read_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "ids.json"
    file.write_bytes(content)
    assert_one_line_error(octavo("generate", MODEL, "--prompt-token-ids", str(file)), 2, "ids.json", "expected")


def test_an_engine_option_can_come_from_the_environment() -> None:
    words = ["generate", MODEL, "one two three four five six seven eight nine ten", "--max-tokens", "1"]
    outcome = octavo(*words, OCTAVO_MAX_MODEL_LEN="4")
    assert_one_line_error(outcome, 2, "4")
    assert octavo(*words, "--max-model-len", "64", OCTAVO_MAX_MODEL_LEN="4").returncode == 0


def test_a_reader_that_leaves_is_no_traceback() -> None:
    command = f"{sys.executable} -m octavo generate {MODEL} hello --max-tokens 64 --ignore-eos | head -c 1"
    outcome = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert outcome.stderr == ""


def test_doctor_says_what_was_found_and_why() -> None:
    outcome = octavo("doctor")
    assert outcome.returncode == 0, outcome.stderr
    for fact in ("octavo 0.1.0", "instruction set", "threads", "memory", "GPU", "OCTAVO_HOME"):
        assert fact in outcome.stdout


def test_doctor_without_an_output_is_no_error() -> None:
    outcome = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m octavo doctor >&-"], stderr=subprocess.PIPE, text=True, check=False
    )
    assert (outcome.returncode, outcome.stderr) == (0, "")


def test_a_home_that_does_not_exist_is_one_line() -> None:
    for words in (["doctor"], ["pull", MODEL]):
        outcome = octavo(*words, OCTAVO_HOME="~no-such-user/a")
        assert outcome.returncode in (1, 2)
        assert outcome.stderr.count("\n") == 1
        assert "OCTAVO_HOME" in outcome.stderr


def test_doctor_takes_the_number_of_threads_from_the_affinity() -> None:
    [cpu, *_] = os.sched_getaffinity(0)
    command = ["taskset", "--cpu-list", str(cpu), sys.executable, "-m", "octavo", "doctor"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    [line] = [line for line in outcome.stdout.splitlines() if line.startswith("threads")]
    assert line.split()[1] == "1"


def test_doctor_with_a_model_says_where_the_memory_goes() -> None:
    outcome = octavo("doctor", MODEL, "--kv-cache-memory-bytes", "64M")
    assert outcome.returncode == 0, outcome.stderr
    for fact in ("weights", "KV pool", "64.0 MiB", "work memory", "total"):
        assert fact in outcome.stdout


def test_bench_latency_writes_medians_with_their_spread(tmp_path: Path) -> None:
    file = tmp_path / "latency.json"
    outcome = octavo("bench", "latency", MODEL, "--repeats", "2", "--output-json", str(file))
    assert outcome.returncode == 0, outcome.stderr
    report = json.loads(file.read_text())
    for name in ("ttft_s", "prefill_tok_s", "decode_tok_s", "read_gb_s", "dot_gops"):
        assert 0 < report[f"{name}_min"] <= report[name] <= report[f"{name}_max"]
        assert name.split("_")[0] in outcome.stdout


def test_bench_startup_adds_up_and_keeps_to_the_memory_that_was_planned(tmp_path: Path) -> None:
    file = tmp_path / "startup.json"
    outcome = octavo("bench", "startup", MODEL, "--repeats", "1", "--num-kv-blocks", "64", "--output-json", str(file))
    assert outcome.returncode == 0, outcome.stderr
    report = json.loads(file.read_text())
    parts = report["import_s"] + report["load_s"] + report["first_token_s"]
    assert report["total_s"] == pytest.approx(parts)
    # File pages that were packed are gone: what stays is what the plan says, threads and tables apart.
    assert 0.5 * report["planned_bytes"] < report["resident_bytes"] < 1.15 * report["planned_bytes"] + 40e6


def test_bench_finds_out_before_it_measures_that_its_file_cannot_be_written(tmp_path: Path) -> None:
    outcome = octavo("bench", "latency", str(tmp_path / "no.gguf"), "--output-json", str(tmp_path / "no" / "file.json"))
    assert_one_line_error(outcome, 1, "file.json")


def test_chat_says_that_the_model_failed_and_ends_when_nobody_is_there(tmp_path: Path) -> None:
    weights = tiny.successor_weights()
    weights["lm_head.weight"] = weights["lm_head.weight"] * float("nan")
    outcome = octavo("chat", str(tiny.write(tmp_path, weights)), stdin="hi\nho\n")
    assert outcome.returncode == 1
    assert outcome.stderr.startswith("octavo: error: no token could be drawn: the model gave no finite numbers")
    assert outcome.stderr.count("\n") == 1
    assert outcome.stdout.count("> ") == 1


def test_chat_answers_and_leaves() -> None:
    outcome = octavo("chat", MODEL, "--temperature", "0", "--max-tokens", "8", stdin="Say hello.\n/exit\n")
    assert outcome.returncode == 0, outcome.stderr
    assert len(outcome.stdout) > len("> > ")


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "octavo", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, bufsize=0, preexec_fn=interruptible
    )


def read_until(process: subprocess.Popen[str], wanted: str) -> str:
    assert process.stdout is not None
    shown = ""
    while wanted not in shown:
        character = process.stdout.read(1)
        assert character, f"ended after {shown!r}"
        shown += character
    return shown


def test_ctrl_c_ends_generate_within_a_second_and_without_a_traceback() -> None:
    with start("generate", MODEL, "Once upon a time", "--max-tokens", "4000", "--ignore-eos") as process:
        read_until(process, " ")
        interrupted = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait()
        assert time.monotonic() - interrupted < 1
        _, errors = process.communicate()
    assert process.returncode == 130
    assert errors == ""


def test_ctrl_c_in_chat_stops_the_answer_and_the_talk_goes_on() -> None:
    with start("chat", MODEL, "--ignore-eos", "--temperature", "0") as process:
        assert process.stdin is not None
        read_until(process, "> ")
        process.stdin.write("Tell me a long story.\n")
        process.stdin.flush()
        read_until(process, " ")
        process.send_signal(signal.SIGINT)
        read_until(process, "\n> ")
        out, errors = process.communicate("/exit\n")
    assert process.returncode == 0, errors
    assert errors == ""
    assert out == ""


def test_chat_takes_back_a_question_that_does_not_fit() -> None:
    talk = f"{'word ' * 200}\nHello.\n/exit\n"
    outcome = octavo("chat", MODEL, "--max-model-len", "128", "--max-tokens", "4", stdin=talk)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr.count("\n") == 1
    assert "/new starts over" in outcome.stderr


def test_texts_are_printed_in_order_whatever_the_order_in_which_they_come() -> None:
    sink = io.StringIO()
    printer = InOrder(3, sink)
    printer.add(1, "b", finished=False)
    printer.add(2, "c", finished=True)
    assert sink.getvalue() == ""
    printer.add(0, "a", finished=False)
    assert sink.getvalue() == "a"
    printer.add(0, "A", finished=True)
    assert sink.getvalue() == "aA\nb"
    printer.add(1, "B", finished=True)
    assert sink.getvalue() == "aA\nbB\nc\n"


def test_every_field_of_sampling_params_but_the_kind_of_output_is_an_option() -> None:
    options = {option.name for option in SAMPLING_OPTIONS}
    assert options == {field.name for field in fields(SamplingParams)} - {"output_kind"}


def test_the_help_tells_the_default_of_every_option() -> None:
    defaults = {field.name: field.default for field in fields(SamplingParams)}
    engine = {name: known.default for name, known in inspect.signature(LLM).parameters.items()}
    # Where nothing is asked for unless the option is given, and where the default has a value that says more.
    spoken = {
        "include_stop_str_in_output",
        "seed",
        "threads",
        "max_model_len",
        "kv_cache_memory_bytes",
        "device",
        "dtype",
    }
    for option, default in [
        *((option, defaults[option.name]) for option in SAMPLING_OPTIONS),
        *((option, engine[option.name]) for option in ENGINE_OPTIONS),
    ]:
        if default is not None and option.name not in spoken:
            shown = {True: "on", False: "off"}.get(default, str(default)) if isinstance(default, bool) else str(default)
            assert option.help.endswith(f"(default: {shown})"), option.name


def test_every_option_of_llm_is_an_option_but_the_seed_which_is_that_of_the_request() -> None:
    signature = inspect.signature(LLM).parameters.values()
    names = {parameter.name for parameter in signature if parameter.kind is inspect.Parameter.KEYWORD_ONLY}
    assert {option.name for option in ENGINE_OPTIONS} == names - {"seed"}
