"""`AsyncLLM` as tasks use it, and as they misuse it."""

import asyncio
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from calls import GREEDY
from octavo import LLM, AsyncLLM, InvalidRequest, RequestOutput, SamplingParams
from streams import ENDLESS, WIDE, assert_holds_nothing, assert_no_thread_is_left, closed_at_the_end, last, loaded, read

CONVERSATION = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def llm(tiny_folder: Path) -> Iterator[AsyncLLM]:
    """The same model as `tiny_llm`."""
    with closed_at_the_end(loaded(tiny_folder)) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _clean(llm: AsyncLLM) -> Iterator[None]:
    """A test leaves no request behind, and no thread."""
    yield
    assert_no_thread_is_left()
    assert_holds_nothing(llm)


def drawn(index: int, **other: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.9, "seed": index, "max_tokens": 5 + index % 7, "logprobs": 2, **other})


def test_streams_of_many_tasks_give_what_a_list_of_prompts_gives(llm: AsyncLLM, tiny_llm: LLM) -> None:
    prompts = [[index, 2 * index, 7] * (1 + index % 9) for index in range(40)]
    params = [drawn(index) for index in range(40)]
    together = tiny_llm.generate(prompts, params, use_tqdm=False)

    async def streamed() -> list[RequestOutput]:
        pairs = zip(prompts, params, strict=True)
        return await asyncio.gather(*[last(llm.generate(prompt, one)) for prompt, one in pairs])

    for _ in range(2):
        outputs = asyncio.run(streamed())
        assert [output.outputs for output in outputs] == [output.outputs for output in together]
        assert [output.seed for output in outputs] == list(range(40))
        assert [output.prompt_token_ids for output in outputs] == prompts


def test_an_output_holds_all_that_came_before_it(llm: AsyncLLM) -> None:
    async def grown() -> list[RequestOutput]:
        return await read(llm.generate("ab", drawn(3, n=16, max_tokens=100, ignore_eos=True), "grower"))

    outputs = asyncio.run(grown())
    assert len(outputs) > 1
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for earlier, later in pairwise(outputs):
        before, after = earlier.outputs[0], later.outputs[0]
        assert len(before.token_ids) < len(after.token_ids)
        assert after.token_ids[: len(before.token_ids)] == before.token_ids
        assert after.text.startswith(before.text)
        assert before.logprobs is not None
        assert after.logprobs is not None
        assert after.logprobs[: len(before.logprobs)] == before.logprobs
        assert before.finish_reason is None
        assert earlier.metrics is not None
        assert later.metrics is not None
        assert earlier.metrics.first_token_time == later.metrics.first_token_time
    final = outputs[-1]
    assert (final.request_id, final.prompt, final.outputs[0].finish_reason) == ("grower", "ab", "length")
    assert len(final.outputs[0].token_ids) == 100
    assert final.metrics is not None
    assert final.metrics.chunks == 1


def test_whoever_reads_slowly_gets_several_steps_at_once(llm: AsyncLLM) -> None:
    async def slow() -> list[RequestOutput]:
        stream = llm.generate([1, 2, 3], WIDE)
        outputs = [await anext(stream)]
        while llm.get_metrics().running:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(assert_no_thread_is_left)
        return [*outputs, *await read(stream)]

    outputs = asyncio.run(slow())
    assert len(outputs) == 2
    assert len(outputs[0].outputs[0].token_ids) < 509 == len(outputs[1].outputs[0].token_ids)


def test_a_conversation_is_answered_as_by_the_other_class(llm: AsyncLLM, tiny_llm: LLM) -> None:
    [expected] = tiny_llm.chat(CONVERSATION, GREEDY, use_tqdm=False)

    async def chat() -> RequestOutput:
        return await last(llm.chat(CONVERSATION, GREEDY))

    found = asyncio.run(chat())
    assert (found.prompt, found.outputs) == (expected.prompt, expected.outputs)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"prompt": ""}, "prompt 0: found 0 tokens"),
        ({"prompt": ["a"]}, "prompt 0: token id 'a' at position 0"),
        ({"prompt": [[1], [2]]}, r"prompt 0: token id \[1\] at position 0"),
        ({"prompt": [1, 512]}, "prompt 0: token id 512 at position 1"),
        ({"prompt": [1] * 512}, "prompt 0: the prompt has 512 tokens, expected at most 511"),
        ({"sampling_params": [GREEDY]}, "sampling_params: found .*, expected a SamplingParams or None"),
        ({"sampling_params": SamplingParams(logprobs=513)}, "prompt 0: logprobs: found 513"),
        ({"sampling_params": SamplingParams(n=65)}, "prompt 0: n is 65, expected at most 64"),
        ({"request_id": ""}, "request_id: found '', expected None or a text"),
        ({"request_id": 5}, "request_id: found 5, expected None or a text"),
    ],
)
def test_wrong_input_is_refused_by_the_call_itself(llm: AsyncLLM, arguments: dict[str, Any], reason: str) -> None:
    async def generate() -> None:
        with pytest.raises(InvalidRequest, match=f"^{reason}"):
            llm.generate(**{"prompt": [1], **arguments})

    admitted = llm.get_metrics().requests_admitted
    asyncio.run(generate())
    assert llm.get_metrics().requests_admitted == admitted


def test_a_wrong_conversation_is_refused_by_the_call_itself(llm: AsyncLLM) -> None:
    wrong: list[Any] = [5, [], [CONVERSATION], [{"role": "user"}]]

    async def chat() -> None:
        for messages in wrong:
            with pytest.raises(InvalidRequest, match=r"^messages"):
                llm.chat(messages)

    asyncio.run(chat())


def test_a_call_outside_of_an_event_loop_is_refused(llm: AsyncLLM) -> None:
    with pytest.raises(InvalidRequest, match="found no running event loop"):
        llm.generate([1])


def test_a_name_is_taken_for_as_long_as_its_request_runs(llm: AsyncLLM) -> None:
    async def names() -> None:
        for ended_by in ("its end", "abort", "closing", "dropping"):
            stream = llm.generate([1], GREEDY if ended_by == "its end" else ENDLESS, "mine")
            with pytest.raises(InvalidRequest, match=r"^request_id: found 'mine', which a request has"):
                llm.generate([2], GREEDY, "mine")
            other = llm.generate([2], GREEDY, "another")
            if ended_by == "abort":
                await llm.abort("mine")
            if ended_by == "closing":
                await stream.aclose()
            if ended_by in ("its end", "abort"):
                await last(stream)
            del stream
            assert (await last(llm.generate([3], GREEDY, "mine"))).request_id == "mine"
            await last(other)

    asyncio.run(names())


def test_requests_without_a_name_get_one_that_is_free(llm: AsyncLLM) -> None:
    async def names() -> list[str]:
        first = llm.generate([1], GREEDY)
        number = int(first.request_id.removeprefix("request-"))
        taken = llm.generate([1], GREEDY, f"request-{number + 1}")
        streams = [first, taken, *[llm.generate([1], GREEDY) for _ in range(3)]]
        outputs = await asyncio.gather(*map(last, streams))
        assert [output.request_id for output in outputs] == [stream.request_id for stream in streams]
        return [stream.request_id for stream in streams]

    assert len(set(asyncio.run(names()))) == 5


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_continuations_come_under_their_numbers_and_the_first_is_that_of_a_single_one(
    llm: AsyncLLM, tiny_llm: LLM, temperature: float
) -> None:
    several, single = (drawn(5, n=n, temperature=temperature, max_tokens=16, ignore_eos=True) for n in (3, 1))
    prompt = list(range(40))
    [expected] = tiny_llm.generate([prompt], single, use_tqdm=False)
    [listed] = tiny_llm.generate([prompt], several, use_tqdm=False)

    async def streamed() -> list[RequestOutput]:
        return await read(llm.generate(prompt, several))

    outputs = asyncio.run(streamed())
    for output in [*outputs, listed]:
        assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert outputs[-1].outputs == listed.outputs
    assert listed.outputs[0] == expected.outputs[0]
    assert listed.finished
    assert all(output.finished == (output is outputs[-1]) for output in outputs)
    assert len({tuple(choice.token_ids) for choice in listed.outputs}) == (1 if temperature == 0 else 3)
    for choice in listed.outputs:
        assert choice.logprobs is not None
        drawn_logprobs = [row[token].logprob for token, row in zip(choice.token_ids, choice.logprobs, strict=True)]
        assert choice.cumulative_logprob == pytest.approx(sum(drawn_logprobs))


def test_a_stream_has_one_reader_at_a_time(llm: AsyncLLM) -> None:
    async def two_readers() -> RequestOutput:
        stream = llm.generate([1], WIDE)
        first = asyncio.create_task(last(stream))
        await asyncio.sleep(0)
        with pytest.raises(InvalidRequest, match="is read by two tasks at once"):
            await anext(stream)
        return await first

    assert asyncio.run(two_readers()).finished


def test_a_stream_is_read_in_the_event_loop_that_it_was_made_in(llm: AsyncLLM) -> None:
    async def elsewhere() -> RequestOutput:
        stream = llm.generate([1], GREEDY)

        def read_in_another() -> None:
            with pytest.raises(InvalidRequest, match="is read in another event loop"):
                asyncio.run(last(stream))

        await asyncio.to_thread(read_in_another)
        return await last(stream)

    assert asyncio.run(elsewhere()).finished


@pytest.mark.parametrize("read_first", [False, True])
def test_closing_a_stream_ends_its_request_and_the_stream(llm: AsyncLLM, read_first: bool) -> None:
    async def closed() -> None:
        stream = llm.generate([1], ENDLESS)
        if read_first:
            await anext(stream)
        await stream.aclose()
        assert_holds_nothing(llm)
        assert await read(stream) == []
        await stream.aclose()

    asyncio.run(closed())


def test_closing_a_stream_ends_the_wait_of_another_task(llm: AsyncLLM) -> None:
    async def closed() -> list[RequestOutput]:
        stream = llm.generate([1], ENDLESS)
        reader = asyncio.create_task(read(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        return await reader

    assert not any(output.finished for output in asyncio.run(closed()))
