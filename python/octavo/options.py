"""The options of `LLM`: their ranges, and those that this version does not have."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octavo._octavo import EngineOptions

# Options that are known and have no effect yet.
_LATER = frozenset(
    {
        "quantization",
        "kv_cache_dtype",
        "enable_prefix_caching",
        "scheduling_policy",
        "speculative_config",
        "scheduler",
    }
)
_MAX_SEED = 2**64 - 1
_MAX_SIZE = 2**63 - 1
_MAX_COUNT = 2**31 - 1


def refuse_others(options: Mapping[str, object]) -> None:
    """Refuse whatever is left when the known options are taken."""
    for name in options:
        if name in _LATER:
            raise InvalidRequest(f"{name} is not available yet in this version")
        raise TypeError(f"LLM has no option {name!r}")


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
) -> EngineOptions:
    """Check each option by itself; what depends on the model is checked when it is loaded."""
    if kv_cache_memory_bytes is not None and num_kv_blocks is not None:
        raise InvalidRequest("kv_cache_memory_bytes and num_kv_blocks: found both, expected one of them or none")
    return {
        "threads": _optional("threads", threads, 1024),
        "seed": _integer("seed", seed, 0, _MAX_SEED),
        "block_size": _integer("block_size", block_size, 1, _MAX_COUNT),
        "max_model_len": _optional("max_model_len", max_model_len, _MAX_COUNT),
        "max_num_seqs": _integer("max_num_seqs", max_num_seqs, 1, _MAX_COUNT),
        "max_num_batched_tokens": _integer("max_num_batched_tokens", max_num_batched_tokens, 1, _MAX_COUNT),
        "kv_cache_memory_bytes": _optional("kv_cache_memory_bytes", kv_cache_memory_bytes, _MAX_SIZE),
        "num_kv_blocks": _optional("num_kv_blocks", num_kv_blocks, _MAX_COUNT),
    }


def _optional(name: str, value: object, most: int) -> int | None:
    return None if value is None else _integer(name, value, 1, most)


def _integer(name: str, value: object, least: int, most: int) -> int:
    number = None
    if not isinstance(value, bool):
        try:
            number = operator.index(value)  # type: ignore[arg-type]  # whatever is an integer, such as a numpy scalar
        except TypeError:
            number = None
    if number is None or not least <= number <= most:
        raise InvalidRequest(f"{name}: found {value!r}, expected an integer from {least} to {most}")
    return number
