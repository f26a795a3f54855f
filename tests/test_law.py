"""The law over every pair of features; writes docs/feature-matrix.md.

The support stands in law.py, with the table of features in law_features.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from law import Case, Law, differences, named, pair_cases
from law_features import FEATURES, REFUSED
from law_page import COMMAND, page
from law_runs import CPU, REFERENCE, SMOLLM2

PAGE = Path(__file__).parents[1] / "docs" / "feature-matrix.md"

# A real model, and the pairs whose features meet in the same blocks.
SMOLLM2_CASES = [
    named(SMOLLM2, "batched", "prefix-hit"),
    named(SMOLLM2, "chunked", "preempted"),
    named(SMOLLM2, "prefix-hit", "preempted"),
    named(SMOLLM2, "n>1", "seeded sampling"),
    named(SMOLLM2, "2 threads", "AsyncLLM"),
    named(SMOLLM2, "preempted", "logprobs"),
    named(SMOLLM2, "preempted", "structured output"),
    named(SMOLLM2, "prefix-hit", "beam search"),
    named(SMOLLM2, "stop strings", "AsyncLLM"),
]
CASES = [*pair_cases(CPU), *pair_cases(REFERENCE), *SMOLLM2_CASES]


@pytest.fixture(scope="module")
def law(tiny_folder: Path, smollm2_file: Path) -> Iterator[Law]:
    law = Law({CPU.letter: tiny_folder, REFERENCE.letter: tiny_folder, SMOLLM2.letter: smollm2_file})
    yield law
    law.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_ids_and_logprobs_are_those_of_the_plain_run(law: Law, case: Case) -> None:
    assert law.broken(case) == []


def test_every_pair_is_run_or_refused_with_a_reason() -> None:
    names = [feature.name for feature in FEATURES]
    pairs = {frozenset({one, other}) for one in names for other in names}
    run = {frozenset(feature.name for feature in case.features) for case in CASES}
    assert run | REFUSED.keys() == pairs
    assert not run & REFUSED.keys()


@pytest.mark.parametrize(
    "change",
    [{"seed": 41}, {"temperature": 2.0}, {"max_tokens": 19}, {"logprobs": 1}, {"n": 2}],
    ids=lambda change: next(iter(change)),
)
def test_a_request_that_asks_for_anything_else_is_seen_to_differ(law: Law, change: dict[str, float]) -> None:
    case = named(CPU, "n>1")
    [same, other] = [law.alone(case)[0], law.alone(case, **change)[0]]
    assert differences(same, same) == []
    assert differences(other, same) != []


def test_a_log_probability_that_is_off_by_one_bit_is_seen_to_differ(law: Law) -> None:
    output = law.alone(named(CPU, "batched"))[0]
    completion = output.outputs[0]
    assert completion.logprobs is not None
    token, row = completion.token_ids[-1], completion.logprobs[-1]
    near = {token: replace(row[token], logprob=row[token].logprob * (1 + 2**-52))}
    changed = replace(completion, logprobs=[*completion.logprobs[:-1], near])
    [sentence] = differences(replace(output, outputs=[changed]), output)
    assert sentence.startswith(f"choice 0: at {len(completion.token_ids) - 1}: ({token}, ")


def test_the_page_in_the_docs_says_what_was_run(law: Law) -> None:
    broken = {case.name: law.broken(case) for case in CASES}
    assert not any(broken.values()), f"not written, since the law is broken: {broken}"
    written = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    expected = page(CASES)
    if written != expected:
        PAGE.write_text(expected, encoding="utf-8")
        pytest.fail(f"{PAGE.name} was out of date and is written anew: commit it, and run {COMMAND} again")
