"""`octavo export`: a checkpoint, or its tokenizer alone, as a Hugging Face folder.

The files are written to a scratch folder beside the target, which is renamed when all of them are whole.

Invariant: a folder that an export made is complete; after a failure nothing is there.
"""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.errors import InvalidRequest
from octavo.models import checked_path, expanded, resolve

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    Writer = Callable[[Path, Path], None]


def export_model(model: str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[Path]:
    """Write configuration, weights in bfloat16 and tokenizer of `model` to `folder`, and return the files.

    A checkpoint without a tokenizer gives a folder without one. `folder` must be empty or missing, its parent must be
    there. Raises `InvalidRequest` for another folder, `ModelLoadError` for a checkpoint that cannot be read or that
    a Hugging Face folder cannot describe, `OSError` for a disk that refuses.
    """
    from octavo._octavo import export_model as write

    return _exported(model, folder, write)


def export_tokenizer(model: str | os.PathLike[str], folder: str | os.PathLike[str]) -> list[Path]:
    """Write `tokenizer.json` and `tokenizer_config.json` of `model` to `folder`, and return the files.

    As `export_model`, but a checkpoint without a tokenizer is a `ModelLoadError`.
    """
    from octavo._octavo import export_tokenizer as write

    return _exported(model, folder, write)


def _exported(model: str | os.PathLike[str], folder: str | os.PathLike[str], write: Writer) -> list[Path]:
    source = resolve(model)
    name = checked_path(folder, what="output", expected="the path of a folder")
    target = expanded(name, what="output").resolve()
    _require_room(target)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as scratch:
        # Inside it, for a scratch folder is its owner's alone.
        whole = Path(scratch) / "whole"
        whole.mkdir()
        write(source, whole)
        try:
            whole.rename(target)
        except OSError as error:
            # Something came there meanwhile.
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                _require_room(target)
            raise
    return sorted(target.iterdir())


def _require_room(target: Path) -> None:
    """Refuse a target that a finished folder could not be renamed to."""
    expected = "an empty folder, or a name that is free"
    if target.is_dir():
        if found := sorted(path.name for path in target.iterdir()):
            raise InvalidRequest(f"{target}: found a folder with {found[0]} in it, expected {expected}")
    elif target.exists():
        raise InvalidRequest(f"{target}: found a file, expected {expected}")
    if not target.parent.is_dir():
        raise InvalidRequest(f"{target.parent}: found no such folder, expected the one to make {target.name} in")
