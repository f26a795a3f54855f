"""What `LLM` answers."""

from pathlib import Path

import pytest

from calls import GREEDY, assert_alive, ids
from octavo import LLM, InvalidRequest, SamplingParams


def test_logprobs_count_what_is_asked_for(successor: LLM) -> None:
    for asked, expected in [(None, None), (0, 1), (1, 1), (5, 5), (512, 512), (-1, 512)]:
        params = SamplingParams(temperature=0, max_tokens=2, logprobs=asked)
        completion = successor.generate([[64]], params, use_tqdm=False)[0].outputs[0]
        assert (completion.logprobs is None) == (expected is None)
        if completion.logprobs is not None:
            assert [len(row) for row in completion.logprobs] == [expected, expected]
            assert completion.logprobs[0][65].rank == 1
            assert completion.logprobs[0][65].decoded_token == successor.decode([65])
            drawn = [row[token].logprob for row, token in zip(completion.logprobs, [65, 66], strict=True)]
            assert completion.cumulative_logprob == pytest.approx(sum(drawn))


def test_a_drawn_token_outside_the_likeliest_is_reported_beside_them(tiny_llm: LLM) -> None:
    params = SamplingParams(temperature=50.0, seed=1, max_tokens=8, logprobs=2, ignore_eos=True)
    completion = tiny_llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0]
    assert completion.logprobs is not None
    for token, row in zip(completion.token_ids, completion.logprobs, strict=True):
        assert next(iter(row)) == token
        ranks = [logprob.rank for logprob in row.values()]
        assert len(row) == 3 if ranks[0] not in (1, 2) else len(row) == 2
        assert sorted(row.values(), key=lambda known: -known.logprob) == sorted(
            row.values(), key=lambda known: known.rank or 0
        )


def test_the_reported_seed_repeats_a_request(tiny_llm: LLM) -> None:
    first, second = tiny_llm.generate([[1, 2, 3]] * 2, SamplingParams(max_tokens=12), use_tqdm=False)
    assert first.seed != second.seed
    assert ids([first]) != ids([second])
    for output in (first, second):
        params = SamplingParams(max_tokens=12, seed=output.seed)
        again = tiny_llm.generate([[9, 9], [1, 2, 3]], params, use_tqdm=False)[1]
        assert (again.seed, ids([again])) == (output.seed, ids([output]))


def test_a_prompt_larger_than_the_pool_is_refused_and_a_long_output_ends_at_the_pool(successor_folder: Path) -> None:
    with LLM(successor_folder, device="reference", block_size=16, num_kv_blocks=8, max_model_len=512) as llm:
        with pytest.raises(
            InvalidRequest, match="prompt 0: the prompt has 200 tokens, expected at most 127: the KV pool"
        ):
            llm.generate([[1] * 200], GREEDY, use_tqdm=False)
        assert_alive(llm)
        [output] = llm.generate([[1] * 100], SamplingParams(temperature=0, max_tokens=100), use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
        assert len(output.outputs[0].token_ids) == 28
        assert_alive(llm)


def test_many_requests_share_a_small_pool(successor_folder: Path) -> None:
    with LLM(successor_folder, device="reference", block_size=4, num_kv_blocks=10, max_model_len=64) as llm:
        prompts = [[start] * (1 + start % 5) for start in range(20)]
        expected = [list(range(start + 1, start + 9)) for start in range(20)]
        assert ids(llm.generate(prompts, GREEDY, use_tqdm=False)) == expected
        metrics = llm.get_metrics()
        assert metrics.requests_finished == {"stop": 0, "length": 20, "abort": 0, "error": 0}
        assert metrics.kv_blocks_peak <= metrics.kv_blocks_total == 10
        assert 0 < metrics.kv_waste_mean < 1
        assert (metrics.prompt_tokens, metrics.generation_tokens) == (sum(map(len, prompts)), 160)


def test_a_bar_counts_requests_and_shows_the_rate(successor: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    successor.generate([[1], [2]], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tok/s" in shown
    successor.generate([[1], [2]], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
