"""The options of `LLM` and `AsyncLLM`: their ranges, and those that this version does not have."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Literal

from octavo.devices import cuda_library_folders
from octavo.errors import InvalidRequest
from octavo.models import checked_path, expanded, resolve
from octavo.shown import shown

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from octavo._octavo import EngineOptions

KvCacheType = Literal["auto", "bfloat16", "int8"]
ActivationType = Literal["auto", "bfloat16"]
Projection = Literal["qkv", "output", "gate_up", "down", "head"]

PROJECTIONS: tuple[Projection, ...] = ("qkv", "output", "gate_up", "down", "head")

# Options that are known and have no effect yet, with what says just that.
_LATER: dict[str, tuple[str | None, ...]] = {
    "quantization": (None,),
    "scheduling_policy": ("fcfs",),
    "speculative_config": (None,),
    "scheduler": ("continuous",),
}
_MAX_SEED = 2**64 - 1
_MAX_SIZE = 2**63 - 1
_MAX_COUNT = 2**31 - 1


def refuse_others(options: Mapping[str, object]) -> None:
    """Refuse whatever is left when the known options are taken, save what asks for nothing."""
    for name, value in options.items():
        if name not in _LATER:
            raise TypeError(f"there is no option {name!r}")
        taken = _LATER[name]
        if value not in taken if isinstance(value, str) else all(value is not known for known in taken):
            raise InvalidRequest(
                f"{name} is not available yet in this version: found {shown(value)}, expected {taken[0]!r}"
            )


def check_choice(name: str, value: object, *choices: str) -> None:
    """Refuse what is none of `choices`."""
    if not isinstance(value, str) or value not in choices:
        expected = " or ".join(map(repr, choices))
        raise InvalidRequest(f"{name}: found {shown(value)}, expected {expected}: this version has no other")


def template_source(chat_template: str | os.PathLike[str]) -> str:
    """A template, or the content of the file that holds it: a path has no `{`."""
    if isinstance(chat_template, str) and "{" in chat_template:
        return chat_template
    path = checked_path(chat_template, what="chat_template", expected="a template or the file that holds one")
    return expanded(path, what="chat_template").read_text(encoding="utf-8")


def tokenizer_file(tokenizer: str | os.PathLike[str] | None) -> Path | None:
    """A `tokenizer.json`, or the one in a folder."""
    if tokenizer is None:
        return None
    path = resolve(tokenizer, what="tokenizer")
    return path / "tokenizer.json" if path.is_dir() else path


def checked_engine_options(
    *,
    threads: int | None,
    seed: int,
    block_size: int,
    max_model_len: int | None,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    kv_cache_memory_bytes: int | None,
    num_kv_blocks: int | None,
    kv_cache_dtype: KvCacheType,
    dtype: ActivationType,
    int16_activations: Sequence[Projection] | None,
    enable_prefix_caching: bool,
) -> EngineOptions:
    """Check each option by itself; what depends on the model is checked when it is loaded."""
    if kv_cache_memory_bytes is not None and num_kv_blocks is not None:
        raise InvalidRequest("kv_cache_memory_bytes and num_kv_blocks: found both, expected one of them or none")
    check_choice("kv_cache_dtype", kv_cache_dtype, "auto", "bfloat16", "int8")
    check_choice("dtype", dtype, "auto", "bfloat16")
    return {
        "threads": _optional("threads", threads, 1024),
        "seed": _integer("seed", seed, 0, _MAX_SEED),
        "block_size": _integer("block_size", block_size, 1, _MAX_COUNT),
        "max_model_len": _optional("max_model_len", max_model_len, _MAX_COUNT, least=2),
        "max_num_seqs": _integer("max_num_seqs", max_num_seqs, 1, _MAX_COUNT),
        "max_num_batched_tokens": _integer("max_num_batched_tokens", max_num_batched_tokens, 1, _MAX_COUNT),
        "kv_cache_memory_bytes": _optional("kv_cache_memory_bytes", kv_cache_memory_bytes, _MAX_SIZE),
        "num_kv_blocks": _optional("num_kv_blocks", num_kv_blocks, _MAX_COUNT),
        "kv_cache_dtype": kv_cache_dtype,
        "dtype": dtype,
        "int16_activations": _projections(int16_activations, dtype),
        "cuda_library_folders": cuda_library_folders(),
        "enable_prefix_caching": _flag("enable_prefix_caching", enable_prefix_caching),
    }


def seconds_or_none(name: str, value: object) -> float | None:
    """A span of time, or None for one without bound."""
    if value is None:
        return None
    expected = "None or a number of seconds from 0"
    if isinstance(value, (bool, str, bytes)):
        raise InvalidRequest(f"{name}: found {shown(value)}, expected {expected}")
    try:
        seconds = float(value)  # type: ignore[arg-type]  # whatever can be a float, such as a numpy scalar
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest(f"{name}: found {shown(value)}, expected {expected}") from None
    if not seconds >= 0:
        raise InvalidRequest(f"{name}: found {shown(value)}, expected {expected}")
    return seconds


def _projections(value: object, dtype: ActivationType) -> list[str]:
    """The projections whose activations shall have 16 bits."""
    expected = f"some of {', '.join(map(repr, PROJECTIONS))}"
    if value is None:
        return []
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidRequest(f"int16_activations: found {shown(value)}, expected a list of {expected}")
    for name in value:
        if name not in PROJECTIONS:
            raise InvalidRequest(f"int16_activations: found {shown(name)} among them, expected {expected}")
    if value and dtype != "auto":
        raise InvalidRequest(f"int16_activations: found {shown(value)} with dtype {dtype!r}, expected none, or 'auto'")
    return [name for name in PROJECTIONS if name in value]


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}: found {shown(value)}, expected True or False")
    return value


def _optional(name: str, value: object, most: int, *, least: int = 1) -> int | None:
    return None if value is None else _integer(name, value, least, most)


def _integer(name: str, value: object, least: int, most: int) -> int:
    number = None
    if not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type]  # whatever is an integer, such as a numpy scalar
        except TypeError:
            number = None
    if number is None or not least <= number <= most:
        raise InvalidRequest(f"{name}: found {shown(value)}, expected an integer from {least} to {most}")
    return number
