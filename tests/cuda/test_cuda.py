"""The device cuda through `LLM`: on a GPU, or on the driver that stands for one (`make test-cuda`).

A row's arithmetic may depend on the rows beside it here, so that answers are compared within a margin in nats: of
log-probabilities, and a token is rarely another one. The summary says how often that was.
"""

from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from law import Case, Law, drawn
from law_features import FEATURES, REFUSED
from law_runs import CUDA, REFERENCE, SMOLLM2
from octavo import LLM, BeamSearchParams, RequestOutput, SamplingParams
from octavo.devices import Gpu, probe_cuda
from octavo.errors import InvalidRequest

MARGIN = 0.05
"""Nats: what conformance allows a backend whose sums have no fixed order."""

NOT_HERE = {"penalties", "beam search"}
# Without the numbers of threads, like Reference: they are the CPU's.
KNOWN = [feature for feature in FEATURES if REFERENCE in feature.subjects and feature.name not in NOT_HERE]

PAIRS = [pair for pair in combinations(KNOWN, 2) if frozenset(one.name for one in pair) not in REFUSED]
CASES = [Case(CUDA, features) for features in [*((feature,) for feature in KNOWN), *PAIRS]]


def _group(case: Case) -> str:
    """Cases that ask for the same have the same plain run, and belong into one process."""
    return " ".join(feature.name for feature in case.features if feature.params(CUDA, 0)) or "plain"


class Judge:
    """Compares answers within the margin, and counts."""

    def __init__(self) -> None:
        self.continuations = 0
        self.others = 0

    def __call__(self, found: RequestOutput, expected: RequestOutput) -> list[str]:
        if found.prompt_token_ids != expected.prompt_token_ids or not found.finished:
            return [f"another prompt, or not finished: {found}"]
        if len(found.outputs) != len(expected.outputs):
            return [f"{len(found.outputs)} continuations, expected {len(expected.outputs)}"]
        sentences = []
        for choice, (mine, plain) in enumerate(zip(found.outputs, expected.outputs, strict=True)):
            self.continuations += 1
            for at, (one, other) in enumerate(zip(drawn(mine), drawn(plain), strict=False)):
                if abs(one[1] - other[1]) > MARGIN:
                    sentences.append(f"choice {choice}: at {at}: {one}, expected {other}")
                if one[0] != other[0]:
                    self.others += 1
                    break
            else:
                if mine.token_ids != plain.token_ids or mine.finish_reason != plain.finish_reason:
                    sentences.append(f"choice {choice}: {mine}, expected {plain}")
        return sentences


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


@pytest.fixture(scope="module")
def law(tiny_folder: Path, judge: Judge) -> Iterator[Law]:
    law = Law({CUDA.letter: tiny_folder}, judge)
    yield law
    law.close()
    assert judge.others <= judge.continuations / 50, f"{judge.others} of {judge.continuations} have other tokens"


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[LLM]:
    with LLM(tiny_folder, device="cuda", max_model_len=256, num_kv_blocks=64) as llm:
        yield llm


def test_the_gpu_is_found_and_auto_takes_it(tiny_folder: Path) -> None:
    assert isinstance(probe_cuda(), Gpu)
    with LLM(tiny_folder, max_model_len=64, num_kv_blocks=16) as llm:
        assert llm.device == "cuda"


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=pytest.mark.xdist_group(_group(case))) for case in CASES]
)
def test_ids_and_logprobs_are_those_of_the_plain_run(
    law: Law, judge: Judge, case: Case, record_property: Callable[[str, object], None]
) -> None:
    before = (judge.continuations, judge.others)
    assert law.broken(case) == []
    record_property("continuations", judge.continuations - before[0])
    record_property("others", judge.others - before[1])


def test_log_probabilities_are_those_of_reference(llm: LLM, tiny_folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=0)
    prompts = [list(prompt) for prompt in CUDA.prompts if len(prompt) < 200]
    found = llm.generate(prompts, params, use_tqdm=False)
    with LLM(tiny_folder, device="reference", max_model_len=256, num_kv_blocks=64) as reference:
        expected = reference.generate(prompts, params, use_tqdm=False)
    for mine, plain in zip(found, expected, strict=True):
        for one, other in zip((mine.prompt_logprobs or [])[1:], (plain.prompt_logprobs or [])[1:], strict=True):
            assert one is not None
            assert other is not None
            for token in one.keys() & other.keys():
                assert one[token].logprob == pytest.approx(other[token].logprob, abs=3 * MARGIN)


def test_what_the_device_does_not_have_is_refused_by_name_and_the_engine_goes_on(llm: LLM) -> None:
    for name, value in [("presence_penalty", 0.5), ("frequency_penalty", -1.0), ("repetition_penalty", 1.1)]:
        params: dict[str, Any] = {name: value}
        with pytest.raises(InvalidRequest, match=f"prompt 0: {name}: found {value}, expected .*: the device cuda"):
            llm.generate([[5, 6]], SamplingParams(**params), use_tqdm=False)
    with pytest.raises(InvalidRequest, match="prompt 0: beam_width: found 2, expected no beam search: the device cuda"):
        llm.beam_search([[5, 6]], BeamSearchParams(beam_width=2, max_tokens=3))
    [output] = llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype: found 'int8', expected 'auto' or 'bfloat16': the device cuda"),
        ({"int16_activations": ["head"]}, r"int16_activations: found \['head'\], expected none: the device cuda"),
    ],
)
def test_options_of_other_devices_are_refused(tiny_folder: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        LLM(tiny_folder, device="cuda", **options)


def test_smollm2_makes_the_tokens_that_the_cpu_makes(smollm2_file: Path) -> None:
    prompt = list(SMOLLM2.prompts[0])
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0)
    sizes: dict[str, Any] = {"max_model_len": 64, "num_kv_blocks": 8, "max_num_seqs": 1, "max_num_batched_tokens": 32}
    with LLM(smollm2_file, device="cuda", **sizes) as llm:
        [found] = llm.generate([prompt], params, use_tqdm=False)
    with LLM(smollm2_file, device="cpu", dtype="bfloat16", **sizes) as llm:
        [expected] = llm.generate([prompt], params, use_tqdm=False)
    for one, other in zip(drawn(found.outputs[0]), drawn(expected.outputs[0]), strict=True):
        assert one[0] == other[0]
        assert one[1] == pytest.approx(other[1], abs=2 * MARGIN)
