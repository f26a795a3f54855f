"""A serving engine for large language models."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo._octavo import __version__
    from octavo.async_llm import AsyncLLM
    from octavo.errors import EngineDeadError, InvalidRequest, ModelLoadError, OctavoError
    from octavo.llm import LLM
    from octavo.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        BlockState,
        CompletionOutput,
        EmbeddingOutput,
        EngineMetrics,
        Logprob,
        RequestMetrics,
        RequestOutput,
        StreamOutput,
        TokenScores,
    )
    from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from octavo.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "BlockState",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineDeadError",
    "EngineMetrics",
    "InvalidRequest",
    "Logprob",
    "ModelLoadError",
    "OctavoError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StreamOutput",
    "StructuredOutputsParams",
    "TokenScores",
    "__version__",
]

# Where each name lives. Nothing is imported before it is asked for, so that the command line answers at once.
_HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "BeamSearchOutput": "outputs",
    "BeamSearchParams": "sampling_params",
    "BeamSearchSequence": "outputs",
    "BlockState": "outputs",
    "CompletionOutput": "outputs",
    "EmbeddingOutput": "outputs",
    "EngineDeadError": "errors",
    "EngineMetrics": "outputs",
    "InvalidRequest": "errors",
    "Logprob": "outputs",
    "ModelLoadError": "errors",
    "OctavoError": "errors",
    "RequestMetrics": "outputs",
    "RequestOutput": "outputs",
    "RequestOutputKind": "sampling_params",
    "SamplingParams": "sampling_params",
    "StreamOutput": "outputs",
    "StructuredOutputsParams": "structured_outputs",
    "TokenScores": "outputs",
    "__version__": "_octavo",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"octavo.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
