"""`octavo doctor [MODEL]`."""

from __future__ import annotations

import inspect
import platform
from typing import TYPE_CHECKING, Any

from octavo.cli.options import add_engine_options, engine_settings
from octavo.devices import Gpu, NoGpu, chosen_device
from octavo.models import BUNDLED, bundled_path, hub_cache, octavo_home

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from octavo.doctor import Host, MemoryPlan, Processor


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `octavo doctor`."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="also say where the memory would go")
    add_engine_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found."""
    settings = engine_settings(arguments)
    from octavo.doctor import host, processor

    for name, finding in _findings(host(), processor()):
        print(f"{name:<16} {finding}")
    if arguments.model is not None:
        print(f"\n{arguments.model}")
        for name, finding in _plan_lines(_plan(arguments.model, settings)):
            print(f"{name:<16} {finding}")
    return 0


def _findings(host: Host, processor: Processor) -> Iterator[tuple[str, str]]:
    from octavo import __version__
    from octavo.devices import probe_cuda

    yield "version", f"octavo {__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield "processor", f"{processor.name}: {' '.join(processor.flags) or 'no feature that kernels use'}"
    yield "instruction set", f"{host.isa} (there are kernels for {', '.join(host.features)} here)"
    quota = "none" if host.quota is None else str(host.quota)
    reason = f"affinity allows {host.affinity}, control group quota {quota}, physical cores {host.cores}"
    if host.nodes > 1:
        reason += f" on one of {host.nodes} NUMA nodes"
    yield "threads", f"{host.threads} ({reason})"
    yield "memory limit", _mib(host.memory_limit)
    yield "GPU", _gpu_finding(probe_cuda())
    yield "OCTAVO_HOME", str(octavo_home())
    for name in BUNDLED:
        path = bundled_path(name)
        yield f"  {name}", str(path) if path.is_file() else f"not there: octavo pull {name}"
    cache = hub_cache()
    yield "hub cache", str(cache) if cache.is_dir() else f"{cache} (not there)"


def _gpu_finding(found: Gpu | NoGpu) -> str:
    if isinstance(found, Gpu):
        version = ".".join(map(str, found.driver))
        capability = ".".join(map(str, found.compute_capability))
        return (
            f"{found.name}, {_mib(found.memory)}, compute capability {capability}; "
            f"the driver knows CUDA {version}; {found.cublaslt}"
        )
    return f"none that octavo can use: {found.missing}"


def _plan(model: str, settings: dict[str, Any]) -> MemoryPlan:
    """The plan for the options as `LLM` would take them, its defaults included."""
    from octavo import LLM
    from octavo.doctor import memory_plan
    from octavo.options import checked_engine_options

    signature = inspect.signature(LLM.__init__).parameters
    names = inspect.signature(checked_engine_options).parameters
    options = {name: settings.get(name, signature[name].default) for name in names}
    device = settings.get("device", signature["device"].default)
    return memory_plan(model, device=chosen_device(device), options=checked_engine_options(**options))


def _plan_lines(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    yield "weights", _mib(plan.weight_bytes)
    blocks = " + ".join(str(count) for count in plan.num_blocks)
    yield "KV pool", f"{_mib(plan.kv_bytes)} ({blocks} blocks, {plan.kv_bytes_per_token} bytes a token)"
    yield "work memory", _mib(plan.arena_bytes)
    yield "total", _mib(plan.total)
    yield "longest sequence", f"{plan.max_model_len} tokens"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
