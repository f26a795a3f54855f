"""From a name to a file."""

import re
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, InvalidRequest
from octavo.models import bundled_path, hub_cache, octavo_home, resolve


@pytest.fixture(autouse=True)
def empty_homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "octavo"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)


def snapshot(tmp_path: Path, revision: str) -> Path:
    folder = tmp_path / "hf" / "hub" / "models--org--name" / "snapshots" / revision
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    return folder


def test_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.touch()
    assert resolve(file) == resolve(str(file)) == file
    assert resolve("m.gguf") == Path("m.gguf")


def test_a_bundled_name_lies_in_the_home_folder() -> None:
    file = bundled_path("smollm2-135m")
    file.parent.mkdir(parents=True)
    file.touch()
    assert resolve("smollm2-135m") == file


def test_a_bundled_model_that_is_not_there_is_an_error_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="octavo pull smollm2-135m") as caught:
        LLM("smollm2-135m")
    assert str(tmp_path / "octavo" / "models" / "smollm2-135m") in str(caught.value)


def test_a_hub_id_is_the_snapshot_of_its_main_branch(tmp_path: Path) -> None:
    snapshot(tmp_path, "aaa")
    main = snapshot(tmp_path, "bbb")
    refs = tmp_path / "hf" / "hub" / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("bbb\n")
    assert resolve("org/name") == main


def test_a_hub_id_with_a_single_snapshot_needs_no_branch(tmp_path: Path) -> None:
    only = snapshot(tmp_path, "aaa")
    assert resolve("org/name") == only


@pytest.mark.parametrize("name", ["org/name", "nothing.gguf", "no such thing", "a/b/c"])
def test_a_name_that_is_nowhere_is_an_error_that_says_where_it_was_looked_for(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(name)}: no such file or folder") as caught:
        LLM(name)
    assert "smollm2-135m" in str(caught.value)


def test_a_folder_with_a_single_gguf_file_stands_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "m.gguf").touch()
    assert resolve(folder) == folder / "m.gguf"
    (folder / "config.json").touch()
    assert resolve(folder) == folder


@pytest.mark.parametrize("name", ["", 123, None, b"m.gguf", ["m.gguf"]])
def test_what_is_no_name_is_refused_and_does_not_mean_the_current_folder(tmp_path: Path, name: Any) -> None:
    (tmp_path / "m.gguf").touch()
    found = re.escape(repr(name))
    with pytest.raises(InvalidRequest, match=f"^model: found {found}, expected a path or a model's name"):
        LLM(name)


def test_the_home_folder_of_nobody_is_refused_with_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest, match=r"^model: found '~no-such-user/a', expected a path"):
        LLM("~no-such-user/a")
    for variable, folder in [("OCTAVO_HOME", octavo_home), ("HF_HOME", hub_cache), ("HF_HUB_CACHE", hub_cache)]:
        monkeypatch.setenv(variable, "~no-such-user/a")
        with pytest.raises(InvalidRequest, match=f"^{variable}: found '~no-such-user/a', expected a path"):
            folder()
