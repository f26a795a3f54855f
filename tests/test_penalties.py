"""Bias, masks and penalties against the same arithmetic in numpy."""

from typing import Any

import numpy as np
import pytest

import reference
import tiny
from calls import ids
from expected import ruled
from octavo import LLM, InvalidRequest, SamplingParams

PROMPT = [7, 7, 300, 41, 300, 9]


@pytest.fixture(scope="module")
def weights() -> dict[str, tiny.Array]:
    return tiny.random_weights()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 2.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -0.7},
        {"logit_bias": {300: 3.0, 5: -100.0}},
        {"logit_bias": dict.fromkeys(range(0, 512, 3), -3.0)},
        {"allowed_token_ids": list(range(0, 512, 7))},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.2, "logit_bias": {9: 2.0}},
        {
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.5,
            "logit_bias": {0: 4.0, 14: -4.0},
            "allowed_token_ids": [0, 7, 14, 300, 301],
        },
    ],
    ids=lambda fields: "+".join(fields) or "nothing",
)
def test_logprobs_and_greedy_tokens_are_those_after_bias_masks_and_penalties(
    tiny_llm: LLM, weights: dict[str, tiny.Array], fields: dict[str, Any]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=-1, **fields)
    [output] = tiny_llm.generate([PROMPT], params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    rows = reference.logits(weights, tiny.CONFIG, PROMPT + completion.token_ids)[len(PROMPT) - 1 :]
    for at, (token, found) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        expected = reference.log_softmax(ruled(rows[at], params, PROMPT, completion.token_ids[:at]))
        best, second = np.sort(expected)[[-1, -2]]
        assert token == expected.argmax() or best - second < 1e-4
        got = np.array([found[other].logprob for other in range(512)])
        # What a mask forbids has a log-probability that JSON can carry.
        np.testing.assert_allclose(got, np.maximum(expected, -9999.0), atol=2e-4)


def test_what_is_drawn_with_a_seed_follows_the_same_rules(tiny_llm: LLM, weights: dict[str, tiny.Array]) -> None:
    params = SamplingParams(
        temperature=0.8,
        seed=5,
        max_tokens=24,
        ignore_eos=True,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        logit_bias={300: 5.0},
    )
    [output] = tiny_llm.generate([PROMPT], params, use_tqdm=False)
    tokens = PROMPT + output.outputs[0].token_ids
    rows = reference.logits(weights, tiny.CONFIG, tokens)
    for position in range(len(PROMPT), len(tokens)):
        row = ruled(rows[position - 1], params, PROMPT, tokens[len(PROMPT) : position])
        scores = reference.scores(row, temperature=0.8, seed=5, position=position)
        best, second = np.sort(scores)[[-1, -2]]
        assert tokens[position] == scores.argmax() or best - second < 1e-3


def test_a_penalty_counts_prompt_and_output_as_its_name_says(smollm2: LLM) -> None:
    """On the first token there is no output yet: presence and frequency do nothing, repetition acts on the prompt."""

    def first(**fields: Any) -> dict[int, float]:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, **fields)
        rows = smollm2.generate("Paris Paris Paris", params, use_tqdm=False)[0].outputs[0].logprobs
        assert rows is not None
        return {token: entry.logprob for token, entry in rows[0].items()}

    plain = first()
    assert first(presence_penalty=2.0) == plain
    assert first(frequency_penalty=2.0) == plain
    repeated = first(repetition_penalty=1.5)
    seen = set(smollm2.encode("Paris Paris Paris"))
    shifts = np.array([repeated[token] - plain[token] for token in range(len(plain)) if token not in seen])
    # Whatever is not in the prompt is shifted alike; what is in it has lost against the rest.
    np.testing.assert_allclose(shifts, shifts[0], atol=1e-4)
    assert all(repeated[token] - plain[token] < shifts[0] - 0.1 for token in seen)


def test_penalties_are_the_same_whatever_is_cached_and_however_the_prompt_is_cut(tiny_folder: Any) -> None:
    prompt = [(7 * at) % 300 for at in range(70)]
    params = SamplingParams(
        temperature=0.7,
        seed=3,
        n=3,
        max_tokens=20,
        ignore_eos=True,
        logprobs=3,
        repetition_penalty=1.3,
        frequency_penalty=0.3,
        presence_penalty=-0.5,
    )
    outcomes = []
    for size, caching in ((512, False), (16, True), (7, False)):
        with LLM(
            tiny_folder,
            device="reference",
            max_model_len=128,
            num_kv_blocks=64,
            max_num_batched_tokens=size,
            enable_prefix_caching=caching,
        ) as llm:
            outcomes += [llm.generate([prompt], params, use_tqdm=False)[0].outputs for _ in range(2)]
    assert outcomes[1:] == outcomes[:-1]


def test_only_allowed_tokens_come_and_the_models_end_only_if_it_is_among_them(tiny_llm: LLM) -> None:
    allowed = [3, 90, 400]
    params = SamplingParams(temperature=5.0, seed=1, max_tokens=60, allowed_token_ids=allowed)
    [output] = tiny_llm.generate([PROMPT], params, use_tqdm=False)
    assert set(output.outputs[0].token_ids) == set(allowed)
    assert output.outputs[0].finish_reason == "length"
    with_end = SamplingParams(temperature=5.0, seed=1, max_tokens=60, allowed_token_ids=[*allowed, tiny.IM_END])
    [output] = tiny_llm.generate([PROMPT], with_end, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids[-1] == tiny.IM_END


def test_a_bias_of_100_forces_a_token_and_one_of_minus_100_forbids_it(smollm2: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=8, logit_bias={"2756": 100})
    assert smollm2.generate("The", params, use_tqdm=False)[0].outputs[0].text == "é" * 8
    plain = SamplingParams(temperature=0, max_tokens=1)
    [[capital]] = ids(smollm2.generate("The capital of France is", plain, use_tqdm=False))
    forbidden = SamplingParams(temperature=0, max_tokens=1, logit_bias={capital: -100})
    [[other]] = ids(smollm2.generate("The capital of France is", forbidden, use_tqdm=False))
    assert other != capital


def test_a_bad_word_does_not_come_alone_nor_after_a_space(successor: LLM) -> None:
    """Token t is byte t, and is followed by t + 1: after "A" comes "BCDEFG"."""

    def text(prompt: str, *words: str) -> str:
        params = SamplingParams(temperature=0, max_tokens=6, bad_words=words)
        return successor.generate(prompt, params, use_tqdm=False)[0].outputs[0].text

    assert text("A") == "BCDEFG"
    assert text("A", "E").startswith("BCD")
    assert "E" not in text("A", "E")
    assert text("A", "CDE").startswith("BCD")
    assert "CDE" not in text("A", "CDE")
    # Nothing else is banned: neither parts of the word nor the word's beginning.
    assert text("A", "CE") == text("A", "XCDE") == "BCDEFG"
    # A word that begins in the prompt is none of the output.
    assert text("AB", "BC") == "CDEFGH"
    # " !" is the successor of "\x1f": banned where the word follows a space.
    assert text("\x1e").startswith('\x1f !"')
    assert text("\x1e", "!").startswith("\x1f ")
    assert "!" not in text("\x1e", "!")


def test_a_bad_word_is_banned_as_it_follows_a_space(smollm2: LLM) -> None:
    """The vocabulary has a token of its own for it."""

    def text(*words: str) -> str:
        params = SamplingParams(temperature=0, max_tokens=8, bad_words=words)
        return smollm2.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0].text

    assert smollm2.encode(" Paris") != smollm2.encode("Paris")
    assert text().startswith(" Paris")
    assert "Paris" not in text("Paris")


def test_a_bad_word_without_a_token_is_refused(smollm2: LLM) -> None:
    with pytest.raises(
        InvalidRequest, match=r"^prompt 0: bad_words\[1\]: found '\\x04', of which the tokenizer makes no"
    ):
        smollm2.generate("x", SamplingParams(bad_words=["a", "\x04"]), use_tqdm=False)


def test_min_tokens_keeps_the_models_end_and_stop_tokens_away(tmp_path: Any) -> None:
    folder = tiny.write(tmp_path, tiny.successor_weights(), generation_config={"eos_token_id": [7, 9]})
    with LLM(folder, device="reference", max_model_len=64, num_kv_blocks=16) as llm:

        def run(**fields: Any) -> tuple[list[int], str | None]:
            params = SamplingParams(temperature=0, max_tokens=20, **fields)
            completion = llm.generate([[3]], params, use_tqdm=False)[0].outputs[0]
            return completion.token_ids, completion.finish_reason

        assert run() == ([4, 5, 6, 7], "stop")
        for count in (4, 10):
            tokens, reason = run(min_tokens=count)
            assert tokens[:3] == [4, 5, 6]
            assert not {7, 9} & set(tokens[:count])
            assert len(tokens) >= count + (reason == "stop")
            assert reason in ("stop", "length")
        assert run(min_tokens=3) == ([4, 5, 6, 7], "stop")
        # The third token may not be the end yet, the fourth may.
        assert 6 not in run(min_tokens=3, stop_token_ids=[6])[0][:3]
        assert run(min_tokens=2, stop_token_ids=[6]) == ([4, 5, 6], "stop")
        tokens, reason = run(min_tokens=20, stop_token_ids=[12])
        assert (len(tokens), reason) == (20, "length")
        assert not {7, 9, 12} & set(tokens)
        # Where the end is ignored it may come, and nothing else changes.
        assert run(min_tokens=20, ignore_eos=True)[0] == list(range(4, 24))


def test_where_nothing_is_allowed_only_that_request_fails(successor: LLM) -> None:
    stuck = SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[68], bad_words=["D"])
    good = SamplingParams(temperature=0, max_tokens=4)
    failed, fine = successor.generate(["A", "A"], [stuck, good], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert fine.outputs[0].text == "BCDE"
