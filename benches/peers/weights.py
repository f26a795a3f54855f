"""The model's weights in the formats of the peers, all made from the one file that octavo runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from benches.peers.environments import PEERS, python_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WRITER = Path(__file__).parent / "workers" / "write_gguf.py"


def model_file(model: str, octavo_python: Path) -> Path:
    """The file that `model` names: a path, or the name of a pulled model."""
    if Path(model).exists():
        return Path(model).resolve()
    script = "import sys; from octavo.models import resolve; print(resolve(sys.argv[1]))"
    done = subprocess.run(
        [str(octavo_python), "-c", script, model], check=False, capture_output=True, text=True, env=os.environ
    )
    if done.returncode != 0:
        raise FileNotFoundError(f"{model}: {done.stderr.strip().splitlines()[-1]}")
    return Path(done.stdout.strip())


def written(weights: str, model: Path, environments: Path) -> Path:
    """Where the weights in a format are, or would be."""
    if weights == "Q4_1":
        return model
    folder = environments / "weights" / model.stem.removesuffix(".Q4_1")
    return folder / "bf16" if weights == "bf16" else folder / f"{weights}.gguf"


def prepare(
    model: Path, environments: Path, octavo_python: Path, formats: Sequence[str], report: Callable[[str], None]
) -> None:
    """Write the formats that are not there yet."""
    for weights in formats:
        path = written(weights, model, environments)
        if path.exists():
            report(f"{weights}: {path} is there")
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        # Under its own name once it is whole.
        part = path.with_name(f".{path.name}.part")
        if weights == "bf16":
            command = [str(octavo_python), "-m", "octavo", "export", str(model), "-o", str(part)]
        else:
            python = python_of(PEERS["llama.cpp"], environments)
            if python is None:
                report(f"{weights}: llama.cpp is not installed in {environments}, and its environment writes this file")
                continue
            command = [str(python), str(WRITER), "--model", str(model), "--format", weights, "--output", str(part)]
        done = subprocess.run(command, check=False)
        if done.returncode == 0:
            part.rename(path)
            report(f"{weights}: {path} written")
        else:
            report(f"{weights}: {' '.join(command[1:4])} ended with status {done.returncode}")
