"""Every example runs, as a user runs it, and prints what it promises."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
EXPECTED = {
    "async_streams.py": ["The capital of France is Paris", "The capital of Italy is Rome"],
    "chat.py": ["Paris", "Rome"],
    "demo.py": ["time to first token", "prefill", "decode", "KV blocks used", "KV waste", "peak memory"],
    "generate.py": ["The capital of France is Paris"],
    "repeat.py": ["seed "],
    "stream.py": ["."],
}


def run(name: str) -> str:
    command = [sys.executable, str(EXAMPLES / name)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_example_prints_what_it_promises(name: str) -> None:
    printed = run(name)
    for text in EXPECTED[name]:
        assert text in printed


def test_the_examples_of_the_readme_run() -> None:
    """The second one goes on in an event loop, with a model that is loaded already."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    program, fragment = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    beginning = (
        "import asyncio\nfrom octavo import AsyncLLM, SamplingParams\nasync def main():\n"
        "    async with AsyncLLM('smollm2-135m', kv_cache_memory_bytes=64 << 20) as llm:\n"
    )
    for example in (program, f"{beginning}{textwrap.indent(fragment, ' ' * 8)}\nasyncio.run(main())"):
        outcome = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, check=False)
        assert outcome.returncode == 0, outcome.stderr
        assert outcome.stdout.count("\n") >= 3


def test_the_demo_stays_under_400_mb() -> None:
    line = run("demo.py").splitlines()[-1]
    peak = int(line.removeprefix("peak memory").removesuffix("MiB"))
    assert peak * 2**20 < 400e6


def test_the_demo_shows_panes_on_a_terminal() -> None:
    controller, terminal = os.openpty()
    command = [sys.executable, str(EXAMPLES / "demo.py")]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen(command, stdout=terminal, stderr=subprocess.PIPE, env=environment) as process:
        os.close(terminal)
        shown = read_to_the_end(controller)
        errors = process.stderr.read() if process.stderr is not None else b""
    os.close(controller)
    assert process.returncode == 0, errors
    assert shown.count("╭") >= 8
    assert "KV waste" in shown


def read_to_the_end(descriptor: int) -> str:
    """Everything that comes until the other end of the terminal is closed, which Linux reports as an error."""
    pieces = []
    try:
        while piece := os.read(descriptor, 65536):
            pieces.append(piece)
    except OSError:
        pass
    return b"".join(pieces).decode(errors="replace")
