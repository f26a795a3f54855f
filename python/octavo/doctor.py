"""What octavo finds on this machine, and what a model would take on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.models import resolve

if TYPE_CHECKING:
    import os

    from octavo._octavo import EngineOptions


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the host grants this process, and what octavo makes of it."""

    features: list[str]
    """Processor features that matter to the kernels, as detected."""
    isa: str
    """The instruction set that the kernels will use."""
    threads: int
    """Threads that will compute: the smallest of the three bounds below."""
    affinity: int
    """CPUs in the process's affinity mask."""
    quota: int | None
    """The control group's CPU quota, rounded up; None without one."""
    cores: int
    """Physical cores among the CPUs of the mask."""
    memory_limit: int
    """Bytes: the host's memory or the control group's limit, whichever is lower."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Where the memory would go; nothing is loaded to know it."""

    weight_bytes: int
    kv_bytes: int
    arena_bytes: int
    kv_bytes_per_token: int
    num_blocks: list[int]
    """Blocks of each group of layers."""
    max_model_len: int

    @property
    def total(self) -> int:
        """All of it, in bytes."""
        return self.weight_bytes + self.kv_bytes + self.arena_bytes


def host() -> Host:
    """Look at the machine."""
    from octavo import _octavo

    return Host(**_octavo.host())


def read_bandwidth(threads: int) -> float:
    """Measure how fast `threads` threads read memory, in GB/s (1e9 bytes)."""
    from octavo import _octavo

    return _octavo.measure_read_bandwidth(threads)


def dot_peak(threads: int) -> float:
    """Measure the peak of int8 dot products on `threads` threads, in Gop/s (a multiplication and an addition: 2)."""
    from octavo import _octavo

    return _octavo.measure_dot_peak(threads)


def memory_plan(model: str | os.PathLike[str], *, device: str, options: EngineOptions) -> MemoryPlan:
    """What an `LLM` of `model` with these options would take."""
    from octavo import _octavo

    return MemoryPlan(**_octavo.memory_plan(resolve(model), device=device, options=options))
