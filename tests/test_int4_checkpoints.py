"""Checkpoints with int4 weights, packed here by numpy as their formats are described, through the whole engine."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tiny
from octavo import LLM, CompletionOutput, Logprob, RequestOutput, SamplingParams
from octavo.errors import ModelLoadError

GROUP = 32
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
PROMPTS = [[5, 6, 7], list(range(40, 80)), [300]]

MARGIN = 0.05
"""Nats: activations in bfloat16 against f32, in a tiny model with large weights."""

Parts = dict[str, NDArray[Any]]


def rounded(weight: tiny.Array) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float16]]:
    """Codes `[outputs, inputs]`, zero points and scales `[outputs, groups]`."""
    groups = weight.reshape(len(weight), -1, GROUP)
    low, high = np.minimum(groups.min(axis=2), 0), np.maximum(groups.max(axis=2), 0)
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 1, 15)
    codes = np.clip(np.rint(groups / scales.astype(np.float32)[:, :, None]) + zeros[:, :, None], 0, 15)
    return codes.reshape(weight.shape).astype(np.uint32), zeros.astype(np.uint32), scales


def words(nibbles: NDArray[np.uint32], order: list[int]) -> NDArray[np.uint32]:
    """Eight along the last axis to a number; nibble `i`, from the lowest bits on, is the one at `order[i]`."""
    eights = nibbles.reshape(*nibbles.shape[:-1], -1, 8)
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    packed: NDArray[np.uint32] = np.bitwise_or.reduce(eights[..., order] << shifts, axis=-1)
    return packed


def awq(module: str, weight: tiny.Array) -> Parts:
    codes, zeros, scales = rounded(weight)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        f"{module}.qweight": words(codes.T, order),
        f"{module}.qzeros": words(zeros.T, order),
        f"{module}.scales": scales.T,
    }


def gptq(module: str, weight: tiny.Array) -> Parts:
    codes, zeros, scales = rounded(weight)
    return {
        f"{module}.qweight": words(codes, list(range(8))).T,
        f"{module}.qzeros": words(zeros.T - 1, list(range(8))),
        f"{module}.scales": scales.T,
        f"{module}.g_idx": (np.arange(weight.shape[1]) // GROUP).astype(np.uint32),
    }


def restored(weight: tiny.Array) -> tiny.Array:
    codes, zeros, scales = rounded(weight)
    steps = codes.astype(np.float32) - np.repeat(zeros, GROUP, axis=1).astype(np.float32)
    return steps * np.repeat(scales, GROUP, axis=1).astype(np.float32)


def is_packed(name: str) -> bool:
    """One projection of the second layer stays as it is."""
    return "_proj" in name and name != "model.layers.1.mlp.down_proj.weight"


def packed(weights: Mapping[str, tiny.Array], pack: Callable[[str, tiny.Array], Parts]) -> Parts:
    parts: Parts = {}
    for name, weight in weights.items():
        parts |= pack(name.removesuffix(".weight"), weight) if is_packed(name) else {name: weight}
    return parts


def drawn(completion: CompletionOutput) -> list[Logprob]:
    rows = completion.logprobs or []
    return [row[token] for token, row in zip(completion.token_ids, rows, strict=True)]


def generated(folder: Path, **options: Any) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    with LLM(folder, num_kv_blocks=64, max_model_len=128, **options) as llm:
        return llm.generate(PROMPTS, params, use_tqdm=False)


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = {name: restored(one) if is_packed(name) else one for name, one in tiny.random_weights().items()}
    return tiny.write(tmp_path_factory.mktemp("plain"), weights)


@pytest.mark.parametrize(("pack", "quantization"), [(awq, AWQ), (gptq, GPTQ)])
def test_a_packed_model_is_the_model_of_its_values(
    plain_folder: Path, tmp_path: Path, pack: Callable[[str, tiny.Array], Parts], quantization: dict[str, Any]
) -> None:
    weights = packed(tiny.random_weights(), pack)
    folder = tiny.write(tmp_path / "packed", weights, config={"quantization_config": quantization})
    expected = generated(plain_folder, device="reference")
    found = generated(folder, device="reference")
    assert [one.outputs for one in found] == [one.outputs for one in expected]
    for mine, plain in zip(generated(folder, device="cpu", dtype="bfloat16"), expected, strict=True):
        compare(mine.outputs[0], plain.outputs[0])


def compare(mine: CompletionOutput, plain: CompletionOutput) -> None:
    """Until a near-tie, after which the texts are others."""
    for one, two in zip(drawn(mine), drawn(plain), strict=True):
        assert one.logprob == pytest.approx(two.logprob, abs=MARGIN)
        if one.decoded_token != two.decoded_token:
            break


def test_a_packing_that_is_not_read_is_refused_by_field(tmp_path: Path) -> None:
    weights = packed(tiny.random_weights(), awq)
    folder = tiny.write(tmp_path, weights, config={"quantization_config": AWQ | {"version": "gemv"}})
    with pytest.raises(ModelLoadError, match=r'quantization_config.version: found "gemv".*expected "gemm"'):
        LLM(folder)
