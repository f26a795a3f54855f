"""What `LLM` answers."""

from pathlib import Path
from typing import Any

import pytest

from calls import GREEDY, assert_alive, ids
from octavo import LLM, BlockState, InvalidRequest, SamplingParams


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
        assert metrics.requests_finished == {"stop": 0, "length": 20, "abort": 0, "error": 0, "deadline": 0}
        assert metrics.kv_blocks_peak <= metrics.kv_blocks_total == 10
        assert 0 < metrics.kv_waste_mean < 1
        assert (metrics.prompt_tokens, metrics.generation_tokens) == (sum(map(len, prompts)), 160)


def test_a_request_tells_its_story(successor_folder: Path) -> None:
    """Chunks of 16 tokens, then a prompt whose first block is cached, then one that parts from it at position 20."""
    prompt = list(range(40))
    sizes: dict[str, Any] = {"max_model_len": 64, "num_kv_blocks": 16, "max_num_batched_tokens": 16}
    with LLM(successor_folder, device="reference", **sizes) as llm:
        stories = []
        for asked in (prompt, [*prompt[:16], 7, 7], [*prompt[:20], *[7] * 20]):
            [output] = llm.generate([asked], GREEDY, use_tqdm=False)
            assert output.metrics is not None
            assert output.num_cached_tokens == output.metrics.cached_tokens
            stories.append(output.metrics)
        assert [(story.chunks, story.cached_tokens, story.preemptions) for story in stories] == [
            (3, 0, 0),
            (1, 16, 0),
            (2, 16, 0),
        ]
        assert [story.first_differing_token for story in stories] == [None, 16, 20]
        metrics = llm.get_metrics()
        assert (metrics.prefix_cache_queries, metrics.prefix_cache_hits) == (40 + 18 + 40, 32)
        story = stories[0]
        times = [story.arrival_time, story.scheduled_time, story.first_token_time, story.last_token_time]
        assert None not in times
        assert times == sorted(times, key=lambda time: time or 0.0)


def test_a_map_shows_every_block_and_a_reset_what_could_have_been_found(successor_folder: Path) -> None:
    with LLM(successor_folder, device="reference", max_model_len=64, num_kv_blocks=8) as llm:
        assert llm.block_map() == [[BlockState(owners=0, filled=0, cached=False)] * 8]
        llm.generate([list(range(40))], GREEDY, use_tqdm=False)
        [group] = llm.block_map()
        assert [block.owners for block in group] == [0] * 8
        # 47 tokens were computed: two full blocks, and a third that is one short of full.
        assert sorted(block.filled for block in group if block.cached)[-2:] == [16, 16]
        cached = sum(block.cached for block in group)
        assert cached == llm.get_metrics().kv_blocks_cached >= 2
        assert (llm.reset_prefix_cache(), llm.reset_prefix_cache()) == (cached, 0)
        assert not any(block.cached for block in llm.block_map()[0])


def test_a_bar_counts_requests_and_shows_the_rate(successor: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    successor.generate([[1], [2]], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tok/s" in shown
    successor.generate([[1], [2]], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
