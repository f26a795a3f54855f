"""ARCHITECTURE.md names things that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
STEP = re.compile(r"^\| (\d\w*) \| `([^`]+)` \| `([^`]+)` \|", re.MULTILINE)
# A path in backquotes: it has a slash, or is a file of the root.
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:md|toml))`")
STEPS = ["0", "1", "1a", "1b", "2", "2a", "3", "4", "4a", "4a1", "4a2", "4b", "4b1", "4b2", "4c", "4c1", "4c2", "4d"]
STEPS += ["4e", "4f", "5", "6"]


def test_the_table_has_every_step_in_order() -> None:
    assert [step for step, _, _ in STEP.findall(TEXT)] == STEPS


@pytest.mark.parametrize(("step", "path", "function"), STEP.findall(TEXT), ids=STEPS)
def test_each_step_names_a_file_that_defines_its_function(step: str, path: str, function: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(rf"\b(?:fn|def|class|struct|trait) {re.escape(function)}\b", source), f"step {step}: {path}"


@pytest.mark.parametrize("path", sorted(set(PATH.findall(TEXT))))
def test_each_path_exists(path: str) -> None:
    assert (ROOT / path).exists()
