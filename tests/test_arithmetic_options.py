"""What the model computes with: each choice generates what the independent float32 run does, and keeps the law."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from octavo import LLM, SamplingParams

if TYPE_CHECKING:
    from octavo.prompts import TokensPrompt

RECORDED = json.loads((Path(__file__).parent / "data" / "reference_greedy.json").read_text())["prompts"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"int16_activations": ["down", "head"]},
        {"int16_activations": ("qkv", "output", "gate_up", "down", "head"), "kv_cache_dtype": "int8"},
    ],
    ids=str,
)
def test_a_choice_of_arithmetic_generates_what_float32_does_alone_and_together(
    smollm2_file: Path, options: dict[str, Any]
) -> None:
    prompts: list[TokensPrompt] = [{"prompt_token_ids": prompt["prompt_ids"]} for prompt in RECORDED[:4]]
    with LLM(smollm2_file, max_model_len=256, num_kv_blocks=64, **options) as llm:
        together = [output.outputs[0] for output in llm.generate(prompts, GREEDY)]
        alone = [llm.generate([prompt], GREEDY)[0].outputs[0] for prompt in prompts]
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    assert [answer.logprobs for answer in together] == [answer.logprobs for answer in alone]
    for answer, known in zip(alone, RECORDED, strict=False):
        assert list(answer.token_ids) == known["tokens"][:4]
