"""Where to compute: on the GPU if all that it needs is there, otherwise on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

Device: TypeAlias = Literal["auto", "cpu", "cuda", "reference"]


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """An NVIDIA GPU that octavo can compute on."""

    name: str
    compute_capability: tuple[int, int]
    memory: int
    """Bytes."""
    driver: tuple[int, int]
    """The version of CUDA that the driver supports."""
    multiprocessors: int
    cublaslt: str
    """The file that has the matrix products."""


@dataclass(frozen=True, kw_only=True)
class NoGpu:
    """Why there is none."""

    missing: str
    has_driver: bool
    """NVIDIA's driver is installed: somebody means to use a GPU."""


def probe_cuda() -> Gpu | NoGpu:
    """Look for the first NVIDIA GPU, its driver and libraries, and this build's kernels."""
    from octavo import _octavo

    found = _octavo.probe_cuda(cuda_library_folders())
    return NoGpu(**found) if "missing" in found else Gpu(**found)


def cuda_library_folders() -> list[str]:
    """The folders in which wheels of NVIDIA's libraries (`octavo[cuda]`) have put them."""
    spec = find_spec("nvidia")
    roots = [] if spec is None else spec.submodule_search_locations or []
    return [str(folder) for root in roots for folder in sorted(Path(root).glob("*/lib"))]


def chosen_device(device: Device) -> Literal["cpu", "cuda", "reference"]:
    """The device itself, or what `auto` comes to here; one line of the log says why it is not the GPU."""
    if device != "auto":
        return device
    found = probe_cuda()
    if isinstance(found, Gpu):
        return "cuda"
    # Not at the top: importing it takes as long as half of octavo.
    import logging

    # Most machines without a driver have no GPU either, and nobody need be told.
    level = logging.WARNING if found.has_driver else logging.INFO
    logging.getLogger("octavo").log(level, "device auto: the CPU, since there is %s", found.missing)
    return "cpu"
