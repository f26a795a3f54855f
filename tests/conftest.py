"""Models that many tests share."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from octavo import LLM, AsyncLLM
from octavo.models import resolve
from streams import closed_at_the_end, loaded


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny"), tiny.random_weights())


@pytest.fixture(scope="session")
def tiny_llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder, device="reference", max_model_len=512, num_kv_blocks=256) as llm:
        yield llm


@pytest.fixture(scope="session")
def successor_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("successor"), tiny.successor_weights())


@pytest.fixture(scope="session")
def successor(successor_folder: Path) -> Iterator[LLM]:
    """A model in which token t is always followed by t + 1."""
    with LLM(successor_folder, device="reference", max_model_len=512, num_kv_blocks=256) as llm:
        yield llm


@pytest.fixture
def llm(successor_folder: Path) -> Iterator[AsyncLLM]:
    """A model in which token t is always followed by t + 1, for event loops."""
    with closed_at_the_end(loaded(successor_folder)) as llm:
        yield llm


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2(smollm2_file: Path) -> Iterator[LLM]:
    with LLM(smollm2_file, max_model_len=1024, num_kv_blocks=128) as llm:
        yield llm


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many continuations the law compared, and how many left the plain run at tokens within the margin."""
    count: Counter[str] = Counter()
    for report in terminalreporter.getreports("passed"):
        count.update({name: value for name, value in report.user_properties if isinstance(value, int)})
    if count:
        terminalreporter.write_line(f"{count['others']} of {count['continuations']} continuations have other tokens")
