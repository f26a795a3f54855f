"""The driver of comparisons with other engines: what counts, what is compared, and what a worker says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from benches.peers.__main__ import main
from benches.peers.cases import all_cases, read_requests
from benches.peers.comparison import Bench, Noisy, Row, Run, Turn
from benches.peers.engine import Engine, EngineError, Unsupported
from benches.peers.environments import PEERS, python_of, variables
from benches.peers.quiet import Moment, Usage, Watch, busy_ticks, process_ticks, share
from benches.peers.table import limit, table

WORKERS = Path("benches/peers/workers").resolve()
CASES = all_cases()
QUIET = Usage(ours=0.9, others=0.01)

# A worker whose engine takes as long as the first token of a prompt says, in milliseconds.
WORKER = """
import sys, time
sys.path.insert(0, {workers!r})
from protocol import Timeline, Unsupported, serve

class Sleeper:
    def __init__(self, model, threads):
        print("what engines print is no answer")
        self.model, self.threads = model, threads
    def facts(self):
        return {{"model": self.model, "threads": self.threads}}
    def run(self, requests, measure):
        first = requests[0]["prompt_token_ids"][0]
        if first == 0:
            raise Unsupported("no such prompts")
        if first == 1:
            raise RuntimeError("it broke")
        if first == 2:
            sys.exit("it ended")
        return Timeline(10.0, 10.0 + first / 1000, 11.0, sum(each["max_tokens"] for each in requests))

def limits(engine, case):
    return {{"read_gb_s": 5.0}} if case == "limits" else None

serve(Sleeper, limits)
"""


def request(first: int, *, measure: str = "all", streams: int = 1, tokens: int = 3) -> dict[str, object]:
    prompts = [{"prompt_token_ids": [first, 7], "max_tokens": tokens} for _ in range(streams)]
    return {"case": "trial", "measure": measure, "rounds": [prompts, prompts]}


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    path = tmp_path / "run_sleeper.py"
    path.write_text(WORKER.format(workers=str(WORKERS)), encoding="utf-8")
    return path


def started(worker: Path) -> Engine:
    return Engine("sleeper", [sys.executable, str(worker), "--model", "m", "--threads", "2"], dict(os.environ))


def state(engine: Engine) -> str:
    """The kernel's letter for what a process does; T is stopped."""
    end = time.monotonic() + 5
    while True:
        found = Path(f"/proc/{engine.session}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        if found == "T" or time.monotonic() > end:
            return found


def test_busy_ticks_are_work_and_steal_and_not_waiting() -> None:
    assert busy_ticks("cpu  10 20 30 4000 500 6 7 8 9 1\ncpu0 1 1 1 1 1 1 1 1 1 1\n") == 10 + 20 + 30 + 6 + 7 + 8
    with pytest.raises(ValueError, match="found 'intr 5', expected 'cpu'"):
        busy_ticks("intr 5\n")


def test_a_process_is_ours_by_its_session_whatever_its_name() -> None:
    stat = "77 (a) R (b) S 1 77 70 0 -1 4194560 9 9 9 9 11 12 13 14 20 0"
    assert process_ticks(stat, sessions={70}, own=1) == 11 + 12 + 13 + 14
    assert process_ticks(stat, sessions=set(), own=77) == 11 + 12 + 13 + 14
    assert process_ticks(stat, sessions={77}, own=1) == 0


def test_others_are_what_was_busy_and_not_ours() -> None:
    before, after = Moment(5.0, busy=1000, ours=100), Moment(7.0, busy=1210, ours=300)
    found = share(before, after, cores=2, tick=0.01)
    assert [found.ours, found.others] == pytest.approx([0.5, 0.025])
    assert Usage(0.9, 0.04).quiet
    assert not Usage(0.9, 0.041).quiet
    # Counters that are read one after the other may disagree by a tick.
    assert share(before, Moment(7.0, busy=1199, ours=300), cores=2, tick=0.01).others == 0.0


def test_the_real_counters_see_our_own_work_as_ours() -> None:
    watch = Watch()
    before = watch.now()
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        pass
    found = watch.since(before)
    # At least half of one core, however loaded the machine is.
    assert found.ours > 0.25 / watch.cores


def test_a_stopped_engine_takes_no_time_and_goes_on(worker: Path) -> None:
    worker.write_text("while True: pass\n", encoding="utf-8")
    with started(worker) as engine:
        watch = Watch([engine.session])
        time.sleep(0.3)
        engine.stop()
        time.sleep(0.1)
        before = watch.now()
        time.sleep(0.3)
        after = watch.now()
        # This process reads counters meanwhile.
        assert after.ours - before.ours <= 5
        engine.go_on()
        time.sleep(0.5)
        assert watch.now().ours - after.ours > 5


def test_a_worker_answers_line_by_line(worker: Path) -> None:
    with started(worker) as engine:
        assert engine.ready() == {"model": "m", "threads": 2}
        assert engine.ask(request(250)) == {"seconds": 2.0, "tokens": 6}
        assert engine.ask(request(250, measure="prefill")) == {"seconds": pytest.approx(0.5), "tokens": 4}
        # The first token of each stream is no part of decoding.
        assert engine.ask(request(250, measure="decode", streams=2)) == {"seconds": 1.5, "tokens": 8}
        assert engine.ask({"case": "limits"}) == {"read_gb_s": 5.0}
        assert engine.peak_bytes() > 1_000_000


def test_a_worker_says_what_it_cannot_do_and_lives_on(worker: Path) -> None:
    with started(worker) as engine:
        engine.ready()
        with pytest.raises(Unsupported, match="sleeper: no such prompts"):
            engine.ask(request(0))
        with pytest.raises(EngineError, match="sleeper: RuntimeError: it broke"):
            engine.ask(request(1))
        with pytest.raises(EngineError, match="measure: found 'most', expected decode, prefill, all or startup"):
            engine.ask(request(9, measure="most"))
        # Each time it stands still again.
        assert state(engine) == "T"
        assert engine.ask(request(9))["tokens"] == 6


def test_a_worker_that_ends_is_reported_with_its_last_words(worker: Path) -> None:
    with started(worker) as engine:
        engine.ready()
        with pytest.raises(EngineError, match=r"sleeper ended with status 1: .*it ended"):
            engine.ask(request(2))


class Scripted(Watch):
    """Tells the shares it is given, one a run."""

    def __init__(self, others: list[float]) -> None:
        super().__init__()
        self.others = others

    def wait(self, *, most: float, window: float = 0.5) -> bool:
        return most > 0 and window > 0

    def since(self, _: Moment) -> Usage:
        return Usage(0.5, self.others.pop(0))


class Told(Turn):
    """Runs that take the seconds it is given."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = seconds
        self.turns: list[int] = []

    def __call__(self, _: object, turn: int) -> tuple[float, int, int | None]:
        self.turns.append(turn)
        return self.seconds.pop(0), 100, None


def test_a_run_beside_which_others_worked_is_thrown_away_and_repeated() -> None:
    ours, theirs = Told([9.0, 1.0, 1.0, 2.0]), Told([9.0, 2.0, 7.0, 5.0])
    row = Row(CASES["batch16"], "llama.cpp", "Q4_0")
    bench = Bench(Scripted([0.0, 0.03, 0.01, 0.5, 0.04]), patience=1, tries=2, report=lambda _: None)
    bench.compare(row, ours, theirs, dict, pairs=2)
    # The first of each does not count; the peer's second run was loud.
    assert [run.seconds for run in row.octavo] == [1.0, 1.0]
    assert [run.seconds for run in row.other] == [2.0, 5.0]
    assert (ours.turns, theirs.turns, row.thrown_away) == ([0, 1, 2], [0, 1, 2, 2], 1)
    assert row.ratios() == [2.0, 5.0]


def test_a_machine_that_is_never_quiet_ends_a_case_and_keeps_its_pairs() -> None:
    row = Row(CASES["batch16"], "vllm", "bf16")
    bench = Bench(Scripted([0.0, 0.0, 0.2, 0.3]), patience=1, tries=2, report=lambda _: None)
    with pytest.raises(Noisy, match=r"others took over 4% beside 2 runs, last 30.0%"):
        bench.compare(row, Told([1.0] * 4), Told([2.0] * 4), dict, pairs=2)
    assert (row.ratios(), row.thrown_away) == ([2.0], 2)
    impatient = Bench(Scripted([]), patience=0, tries=2, report=lambda _: None)
    with pytest.raises(Noisy, match="the machine was not quiet for 0 s"):
        impatient.compare(row, Told([1.0]), Told([2.0]), dict, pairs=1)


def measured(name: str, pairs: list[tuple[float, float]], *, tokens: int = 100) -> Row:
    row = Row(CASES[name], "llama.cpp", "Q4_0")
    for mine, other in pairs:
        row.octavo.append(Run(mine, tokens, QUIET, peak_bytes=200_000_000))
        row.other.append(Run(other, tokens, QUIET, peak_bytes=500_000_000))
        row.limits.append({"read_gb_s": 20.0, "reread_gb_s": 30.0, "dot_gops": 800.0, "kernel_gops": 500.0})
    return row


def test_a_ratio_above_one_means_that_octavo_was_faster_also_at_starting() -> None:
    assert measured("decode", [(1.0, 3.0), (2.0, 3.0)]).ratios() == [3.0, 1.5]
    start = measured("startup", [(0.5, 1.0)])
    assert (start.ratios(), start.memory_ratios()) == ([2.0], [2.5])


def test_the_table_tells_medians_ratios_of_pairs_and_limits() -> None:
    rows = [
        measured("decode", [(0.5, 1.0), (0.4, 1.2), (1.0, 1.0)]),
        measured("startup", [(0.5, 1.0)]),
        Row(CASES["prefill"], "vllm", "bf16", note="not installed"),
    ]
    facts = {"bytes_per_token": 100_000_000.0, "layer_weights": 1_000_000.0}
    heading, rule, decode, start, memory, missing = table(rows, facts)
    assert heading.split("|")[1].strip() == "case"
    assert set(rule) == set("|- ")
    assert [cell.strip() for cell in decode.split("|")[2:-1]] == [
        "200 tok/s",
        "100 (llama.cpp Q4_0)",
        "2.00 [1.00 to 3.00] n=3",
        "300 by re-reading the weights (67%)",
    ]
    assert "0.5 s" in start
    assert "2.00 [2.00 to 2.00] n=1" in start
    assert "200 MB" in memory
    assert "500 (llama.cpp Q4_0)" in memory
    assert "- (vllm bf16: not installed)" in missing
    assert len({len(line) for line in (heading, rule, decode, start, memory, missing)}) == 1


def test_the_limit_of_prefill_counts_two_operations_a_weight() -> None:
    row = measured("prefill", [(1.0, 2.0)], tokens=200_000)
    assert limit(row, 200_000, {"layer_weights": 1_000_000.0}) == (
        "400000 by int8 products (50%), 250000 by the kernels (80%)"
    )


def test_each_turn_of_a_case_has_prompts_of_its_own() -> None:
    case = CASES["batch16"]
    [one], [other] = case.requests(1), case.requests(2)
    assert one == case.requests(1)[0]
    assert len(one) == 16
    assert len({tuple(each["prompt_token_ids"]) for each in one + other}) == 32
    assert {len(each["prompt_token_ids"]) for each in one} == {32}
    assert len(CASES["decode"].requests(1)) == 4


def test_the_files_of_requests_hold_what_the_cases_say() -> None:
    [mixed], [shared] = CASES["mixed"].requests(1), CASES["shared_prefix"].requests(1)
    assert (len(mixed), sum(len(each["prompt_token_ids"]) for each in mixed)) == (64, 10_091)
    assert sum(each["max_tokens"] for each in mixed) == 9_094
    assert len({tuple(each["prompt_token_ids"][:512]) for each in shared}) == 1
    assert {(len(each["prompt_token_ids"]), each["max_tokens"]) for each in shared} == {(544, 32)}


def test_a_file_of_other_content_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "requests.json"
    file.write_text(json.dumps([{"prompt": "text"}]), encoding="utf-8")
    with pytest.raises(ValueError, match=r"requests.json: request 0: found .*, expected a list of objects"):
        read_requests(file)


def test_an_environment_may_be_shared_and_hides_the_python_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    assert python_of(PEERS["transformers"], tmp_path) is None
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert python_of(PEERS["transformers"], tmp_path) == python
    assert python_of(PEERS["mistralrs"], tmp_path) is None
    found = variables(PEERS["vllm"], python, [2, 3])
    assert (found["VLLM_CPU_OMP_THREADS_BIND"], found["OMP_NUM_THREADS"]) == ("2,3", "2")
    assert "PYTHONPATH" not in found


def test_what_is_not_installed_is_said_and_the_rest_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # octavo itself is loaded and runs no case.
    output = tmp_path / "all.json"
    words = ["run", "--model", "smollm2-135m", "--environments", str(tmp_path), "--pairs", "1"]
    assert main([*words, "--cases", "decode,startup", "--output-json", str(output)]) == 0
    printed, said = capfd.readouterr()
    assert "vllm bf16: not installed" in said
    assert printed.count("not installed") == 14
    found = json.loads(output.read_text(encoding="utf-8"))
    assert len(found["rows"]) == 14
    assert {row["note"] for row in found["rows"]} == {"not installed"}
    assert found["engines"]["octavo"]["bytes_per_token"] > 0


def test_a_case_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--model", "m", "--environments", ".", "--cases", "decode,dance"])
    assert "found 'dance', expected some of decode, prefill" in capsys.readouterr().err


def test_an_engine_is_ended_also_while_it_stands_still(worker: Path) -> None:
    engine = started(worker)
    engine.ready()
    engine.stop()
    engine.close()
    with pytest.raises(ProcessLookupError):
        os.kill(engine.session, signal.SIGCONT)
