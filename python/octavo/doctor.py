"""What octavo finds on this machine, and what a model would take on it."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.models import resolve

if TYPE_CHECKING:
    import os

    from octavo._octavo import EngineOptions


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the host grants this process, and what octavo makes of it."""

    features: list[str]
    """Instruction sets for which there are kernels and which were detected, the slowest first."""
    isa: str
    """The one that the kernels will use."""
    threads: int
    """Threads that will compute: the smallest of the three bounds below."""
    affinity: int
    """CPUs in the process's affinity mask."""
    quota: int | None
    """The control group's CPU quota, rounded up; None without one."""
    nodes: int
    """NUMA nodes among the CPUs of the mask; threads stay on one of them."""
    cores: int
    """Physical cores among the CPUs of the mask on that node."""
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


@dataclass(frozen=True)
class Processor:
    """What the kernel says of the first processor."""

    name: str
    flags: list[str]
    """Those of its features that matter to kernels."""


_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "asimddp",
)


def processor() -> Processor:
    """Read `/proc/cpuinfo`; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Processor(platform.machine(), [])
    fields = dict(line.split(":", 1) for line in reversed(text.splitlines()) if ":" in line)
    found = {name.strip(): value.strip() for name, value in fields.items()}
    flags = set(found.get("flags", found.get("Features", "")).split())
    return Processor(found.get("model name", platform.machine()), [flag for flag in _FLAGS if flag in flags])


def host() -> Host:
    """Look at the machine."""
    from octavo import _octavo

    return Host(**_octavo.host())


def read_bandwidth(threads: int, num_bytes: int | None = None) -> float:
    """Measure how fast `threads` threads read `num_bytes` bytes over and over, in GB/s.

    Without `num_bytes` it is 1 GiB, which no cache holds for long: the bandwidth of memory.
    """
    from octavo import _octavo

    return _octavo.measure_read_bandwidth(threads, num_bytes)


def dot_peak(threads: int) -> float:
    """Measure the peak of int8 dot products on `threads` threads, in Gop/s (a multiplication and an addition: 2)."""
    from octavo import _octavo

    return _octavo.measure_dot_peak(threads)


def memory_plan(model: str | os.PathLike[str], *, device: str, options: EngineOptions) -> MemoryPlan:
    """What an `LLM` of `model` with these options would take."""
    from octavo import _octavo

    return MemoryPlan(**_octavo.memory_plan(resolve(model), device=device, options=options))
