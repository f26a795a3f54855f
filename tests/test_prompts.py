"""Prompts and parameters as callers hand them in, and as they misuse them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny
from calls import GREEDY, assert_alive, ids
from octavo import LLM, InvalidRequest, SamplingParams, StructuredOutputsParams


def test_all_forms_of_a_prompt_mean_the_same(successor: LLM) -> None:
    text, tokens = "ab", successor.encode("ab")
    forms: list[Any] = [
        text,
        [text],
        {"prompt": text},
        [{"prompt": text}],
        tokens,
        tuple(tokens),
        [tokens],
        [np.int64(token) for token in tokens],
        {"prompt_token_ids": tokens},
        [{"prompt_token_ids": tokens, "prompt": text}],
    ]
    for form in forms:
        [output] = successor.generate(form, GREEDY, use_tqdm=False)
        assert output.prompt_token_ids == tokens
        assert output.outputs[0].token_ids[0] == tokens[-1] + 1
    mixed: Any = [text, tokens, {"prompt": "a"}]
    assert ids(successor.generate(mixed, GREEDY, use_tqdm=False)) == ids(
        successor.generate(["ab", "ab", "a"], GREEDY, use_tqdm=False)
    )


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [
        ("", "prompt 0: found 0 tokens"),
        ([""], "prompt 0: found 0 tokens"),
        ([], "prompts: found an empty list"),
        ([[]], "prompt 0: found 0 tokens"),
        ([[1], []], "prompt 1: found 0 tokens"),
        ([[1], [2, 512]], "prompt 1: token id 512 at position 1, expected an integer from 0 to 511"),
        ([1, 4294967295], "prompt 0: token id 4294967295 at position 1, expected an integer from 0 to 511"),
        ([-1], "prompt 0: token id -1 at position 0"),
        ([1.5], "prompt"),
        ([[1, 1.5]], r"prompt 0: token id 1\.5 at position 1"),
        ([[1, True]], "prompt 0: token id True at position 1"),
        ([[2**70]], "prompt 0: token id 1180591620717411303424 at position 0"),
        ([10**5000], "prompt 0: token id an integer of 16610 bits at position 0, expected an integer from 0 to 511"),
        ([1, [10**5000]], "prompt 0: token id a value of type list at position 1"),
        ([1, "a"], "prompt 0: token id 'a' at position 1"),
        (["a", 1], "prompt 1: found int"),
        (5, "prompts: found int"),
        (None, "prompts: found NoneType"),
        (b"abc", "prompts: found bytes"),
        ({}, "prompt 0: found neither prompt nor prompt_token_ids"),
        ({"prompt": 5}, "prompt 0: prompt: found int"),
        ({"text": "a"}, "prompt 0: 'text' is not known"),
        ({"prompt_token_ids": "ab"}, "prompt 0: found str"),
        ("a\ud800", "prompt 0: found a lone surrogate at 1"),
        ([[1], [1] * 512], "prompt 1: the prompt has 512 tokens, expected at most 511"),
    ],
)
def test_a_wrong_prompt_is_refused_with_its_place_and_queues_nothing(successor: LLM, prompts: Any, reason: str) -> None:
    admitted = successor.get_metrics().requests_admitted
    with pytest.raises(InvalidRequest, match=f"^{reason}"):
        successor.generate(prompts, GREEDY, use_tqdm=False)
    assert successor.get_metrics().requests_admitted == admitted
    assert_alive(successor)


def test_the_last_id_of_the_vocabulary_is_a_prompt(successor: LLM) -> None:
    assert ids(successor.generate([[511]], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)) == [[0]]


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ("greedy", "sampling_params: found 'greedy'"),
        ([GREEDY], "sampling_params: found 1, expected one for all or one for each of 2 prompts"),
        ([GREEDY, None], "sampling_params: found"),
        (SamplingParams(stop_token_ids=[3, 512]), r"prompt 0: stop_token_ids\[1\]: found 512, expected 0 to 511"),
        (SamplingParams(logprobs=513), "prompt 0: logprobs: found 513, expected at most 512"),
        (SamplingParams(prompt_logprobs=513), "prompt 0: prompt_logprobs: found 513, expected at most 512"),
        (SamplingParams(allowed_token_ids=[3, 512]), r"prompt 0: allowed_token_ids\[1\]: found 512, expected 0 to 511"),
        (SamplingParams(logit_bias={"60000": 5}), "prompt 0: logit_bias: found token 60000, expected 0 to 511 as keys"),
        ([GREEDY, SamplingParams(logit_bias={512: 5})], "prompt 1: logit_bias: found token 512, expected 0 to 511"),
        (
            [GREEDY, SamplingParams(stop_token_ids=[512])],
            r"prompt 1: stop_token_ids\[0\]: found 512, expected 0 to 511",
        ),
        (
            [GREEDY, SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))],
            r"prompt 1: structured_outputs\.regex: ",
        ),
    ],
)
def test_wrong_parameters_are_refused_before_anything_is_queued(successor: LLM, params: Any, reason: str) -> None:
    admitted = successor.get_metrics().requests_admitted
    with pytest.raises(InvalidRequest, match=f"^{reason}"):
        successor.generate([[1], [2]], params, use_tqdm=False)
    with pytest.raises(InvalidRequest, match=f"^{reason}"):
        successor.stream([[1], [2]], params)
    assert successor.get_metrics().requests_admitted == admitted
    assert_alive(successor)


def test_each_prompt_can_have_its_own_parameters(successor: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=count) for count in (1, 3, 2)]
    assert ids(successor.generate([[5], [6], [7]], params, use_tqdm=False)) == [[6], [7, 8, 9], [8, 9]]


@pytest.fixture(scope="module")
def ender(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """Ends at 7 or 9, and recommends how to sample."""
    generation = {"eos_token_id": [7, 9], "temperature": 0.7, "top_k": 20, "top_p": 0.9, "do_sample": True}
    folder = tiny.write(tmp_path_factory.mktemp("ender"), tiny.successor_weights(), generation_config=generation)
    return LLM(folder, device="reference", max_model_len=64, num_kv_blocks=16)


def test_end_tokens_are_no_stop_ids_of_the_caller(ender: LLM) -> None:
    def run(**params: Any) -> tuple[int, str | None, int | str | None]:
        [output] = ender.generate([[3]], SamplingParams(temperature=0, max_tokens=20, **params), use_tqdm=False)
        completion = output.outputs[0]
        assert completion.token_ids == list(range(4, 4 + len(completion.token_ids)))
        return completion.token_ids[-1], completion.finish_reason, completion.stop_reason

    assert run(ignore_eos=True) == (23, "length", None)
    assert run() == (7, "stop", None)
    assert run(ignore_eos=True, stop_token_ids=[12]) == (12, "stop", 12)
    assert run(stop_token_ids=[5]) == (5, "stop", 5)
    assert run(stop_token_ids=[7]) == (7, "stop", None)
    assert run(stop_token_ids=[7], ignore_eos=True) == (7, "stop", 7)


def test_the_checkpoints_recommendation_counts_only_where_no_parameters_are_given(ender: LLM) -> None:
    recommended = ender.default_sampling_params()
    assert recommended == SamplingParams(temperature=0.7, top_k=20, top_p=0.9)
    assert SamplingParams().temperature == 1.0
    [output] = ender.generate([[3]], use_tqdm=False)
    assert ids(
        ender.generate([[3]], SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=output.seed), use_tqdm=False)
    ) == ids([output])


def test_a_recommended_penalty_counts(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, tiny.successor_weights(), generation_config={"repetition_penalty": 1.3})
    with LLM(folder, device="reference", max_model_len=64) as llm:
        assert llm.default_sampling_params() == SamplingParams(repetition_penalty=1.3)


def test_a_recommendation_can_be_ignored_and_one_that_cannot_be_followed_is_an_error(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, tiny.successor_weights(), generation_config={"repetition_penalty": 1000})
    with pytest.raises(InvalidRequest, match=r"generation config: repetition_penalty: found 1000.*'octavo'"):
        LLM(folder, device="reference", max_model_len=64)
    with LLM(folder, device="reference", max_model_len=64, generation_config="octavo") as llm:
        assert llm.default_sampling_params() == SamplingParams()
    (folder / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.6, "repetition_penalty": 1.0}'
    )
    with LLM(folder, device="reference", max_model_len=64) as llm:
        assert llm.default_sampling_params() == SamplingParams(temperature=0)


def test_a_model_without_text_takes_token_ids_only(tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, tiny.successor_weights())
    (folder / "tokenizer.json").rename(tmp_path / "elsewhere.json")
    (folder / "tokenizer_config.json").unlink()
    with LLM(folder, device="reference", max_model_len=64) as llm:
        [output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, logprobs=1), use_tqdm=False)
        assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [4, 5])
        with pytest.raises(
            InvalidRequest, match="prompt 0: found a text, expected token ids: the model has no tokenizer"
        ):
            llm.generate("abc")
        for fields in ({"stop": "x"}, {"bad_words": ["x"]}):
            with pytest.raises(InvalidRequest, match=r"^prompt 0: .*the model has no tokenizer"):
                llm.generate([[1]], SamplingParams(**fields))
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            llm.generate([[1]], SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")))
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "x"}])
    with LLM(folder, device="reference", max_model_len=64, tokenizer=tmp_path / "elsewhere.json") as llm:
        assert llm.generate("abc", GREEDY, use_tqdm=False)[0].outputs[0].text != ""
        with pytest.raises(InvalidRequest, match="no chat template"):
            llm.chat([{"role": "user", "content": "x"}])
