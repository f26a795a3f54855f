"""Beam search against the same search in numpy, over a model that numpy computes."""

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reference
import tiny
from calls import GREEDY, assert_alive, ids
from expected import Array, beam_search
from octavo import LLM, AsyncLLM, BeamSearchOutput, BeamSearchParams, InvalidRequest, SamplingParams
from streams import assert_async_alive, last, started

VOCAB, END = 8, 7
SMALL = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": END}
CONFIG = tiny.CONFIG | SMALL
PROMPTS = [[1], [2, 3], [4, 4, 0, 6, 1], [5, 1, 5, 1, 5, 1, 5, 1, 5, 1, 5, 1, 5, 1, 5, 1, 5]]


@pytest.fixture(scope="module")
def weights() -> dict[str, tiny.Array]:
    """Eight tokens, and logits close enough together that a search has something to find."""
    weights = tiny.random_weights(3)
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:VOCAB]
    weights["lm_head.weight"] = weights["lm_head.weight"][:VOCAB] * np.float32(0.4)
    return weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, tiny.Array]) -> Path:
    folder = tiny.write(tmp_path_factory.mktemp("eight"), weights, config=SMALL)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    return folder


@pytest.fixture(scope="module")
def eight(folder: Path) -> Iterator[LLM]:
    with LLM(folder, device="reference", max_model_len=64, num_kv_blocks=128, block_size=4) as llm:
        yield llm


def found(output: BeamSearchOutput) -> list[tuple[list[int], float]]:
    return [(sequence.tokens, sequence.cum_logprob) for sequence in output.sequences]


def assert_is(output: BeamSearchOutput, expected: Sequence[Any]) -> None:
    assert [tuple(sequence.tokens) for sequence in output.sequences] == [known.tokens for known in expected]
    for sequence, known in zip(output.sequences, expected, strict=True):
        assert sequence.cum_logprob == pytest.approx(known.logprob, abs=1e-3)


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -0.5])
@pytest.mark.parametrize("width", [1, 2, 3, 6])
def test_a_beam_search_finds_what_the_same_search_in_numpy_finds(
    eight: LLM, weights: dict[str, tiny.Array], width: int, length_penalty: float, ignore_eos: bool
) -> None:
    def logits_after(tokens: Sequence[int]) -> Array:
        last: Array = reference.logits(weights, CONFIG, tokens)[-1]
        return last

    params = BeamSearchParams(width, 6, length_penalty=length_penalty, ignore_eos=ignore_eos)
    for prompt, output in zip(PROMPTS, eight.beam_search(PROMPTS, params), strict=True):
        expected = beam_search(
            logits_after,
            prompt,
            width=width,
            max_tokens=6,
            length_penalty=length_penalty,
            end_tokens=() if ignore_eos else (END,),
        )
        assert_is(output, expected)


def test_a_beam_as_wide_as_there_are_sequences_finds_the_best_of_all(
    eight: LLM, weights: dict[str, tiny.Array]
) -> None:
    """Two tokens from eight: 64 sequences, each scored by itself."""
    prompt = [2, 3]
    rows = {first: reference.logits(weights, CONFIG, [*prompt, first]) for first in range(VOCAB)}
    scores = {
        (first, second): reference.log_softmax(rows[first][-2])[first] + reference.log_softmax(rows[first][-1])[second]
        for first, second in itertools.product(range(VOCAB), repeat=2)
    }
    best = sorted(scores, key=lambda pair: -scores[pair])
    [output] = eight.beam_search([prompt], BeamSearchParams(8, 2, ignore_eos=True))
    assert [tuple(sequence.tokens[2:]) for sequence in output.sequences] == best[:8]
    for sequence in output.sequences:
        first, second = sequence.tokens[2:]
        assert sequence.cum_logprob == pytest.approx(scores[first, second], abs=1e-3)


def test_a_sequence_tells_its_tokens_their_logprobs_and_how_it_ended(eight: LLM) -> None:
    [output] = eight.beam_search([[2, 3]], BeamSearchParams(4, 6))
    assert len(output.sequences) == 4
    for sequence in output.sequences:
        new = sequence.tokens[2:]
        assert sequence.tokens[:2] == [2, 3]
        assert [list(row) for row in sequence.logprobs] == [[token] for token in new]
        total = sum(row[token].logprob for token, row in zip(new, sequence.logprobs, strict=True))
        assert sequence.cum_logprob == pytest.approx(total, abs=1e-4)
        assert all(1 <= (row[token].rank or 0) <= 8 for token, row in zip(new, sequence.logprobs, strict=True))
        assert END not in new[:-1]
        assert sequence.finish_reason == ("stop" if new[-1] == END else "length")
        assert sequence.stop_reason is None
        assert sequence.text is None
    assert {"stop", "length"} == {
        sequence.finish_reason
        for width in (4, 6)
        for output in eight.beam_search(PROMPTS, BeamSearchParams(width, 3, length_penalty=0.0))
        for sequence in output.sequences
    }


def test_a_search_finds_the_same_whatever_runs_beside_it_is_cached_or_cut(folder: Path) -> None:
    params = BeamSearchParams(4, 8, length_penalty=1.5)
    outcomes = []
    for size, caching, blocks in ((512, True, 128), (5, False, 128), (16, True, 30)):
        with LLM(
            folder,
            device="reference",
            max_model_len=64,
            num_kv_blocks=blocks,
            block_size=4,
            max_num_batched_tokens=size,
            enable_prefix_caching=caching,
        ) as llm:
            alone = [llm.beam_search([prompt], params)[0] for prompt in PROMPTS]
            together = llm.beam_search(PROMPTS[::-1], params)[::-1]
            outcomes += [[found(output) for output in alone], [found(output) for output in together]]
            assert llm.get_metrics().kv_blocks_used == 0
    assert outcomes[1:] == outcomes[:-1]


def test_one_beam_is_greedy_decoding_and_the_text_is_that_of_all_tokens(smollm2: LLM) -> None:
    prompt = "The capital of France is"
    [plain] = smollm2.generate(prompt, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    [output] = smollm2.beam_search(prompt, BeamSearchParams(1, 8))
    [sequence] = output.sequences
    assert sequence.tokens == plain.prompt_token_ids + plain.outputs[0].token_ids
    assert sequence.text == prompt + plain.outputs[0].text


def test_a_wider_beam_finds_a_likelier_text(smollm2: LLM) -> None:
    prompt = "Once upon a time"
    scores = []
    for width in (1, 4):
        [output] = smollm2.beam_search(prompt, BeamSearchParams(width, 12, ignore_eos=True))
        totals = [sequence.cum_logprob for sequence in output.sequences]
        assert totals == sorted(totals, reverse=True)
        scores.append(totals[0])
        best = output.sequences[0].tokens
        [known] = smollm2.score_tokens([best], use_tqdm=False)
        assert sum(logprob for logprob in known.logprobs[-12:] if logprob is not None) == pytest.approx(
            totals[0], abs=1e-2
        )
    assert scores[1] >= scores[0]


def test_beams_share_what_they_have_in_common_and_take_all_of_it_home(eight: LLM) -> None:
    prompt = [1, 2, 3, 4] * 8
    copied = eight.get_metrics().kv_blocks_copied
    peak = eight.get_metrics().kv_blocks_peak
    eight.beam_search([prompt], BeamSearchParams(6, 8, ignore_eos=True))
    metrics = eight.get_metrics()
    assert metrics.kv_blocks_copied > copied
    # Six sequences of 40 tokens would fill 60 blocks of four; the 32 of the prompt are there once.
    assert max(peak, metrics.kv_blocks_peak) < 40
    assert (metrics.running, metrics.waiting, metrics.kv_blocks_free) == (0, 0, metrics.kv_blocks_total)


def test_a_search_ends_at_the_context(eight: LLM) -> None:
    prompt = [1, 2, 3, 4] * 15
    [output] = eight.beam_search([prompt], BeamSearchParams(2, 50, ignore_eos=True))
    assert {len(sequence.tokens) for sequence in output.sequences} == {64}
    assert {sequence.finish_reason for sequence in output.sequences} == {"length"}


@pytest.mark.parametrize(
    ("prompts", "params", "reason"),
    [
        ([[1], []], BeamSearchParams(2, 4), "prompt 1: found 0 tokens"),
        ([[1], [512]], BeamSearchParams(2, 4), "prompt 1: token id 512"),
        ([[1]], SamplingParams(), "params: found SamplingParams"),
        ([[1]], None, "params: found None, expected a BeamSearchParams"),
        ([[1]], BeamSearchParams(65, 4), "prompt 0: beam_width is 65, expected at most 64"),
        ([[1] * 512], BeamSearchParams(2, 4), "prompt 0: .* the prompt's 512"),
    ],
)
def test_a_wrong_search_is_refused_and_queues_nothing(successor: LLM, prompts: Any, params: Any, reason: str) -> None:
    admitted = successor.get_metrics().requests_admitted
    with pytest.raises(InvalidRequest, match=f"^{reason}"):
        successor.beam_search(prompts, params)
    assert successor.get_metrics().requests_admitted == admitted
    assert_alive(successor)


def test_a_search_does_not_disturb_its_neighbour(successor: LLM) -> None:
    stream = successor.stream([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    tokens = next(stream).token_ids
    successor.beam_search([[9, 8], [3]], BeamSearchParams(8, 6))
    tokens += [token for output in stream for token in output.token_ids]
    assert tokens == list(range(4, 64))
    assert ids(successor.generate([[1, 2, 3]], GREEDY, use_tqdm=False)) == [list(range(4, 12))]
    assert_alive(successor)


def test_a_task_can_wait_for_a_search_and_ends_it_when_it_is_cancelled(llm: AsyncLLM, successor: LLM) -> None:
    async def main() -> None:
        params = BeamSearchParams(3, 6)
        [expected] = successor.beam_search([[1, 2, 3]], params)
        found, other = await asyncio.gather(llm.beam_search([1, 2, 3], params), last(llm.generate([1, 2, 3], GREEDY)))
        assert found.sequences == expected.sequences
        assert other.outputs[0].token_ids == list(range(4, 12))
        task = asyncio.create_task(llm.beam_search([1], BeamSearchParams(16, 400, ignore_eos=True), "mine"))
        await started(llm, 3)
        with pytest.raises(InvalidRequest, match=r"^request_id: found 'mine'"):
            await llm.beam_search([1], params, "mine")
        with pytest.raises(InvalidRequest, match=r"^params: found None, expected a BeamSearchParams"):
            await llm.beam_search([1], None)  # type: ignore[arg-type]
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await assert_async_alive(llm)

    asyncio.run(main())
