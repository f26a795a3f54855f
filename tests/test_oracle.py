"""The engine against an independent numpy model."""

import numpy as np
import pytest

import reference
import tiny
from octavo import LLM, SamplingParams

PROMPTS = [[5], [1, 2, 3, 4, 5, 6, 7], list(range(100, 140)), [511, 0, 300, 300, 300]]


@pytest.fixture(scope="module")
def weights() -> dict[str, tiny.Array]:
    return tiny.random_weights()


def test_greedy_tokens_and_logprobs_agree_with_the_oracle(tiny_llm: LLM, weights: dict[str, tiny.Array]) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=5)
    for prompt, output in zip(PROMPTS, tiny_llm.generate(PROMPTS, params, use_tqdm=False), strict=True):
        completion = output.outputs[0]
        rows = reference.logits(weights, tiny.CONFIG, prompt + completion.token_ids)[len(prompt) - 1 : -1]
        assert completion.logprobs is not None
        for token, row, found in zip(completion.token_ids, rows, completion.logprobs, strict=True):
            expected = reference.log_softmax(row)
            assert token == expected.argmax()
            assert list(found) == list(np.argsort(-expected, kind="stable")[:5])
            for place, (other, logprob) in enumerate(found.items(), 1):
                assert logprob.logprob == pytest.approx(expected[other], abs=1e-4)
                assert logprob.rank == place


def test_a_seeded_draw_is_the_largest_of_scaled_logits_plus_noise(
    tiny_llm: LLM, weights: dict[str, tiny.Array]
) -> None:
    compared = 0
    for seed in [0, 1, 12345, 2**64 - 1]:
        for temperature in [0.3, 1.0, 2.5]:
            params = SamplingParams(temperature=temperature, seed=seed, max_tokens=10, ignore_eos=True)
            [output] = tiny_llm.generate([PROMPTS[1]], params, use_tqdm=False)
            tokens = output.prompt_token_ids + output.outputs[0].token_ids
            rows = reference.logits(weights, tiny.CONFIG, tokens)
            for position in range(len(output.prompt_token_ids), len(tokens)):
                scores = reference.scores(rows[position - 1], temperature=temperature, seed=seed, position=position)
                best, second = np.sort(scores)[[-1, -2]]
                # The engine computes in single precision, so a near tie may go either way.
                if best - second > 1e-3:
                    assert tokens[position] == scores.argmax(), (seed, temperature, position)
                    compared += 1
    assert compared > 100


@pytest.mark.parametrize(
    ("filters", "kept"),
    [({"top_k": 3}, 3), ({"top_k": 1}, 1), ({"min_p": 1.0}, 1), ({"top_p": 1e-6}, 1)],
)
def test_a_filter_draws_only_from_what_it_keeps(
    tiny_llm: LLM, weights: dict[str, tiny.Array], filters: dict[str, float], kept: int
) -> None:
    params = SamplingParams(temperature=3.0, seed=3, max_tokens=24, ignore_eos=True, **filters)  # type: ignore[arg-type]
    [output] = tiny_llm.generate([PROMPTS[1]], params, use_tqdm=False)
    tokens = output.prompt_token_ids + output.outputs[0].token_ids
    rows = reference.logits(weights, tiny.CONFIG, tokens)[len(PROMPTS[1]) - 1 : -1]
    places = [int((row > row[token]).sum()) for row, token in zip(rows, output.outputs[0].token_ids, strict=True)]
    assert max(places) < kept
    assert kept == 1 or len(set(places)) > 1


def test_the_noise_has_the_published_values() -> None:
    # Seed, position, token, and the bits of the noise in single precision.
    known = [(0, 0, 0, 0xBEF0AE0B), (12345, 0, 0, 0x3F0B51ED)]
    for seed, position, token, bits in known:
        expected = np.array([bits], np.uint32).view(np.float32)[0]
        assert reference.noise(seed, position, token + 1)[token] == pytest.approx(expected, abs=2e-6)
