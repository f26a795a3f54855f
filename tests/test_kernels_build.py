"""kernels/build.py: what it reads, and what it refuses."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

LOG = """ptxas info    : Compiling entry function 'first' for 'sm_80'
ptxas info    : Function properties for first
    16 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 512 bytes smem, 380 bytes cmem[0]
ptxas info    : Compiling entry function 'second' for 'sm_80'
ptxas info    : Function properties for second
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 16 registers, 380 bytes cmem[0]
"""


@pytest.fixture(scope="module", name="build")
def load_build() -> ModuleType:
    path = Path(__file__).parents[1] / "kernels" / "build.py"
    spec = importlib.util.spec_from_file_location("kernels_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def budget_of(build: ModuleType, tmp_path: Path, text: str) -> dict[str, dict[str, object]]:
    path = tmp_path / "budget.toml"
    path.write_text(text, encoding="utf-8")
    budget: dict[str, dict[str, object]] = build.read_budget(path)
    return budget


def test_a_budget_is_read_with_its_instructions_and_architectures(build: ModuleType, tmp_path: Path) -> None:
    line = 'first = {registers = 32, shared = 0, sass = {"LDG.128" = 2}, sm_90 = {registers = 40}}  # why'
    assert budget_of(build, tmp_path, f"# all\n[kernels]\n{line}\n") == {
        "first": {"registers": 32, "shared": 0, "sass": {"LDG.128": 2}, "sm_90": {"registers": 40}}
    }


@pytest.mark.parametrize("line", ["first", "first = {registers = }", "first = {registers = 32}"])
def test_a_budget_line_without_limits_is_named(build: ModuleType, tmp_path: Path, line: str) -> None:
    with pytest.raises(build.BuildError, match=r"budget.toml:2: .*first"):
        budget_of(build, tmp_path, f"[kernels]\n{line}\n")


def test_the_repository_s_budget_is_read(build: ModuleType) -> None:
    assert "attention_decode_d128" in build.read_budget(build.KERNELS / "budget.toml")


def test_every_excess_is_named(build: ModuleType) -> None:
    resources = build.parse_resources(LOG)
    budget = {"first": {"registers": 40, "shared": 511, "sm_80": {"registers": 39}}, "gone": {}}
    assert build.excesses(budget, resources) == [
        "second: found no entry in budget.toml",
        "gone: budget.toml has it, and no source does",
        "first for sm_80: found 40 registers, expected at most 39",
        "first for sm_80: found 512 shared, expected at most 511",
        "first for sm_80: found 12 bytes of spill, expected none",
        "first for sm_80: found 16 bytes of stack, expected none",
    ]


def test_kernels_within_their_budget_pass(build: ModuleType) -> None:
    resources = {"second": build.parse_resources(LOG)["second"]}
    assert build.excesses({"second": {"registers": 16, "shared": 0}}, resources) == []


def test_machine_code_must_have_what_the_budget_says_and_no_local_memory(build: ModuleType) -> None:
    budget = {"first": {"sass": {"LDGSTS.128": 3, "HMMA": 1}}}
    counts = {"first": {"LDGSTS.E.BYPASS.128": 2, "HMMA.16816.F32.BF16": 8, "LDL.64": 1, "LDG.E": 9}}
    assert build.sass_faults(budget, "a.sm_80.cubin", counts) == [
        "first in a.sm_80.cubin: found 2 LDGSTS.128, expected at least 3",
        "first in a.sm_80.cubin: found 1 LDL, expected none",
    ]
