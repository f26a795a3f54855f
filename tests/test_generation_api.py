"""Requests at the edge of what can be asked for, alone and beside others, and what streams give."""

import asyncio
import math
from typing import Any

import pytest

from calls import GREEDY, assert_alive, ids
from octavo import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    InvalidRequest,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from streams import assert_async_alive, last, read

PROMPT = "The capital of France is"
NEIGHBOUR = "Once upon a time, there was a"
PLAIN = SamplingParams(temperature=0, max_tokens=8)


def one(llm: LLM, **fields: Any) -> list[int]:
    """The tokens of one request alone."""
    params = SamplingParams(**({"max_tokens": 8, "seed": 1} | fields))
    return ids(llm.generate([PROMPT], params, use_tqdm=False))[0]


@pytest.fixture(scope="module")
def greedy(smollm2: LLM) -> list[int]:
    return one(smollm2, temperature=0)


@pytest.mark.parametrize(
    "fields",
    [
        *[{"temperature": temperature} for temperature in (0, 1e-12, 1e-5, 1e-4, 1e-3)],
        *[{"temperature": 0, "top_k": count} for count in (-1, 0, 1, 49152, 9999999)],
        *[{"temperature": 0, "top_p": share} for share in (1e-9, 1)],
        *[{"temperature": 0, "min_p": share} for share in (0, 1)],
        {"temperature": 1e6, "top_k": 1},
        {"temperature": 1e6, "top_p": 1e-9},
        {"temperature": 1e6, "min_p": 1},
        {"temperature": 1e-12, "top_k": 9999999, "top_p": 1e-9, "min_p": 1},
    ],
    ids=str,
)
def test_what_amounts_to_greedy_is_greedy_alone_and_beside_another(
    smollm2: LLM, greedy: list[int], fields: dict[str, Any]
) -> None:
    assert one(smollm2, **fields) == greedy
    params = [PLAIN, SamplingParams(max_tokens=8, seed=1, **fields)]
    [neighbour] = ids(smollm2.generate([NEIGHBOUR], PLAIN, use_tqdm=False))
    assert ids(smollm2.generate([NEIGHBOUR, PROMPT], params, use_tqdm=False)) == [neighbour, greedy]
    assert ids(smollm2.generate([PROMPT, NEIGHBOUR], params[::-1], use_tqdm=False)) == [greedy, neighbour]


@pytest.mark.parametrize("fields", [{"top_k": 0}, {"top_k": -1}, {"top_k": 49152}, {"top_k": 9999999}, {"top_p": 1}])
def test_a_filter_that_keeps_everything_is_none(smollm2: LLM, fields: dict[str, Any]) -> None:
    assert one(smollm2, temperature=0.9, **fields) == one(smollm2, temperature=0.9)


def test_the_hottest_request_leaves_its_neighbour_alone(smollm2: LLM) -> None:
    hot = SamplingParams(temperature=1e6, seed=1, max_tokens=8, ignore_eos=True)
    [neighbour] = ids(smollm2.generate([NEIGHBOUR], PLAIN, use_tqdm=False))
    tokens, other = ids(smollm2.generate([PROMPT, NEIGHBOUR], [hot, PLAIN], use_tqdm=False))
    assert len(tokens) == 8
    assert other == neighbour


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", bad) for bad in (math.nan, math.inf, -1)],
        *[("top_p", bad) for bad in (0, math.nan, math.inf, -1)],
        *[("min_p", bad) for bad in (math.nan, math.inf, -1)],
        ("top_k", -2),
    ],
)
def test_what_is_no_number_of_its_range_is_no_parameter(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: found"):
        SamplingParams(**{field: value})


def test_a_seeded_request_gives_the_same_beside_one_without_a_seed(smollm2: LLM) -> None:
    fields: dict[str, Any] = {"temperature": 0.8, "max_tokens": 16, "ignore_eos": True}
    seeded, unseeded = SamplingParams(seed=42, **fields), SamplingParams(**fields)
    [expected] = ids(smollm2.generate([PROMPT], seeded, use_tqdm=False))
    others = set()
    for _ in range(4):
        first, other = ids(smollm2.generate([PROMPT, NEIGHBOUR], [seeded, unseeded], use_tqdm=False))
        another, second = ids(smollm2.generate([NEIGHBOUR, PROMPT], [unseeded, seeded], use_tqdm=False))
        assert first == second == expected
        others |= {tuple(other), tuple(another)}
    assert len(others) > 1


HOSTILE = {
    "hot": SamplingParams(temperature=1e6, max_tokens=20, ignore_eos=True),
    "everything is reported": SamplingParams(logprobs=-1, prompt_logprobs=-1, max_tokens=20),
    "nothing is allowed": SamplingParams(allowed_token_ids=[68], bad_words=["D"], max_tokens=20),
    "one token is allowed": SamplingParams(allowed_token_ids=[511], max_tokens=20, ignore_eos=True),
    "all tokens lose": SamplingParams(logit_bias=dict.fromkeys(range(512), -100.0), max_tokens=20),
    "all tokens gain": SamplingParams(logit_bias=dict.fromkeys(range(512), 100.0), max_tokens=20),
    "strong penalties": SamplingParams(
        presence_penalty=2, frequency_penalty=2, repetition_penalty=100, max_tokens=40, ignore_eos=True
    ),
    "strong rewards": SamplingParams(
        presence_penalty=-2, frequency_penalty=-2, repetition_penalty=0.01, max_tokens=40, ignore_eos=True
    ),
    "many answers": SamplingParams(n=16, temperature=2.0, max_tokens=20, ignore_eos=True),
    "many stops": SamplingParams(stop=[f"{number}" * 256 for number in range(64)], max_tokens=20),
    "a stop at once": SamplingParams(stop=["B", "CD"], max_tokens=20, temperature=0),
    "many bad words": SamplingParams(bad_words=[f"word {number}" for number in range(1024)], max_tokens=20),
    "no end": SamplingParams(min_tokens=40, max_tokens=40, stop_token_ids=list(range(512))),
    "a late end": SamplingParams(min_tokens=10, max_tokens=40, stop_token_ids=[80], stop="z"),
    "no time": SamplingParams(deadline_ms=1e-6, max_tokens=40),
    "little time": SamplingParams(deadline_ms=5, max_tokens=400, ignore_eos=True),
    "a form": SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-c]{3,9}"), temperature=2.0),
    "a form without a way": SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="[a-c]+"), allowed_token_ids=[68], max_tokens=20
    ),
    "all at once": SamplingParams(
        n=4,
        temperature=5.0,
        top_k=3,
        top_p=1e-9,
        min_p=1,
        logprobs=-1,
        prompt_logprobs=-1,
        stop=["A", "B"],
        bad_words=["a"],
        logit_bias={0: 100, 511: -100},
        min_tokens=3,
        max_tokens=30,
        repetition_penalty=0.01,
        structured_outputs=StructuredOutputsParams(json_object=True),
        include_stop_str_in_output=True,
    ),
}
GOOD = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
GOOD_TOKENS = list(range(4, 52))


@pytest.mark.parametrize("name", HOSTILE)
def test_no_request_changes_anothers_tokens_or_stops_the_engine(successor: LLM, name: str) -> None:
    hostile = HOSTILE[name]
    for order in ([GOOD, hostile, hostile, GOOD], [hostile, GOOD]):
        prompts = [[1, 2, 3] if params is GOOD else [64, 65] for params in order]
        outputs = successor.generate(prompts, order, use_tqdm=False)
        assert all(completion.finish_reason for output in outputs for completion in output.outputs)
        for params, tokens in zip(order, ids(outputs), strict=True):
            assert params is not GOOD or tokens == GOOD_TOKENS
    assert_alive(successor)


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        ([], {}),
        ([-1], {}),
        ([512], {}),
        ([1] * 512, {}),
        ("", {}),
        ("\ud800", {}),
        ([5], {"n": 65}),
        ([5], {"logit_bias": {"60000": 5}}),
        ([5], {"logit_bias": {"-1": 5}}),
        ([5], {"logit_bias": {"AI": -100}}),
        ([5], {"logit_bias": {"27": 1000}}),
        ([5], {"logit_bias": {"27": "x"}}),
        ([5], {"allowed_token_ids": [512]}),
        ([5], {"stop_token_ids": [512]}),
        ([5], {"logprobs": 513}),
        ([5], {"prompt_logprobs": 513}),
        ([5], {"structured_outputs": StructuredOutputsParams(regex="(")}),
        ([5], {"structured_outputs": StructuredOutputsParams(json={"type": "strng"})}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_refused_leaves_a_running_request_as_it_is_and_queues_nothing(
    successor: LLM, prompt: Any, fields: dict[str, Any]
) -> None:
    stream = successor.stream([[1, 2, 3]], GOOD)
    tokens = next(stream).token_ids
    with pytest.raises(InvalidRequest):
        successor.generate([[7], prompt, [8]], [GREEDY, SamplingParams(**fields), GREEDY], use_tqdm=False)
    tokens += [token for output in stream for token in output.token_ids]
    assert tokens == GOOD_TOKENS
    assert_alive(successor)


def test_a_refused_list_is_not_queued_in_part(successor: LLM) -> None:
    before = successor.get_metrics()
    bad = SamplingParams(logit_bias={600: 1.0})
    for call in (
        lambda: successor.generate([[1]] * 3, [GREEDY, GREEDY, bad], use_tqdm=False),
        lambda: successor.stream([[1]] * 3, [GREEDY, GREEDY, bad]),
        lambda: successor.chat([[{"role": "user", "content": "x"}], []], use_tqdm=False),
        lambda: successor.embed([[1], [600]], use_tqdm=False),
        lambda: successor.score_tokens([[1], [600]], use_tqdm=False),
        lambda: successor.beam_search([[1], [600]], BeamSearchParams(2, 2)),
    ):
        with pytest.raises(InvalidRequest):
            call()
    after = successor.get_metrics()
    assert (after.requests_admitted, after.steps) == (before.requests_admitted, before.steps)


def test_a_request_out_of_time_ends_with_what_it_has(successor: LLM) -> None:
    ended = successor.get_metrics().requests_finished["deadline"]
    short = SamplingParams(n=16, temperature=0, max_tokens=200, ignore_eos=True, deadline_ms=30)
    [output] = successor.generate([[1, 2, 3]], short, use_tqdm=False)
    for completion in output.outputs:
        assert completion.finish_reason == "deadline"
        assert completion.stop_reason is None
        assert len(completion.token_ids) < 200
        assert completion.token_ids == [token % 512 for token in range(4, 4 + len(completion.token_ids))]
    # One that is late already never begins.
    late = SamplingParams(temperature=0, max_tokens=8, deadline_ms=1e-9)
    [output] = successor.generate([[1, 2, 3]], late, use_tqdm=False)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([], "deadline")
    # Time enough is no limit.
    ample = SamplingParams(temperature=0, max_tokens=8, deadline_ms=1e308)
    assert ids(successor.generate([[1, 2, 3]], ample, use_tqdm=False)) == [list(range(4, 12))]
    assert successor.get_metrics().requests_finished["deadline"] == ended + 17
    assert_alive(successor)


def test_a_talk_goes_on_from_an_answer_that_was_begun(smollm2: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    [whole] = smollm2.chat(messages, PLAIN, use_tqdm=False)
    begun = whole.outputs[0].token_ids[:4]
    answer = {"role": "assistant", "content": smollm2.decode(begun)}
    [rest] = smollm2.chat(
        [*messages, answer], PLAIN, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    assert rest.prompt_token_ids == whole.prompt_token_ids + begun
    assert rest.outputs[0].token_ids[:4] == whole.outputs[0].token_ids[4:]


# Streams


def joined(outputs: list[RequestOutput], choice: int) -> tuple[str, list[int], int]:
    """What a DELTA stream gave for a continuation: text, tokens and log-probabilities."""
    parts = [completion for output in outputs for completion in output.outputs if completion.index == choice]
    logprobs = sum(len(part.logprobs or ()) for part in parts)
    return "".join(part.text for part in parts), [token for part in parts for token in part.token_ids], logprobs


@pytest.mark.parametrize("slowly", [False, True])
def test_a_delta_is_what_is_new_since_the_output_before(llm: AsyncLLM, slowly: bool) -> None:
    async def main() -> None:
        fields: dict[str, Any] = {
            "n": 2,
            "seed": 1,
            "temperature": 0.7,
            "max_tokens": 20,
            "ignore_eos": True,
            "logprobs": 1,
            "prompt_logprobs": 0,
        }
        whole = await last(llm.generate([30, 31], SamplingParams(**fields)))
        outputs = []
        stream = llm.generate([30, 31], SamplingParams(output_kind=RequestOutputKind.DELTA, **fields))
        async for output in stream:
            outputs.append(output)
            if slowly:
                await asyncio.sleep(0.01)
        for completion in whole.outputs:
            expected = (completion.text, completion.token_ids, len(completion.token_ids))
            assert joined(outputs, completion.index) == expected
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert [output.prompt_logprobs for output in outputs if output.prompt_logprobs] == [whole.prompt_logprobs]
        assert all(completion.token_ids or completion.finish_reason for o in outputs for completion in o.outputs)
        ends = [completion for output in outputs for completion in output.outputs if completion.finish_reason]
        assert sorted(completion.index for completion in ends) == [0, 1]
        totals = [completion.cumulative_logprob for completion in sorted(ends, key=lambda end: end.index)]
        assert totals == [completion.cumulative_logprob for completion in whole.outputs]
        await assert_async_alive(llm)

    asyncio.run(main())


def test_a_stream_of_the_final_output_gives_one(llm: AsyncLLM) -> None:
    async def main() -> None:
        params = SamplingParams(
            n=2, temperature=0, max_tokens=20, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        [output] = await read(llm.generate([1, 2, 3], params))
        assert output.finished
        assert [completion.token_ids for completion in output.outputs] == [list(range(4, 24))] * 2
        aborted = llm.generate([1], SamplingParams(max_tokens=None, ignore_eos=True, output_kind=params.output_kind))
        await llm.abort(aborted.request_id)
        [output] = await read(aborted)
        assert output.outputs[0].finish_reason == "abort"
        await assert_async_alive(llm)

    asyncio.run(main())


def test_the_kind_of_output_says_nothing_to_generate(successor: LLM) -> None:
    for kind in RequestOutputKind:
        params = SamplingParams(temperature=0, max_tokens=4, output_kind=kind)
        assert ids(successor.generate([[1]], params, use_tqdm=False)) == [[2, 3, 4, 5]]


def test_an_async_chat_takes_the_same_options(llm: AsyncLLM) -> None:
    async def main() -> None:
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "AB"}]
        stream = llm.chat(messages, GREEDY, add_generation_prompt=False, continue_final_message=True)
        assert (await last(stream)).outputs[0].text == "CDEFGHIJ"
        with pytest.raises(InvalidRequest, match=r"^tools: found int"):
            llm.chat(messages, GREEDY, tools=5)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match=r"^prompt 0: logit_bias: found token 600"):
            llm.generate([1], SamplingParams(logit_bias={600: 1}))
        await assert_async_alive(llm)

    asyncio.run(main())
