"""Log-probabilities of outputs and prompts, scores and embeddings, against an independent numpy model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reference
import tiny
from calls import assert_alive
from octavo import LLM, InvalidRequest, Logprob, OctavoError, RequestOutput, SamplingParams

PROMPTS = [[5], [5, 9], [1, 2, 3, 4, 5, 6, 7], list(range(100, 140)), [511, 0, 300, 300, 300]]
SIZES: dict[str, Any] = {"device": "reference", "max_model_len": 128, "num_kv_blocks": 64}


@pytest.fixture(scope="module")
def weights() -> dict[str, tiny.Array]:
    return tiny.random_weights()


def asks(count: int, **fields: Any) -> SamplingParams:
    return SamplingParams(
        **({"temperature": 0, "max_tokens": 1, "ignore_eos": True, "prompt_logprobs": count} | fields)
    )


def prompt_rows(output: RequestOutput) -> list[dict[int, Logprob]]:
    """The entries of all tokens but the first, which has none."""
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    first, *rest = output.prompt_logprobs
    assert first is None
    rows = [row for row in rest if row is not None]
    assert len(rows) == len(rest)
    return rows


def assert_are_those_of_the_oracle(output: RequestOutput, weights: dict[str, tiny.Array], count: int) -> None:
    prompt = output.prompt_token_ids
    rows = reference.logits(weights, tiny.CONFIG, prompt)
    for token, logits, found in zip(prompt[1:], rows, prompt_rows(output), strict=False):
        expected = reference.log_softmax(logits)
        order = [int(other) for other in np.argsort(-expected, kind="stable")]
        assert next(iter(found)) == token
        assert set(found) == {token, *order[:count]}
        for other, entry in found.items():
            assert entry.logprob == pytest.approx(expected[other], abs=2e-4)
            assert entry.rank == order.index(other) + 1


@pytest.mark.parametrize("count", [0, 1, 5])
def test_prompt_logprobs_are_those_of_the_model(tiny_llm: LLM, weights: dict[str, tiny.Array], count: int) -> None:
    for output in tiny_llm.generate(PROMPTS, asks(count), use_tqdm=False):
        assert_are_those_of_the_oracle(output, weights, count)
        assert output.outputs[0].logprobs is None


def test_all_of_the_vocabulary_can_be_asked_for(tiny_llm: LLM, weights: dict[str, tiny.Array]) -> None:
    [output] = tiny_llm.generate([PROMPTS[2]], asks(-1, logprobs=-1), use_tqdm=False)
    assert [len(row) for row in prompt_rows(output)] == [512] * 6
    assert_are_those_of_the_oracle(output, weights, 512)


def test_prompt_logprobs_know_nothing_of_what_is_done_to_the_output(tiny_llm: LLM) -> None:
    plain = tiny_llm.generate(PROMPTS, asks(2), use_tqdm=False)
    bent = asks(
        2,
        temperature=3.0,
        seed=1,
        top_k=3,
        repetition_penalty=2.0,
        logit_bias={5: 50.0},
        allowed_token_ids=[1, 2],
        max_tokens=3,
        logprobs=1,
        n=2,
    )
    for one, other in zip(plain, tiny_llm.generate(PROMPTS, bent, use_tqdm=False), strict=True):
        assert one.prompt_logprobs == other.prompt_logprobs


@pytest.mark.parametrize("size", [1, 7, 16, 512])
@pytest.mark.parametrize("caching", [True, False])
def test_prompt_logprobs_are_the_same_however_the_prompt_is_cut_and_whatever_is_cached(
    tiny_folder: Path, weights: dict[str, tiny.Array], size: int, caching: bool
) -> None:
    with LLM(tiny_folder, **SIZES, max_num_batched_tokens=size, enable_prefix_caching=caching) as llm:
        prompts = [list(range(100, 133)), list(range(100, 116)), list(range(100, 132)), list(range(100, 117))]
        prompts += [[*range(100, 132), 7, 8, 9], list(range(100, 133))]
        alone = [llm.generate([prompt], asks(1), use_tqdm=False)[0] for prompt in prompts]
        together = llm.generate(prompts, asks(1, n=2, max_tokens=4), use_tqdm=False)
        for one, other in zip(alone, together, strict=True):
            assert_are_those_of_the_oracle(one, weights, 1)
            assert other.prompt_logprobs == one.prompt_logprobs
        # Whoever does not ask finds the cache as ever.
        [output] = llm.generate([prompts[0]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        assert output.prompt_logprobs is None
        assert output.num_cached_tokens == (32 if caching else 0)


@pytest.fixture(scope="module")
def cold(smollm2_file: Path) -> Iterator[LLM]:
    with LLM(smollm2_file, max_model_len=256, num_kv_blocks=32, enable_prefix_caching=False) as llm:
        yield llm


def test_prompt_logprobs_of_a_real_model_do_not_depend_on_the_cache(smollm2: LLM, cold: LLM) -> None:
    whole = list(range(100, 133))
    shared = [[*range(100, 132), 7, 8], [*range(100, 132), 9]]
    orders = [[whole], [whole], [whole[:16]], [whole[:32]], [whole[:17]], shared, shared[::-1]]
    for prompts in orders:
        expected = cold.generate(prompts, asks(1), use_tqdm=False)
        for one, other in zip(smollm2.generate(prompts, asks(1), use_tqdm=False), expected, strict=True):
            for found, known in zip(prompt_rows(one), prompt_rows(other), strict=True):
                assert found.keys() == known.keys()
                for token, entry in found.items():
                    assert entry.logprob == pytest.approx(known[token].logprob, abs=1e-4)
    assert smollm2.generate([whole], SamplingParams(max_tokens=1), use_tqdm=False)[0].num_cached_tokens > 0


def test_counts_of_logprobs_are_taken_at_their_word(smollm2: LLM) -> None:
    for asked, expected in [(0, 1), (5, 5)]:
        params = SamplingParams(temperature=0, max_tokens=3, logprobs=asked)
        rows = smollm2.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0].logprobs
        assert rows is not None
        assert [len(row) for row in rows] == [expected] * 3
    for field in ("logprobs", "prompt_logprobs"):
        with pytest.raises(InvalidRequest, match=f"^prompt 0: {field}: found 60000, expected at most 49152"):
            smollm2.generate("x", SamplingParams(**{field: 60000}), use_tqdm=False)  # type: ignore[arg-type]


def test_json_can_carry_every_number(tiny_llm: LLM) -> None:
    """A token that no mask allows has no probability, which is no number of JSON."""
    params = asks(-1, logprobs=-1, allowed_token_ids=[3], max_tokens=2, logit_bias={3: -100.0})
    [output] = tiny_llm.generate([[1, 2]], params, use_tqdm=False)
    rows = output.outputs[0].logprobs
    assert rows is not None
    assert [row[3].logprob for row in rows] == [0.0, 0.0]
    assert {row[4].logprob for row in rows} == {-9999.0}
    numbers = [entry.logprob for row in [*rows, *prompt_rows(output)] for entry in row.values()]
    assert json.loads(json.dumps(numbers, allow_nan=False)) == numbers


def test_the_sum_is_that_of_what_was_drawn(tiny_llm: LLM) -> None:
    params = SamplingParams(temperature=2.0, seed=4, max_tokens=9, logprobs=0, ignore_eos=True, presence_penalty=0.5)
    completion = tiny_llm.generate([[1, 2]], params, use_tqdm=False)[0].outputs[0]
    assert completion.logprobs is not None
    drawn = [row[token].logprob for token, row in zip(completion.token_ids, completion.logprobs, strict=True)]
    assert completion.cumulative_logprob == pytest.approx(sum(drawn))
    plain = SamplingParams(max_tokens=1)
    assert tiny_llm.generate([[1, 2]], plain, use_tqdm=False)[0].outputs[0].cumulative_logprob is None


def test_scores_are_the_log_probabilities_of_the_text_itself(tiny_llm: LLM, weights: dict[str, tiny.Array]) -> None:
    for prompt, scores in zip(PROMPTS, tiny_llm.score_tokens(PROMPTS, logprobs=2, use_tqdm=False), strict=True):
        rows = reference.logits(weights, tiny.CONFIG, prompt)
        assert scores.prompt_token_ids == prompt
        assert (scores.logprobs[0], scores.ranks[0], scores.likeliest[0]) == (None, None, None)
        expected = [reference.log_softmax(row)[token] for row, token in zip(rows, prompt[1:], strict=False)]
        assert scores.logprobs[1:] == pytest.approx(expected, abs=2e-4)
        ranks = [1 + int((row > row[token]).sum()) for row, token in zip(rows, prompt[1:], strict=False)]
        assert scores.ranks[1:] == ranks
        assert scores.total == pytest.approx(sum(expected), abs=1e-3)
        for row, token in zip(scores.likeliest[1:], prompt[1:], strict=True):
            assert row is not None
            assert len(row) == 2 + (token not in list(row)[1:3] and row[token].rank not in (1, 2))


def test_what_greedy_decoding_writes_scores_rank_one(smollm2: LLM) -> None:
    [output] = smollm2.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    tokens = output.prompt_token_ids + output.outputs[0].token_ids
    [scores] = smollm2.score_tokens([tokens], use_tqdm=False)
    assert scores.ranks[len(output.prompt_token_ids) :] == [1] * 6
    [text] = smollm2.score_tokens("The capital of France is", use_tqdm=False)
    assert text.prompt == "The capital of France is"
    assert text.logprobs == scores.logprobs[:5]


@pytest.mark.parametrize(
    ("prompts", "logprobs", "reason"),
    [
        ([[1, 2], []], 0, "prompt 1: found 0 tokens"),
        ([[1, 2], [512]], 0, "prompt 1: token id 512"),
        ([[1] * 512], 0, "prompt 0: the prompt has 512 tokens, expected at most 511"),
        ([[1, 2]], 513, "logprobs: found 513, expected an integer from -1 to 512"),
        ([[1, 2]], -2, "logprobs: found -2, expected an integer from -1 to 512"),
        ([[1, 2]], None, "logprobs: found None"),
        ([[1, 2]], 1.0, r"logprobs: found 1\.0"),
    ],
)
def test_what_cannot_be_scored_is_refused_and_queues_nothing(
    successor: LLM, prompts: Any, logprobs: Any, reason: str
) -> None:
    admitted = successor.get_metrics().requests_admitted
    with pytest.raises(InvalidRequest, match=f"^{reason}"):
        successor.score_tokens(prompts, logprobs=logprobs, use_tqdm=False)
    assert successor.get_metrics().requests_admitted == admitted
    assert_alive(successor)


def hidden_states(weights: dict[str, tiny.Array], prompt: list[int]) -> reference.Array:
    """From the oracle's logits, by the head's inverse: it has more rows than columns."""
    logits = reference.logits(weights, tiny.CONFIG, prompt)
    states: reference.Array = np.linalg.lstsq(weights["lm_head.weight"].astype(np.float64), logits.T)[0].T
    return states


@pytest.mark.parametrize("size", [5, 512])
def test_an_embedding_is_the_last_hidden_state_or_their_mean(
    tiny_folder: Path, weights: dict[str, tiny.Array], size: int
) -> None:
    with LLM(tiny_folder, **SIZES, max_num_batched_tokens=size) as llm:
        for _ in range(2):  # The second time what begins alike could be found in the cache.
            for pooling in ("last", "mean"):
                plain = llm.embed(PROMPTS, pooling=pooling, normalize=False, use_tqdm=False)
                unit = llm.embed(PROMPTS, pooling=pooling, use_tqdm=False)
                for prompt, one, other in zip(PROMPTS, plain, unit, strict=True):
                    states = hidden_states(weights, prompt)
                    expected = states[-1] if pooling == "last" else states.mean(axis=0)
                    assert one.prompt_token_ids == prompt
                    np.testing.assert_allclose(one.embedding, expected, atol=1e-3)
                    np.testing.assert_allclose(other.embedding, expected / np.linalg.norm(expected), atol=1e-3)
                    assert np.linalg.norm(other.embedding) == pytest.approx(1.0)


def test_texts_that_mean_alike_lie_closer_together(smollm2: LLM) -> None:
    texts = ["The cat sleeps on the sofa.", "A kitten is asleep on the couch.", "The stock market fell by two percent."]
    cat, kitten, market = (
        np.array(output.embedding) for output in smollm2.embed(texts, pooling="mean", use_tqdm=False)
    )
    assert cat @ kitten > max(cat @ market, kitten @ market)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pooling": "cls"}, "pooling: found 'cls'"),
        ({"pooling": 1}, "pooling: found 1"),
        ({"normalize": 1}, "normalize"),
    ],
)
def test_a_wrong_embedding_is_refused(successor: LLM, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{reason}"):
        successor.embed([[1]], use_tqdm=False, **fields)
    with pytest.raises(InvalidRequest, match=r"^prompt 1: found 0 tokens"):
        successor.embed([[1], []], use_tqdm=False)
    assert_alive(successor)


def test_a_model_without_numbers_gives_no_scores_and_no_embeddings(tmp_path: Path) -> None:
    weights = tiny.successor_weights()
    weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
    with LLM(tiny.write(tmp_path, weights), **SIZES) as llm:
        with pytest.raises(OctavoError, match="prompt 0: the model gave no finite numbers"):
            llm.score_tokens([[1, 2]], use_tqdm=False)
        with pytest.raises(OctavoError, match="prompt 0: the model gave no finite numbers"):
            llm.embed([[1, 2]], use_tqdm=False)
        assert llm.get_metrics().kv_blocks_used == 0
