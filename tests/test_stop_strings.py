"""Stop strings: where they end an output, what a stream shows of them, and who else notices."""

import asyncio
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import tiny
from octavo import LLM, AsyncLLM, InvalidRequest, RequestOutputKind, SamplingParams, StructuredOutputsParams
from streams import assert_holds_nothing, closed_at_the_end, read

LETTERS = "ABCDEFGHIJKLM"
# Token t is followed by t + 1. No stop string below begins or ends where a piece does, but for some.
PIECES = [b"AB", b"CD", b"EF", b"G", b"HIJ", b"KL", b"M"]


@pytest.fixture(scope="module")
def speller_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("letters")
    return tiny.write(folder, tiny.successor_weights(), first_pieces=[b"start", *PIECES])


@pytest.fixture(scope="module")
def speller(speller_folder: Path) -> Iterator[LLM]:
    """A model that spells the letters from A to M."""
    with LLM(speller_folder, device="reference", max_model_len=64, num_kv_blocks=64) as llm:
        yield llm


def letters(**fields: object) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": len(PIECES)} | fields))  # type: ignore[arg-type]


def streamed(llm: LLM, prompt: str | list[int], params: SamplingParams) -> tuple[list[str], list[int], str | None]:
    """The texts of a stream's outputs, its tokens, and why it ended."""
    outputs = list(llm.stream([prompt], params))
    tokens = [token for output in outputs for token in output.token_ids]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return [output.text for output in outputs], tokens, outputs[-1].finish_reason


@pytest.mark.parametrize(
    ("stop", "pieces", "with_stop", "num_tokens"),
    [
        (["DEFGHIJ"], ["AB", "C", "", "", ""], "ABCDEFGHIJ", 5),
        # It begins and ends inside tokens.
        (["FGHI"], ["AB", "CD", "E", "", ""], "ABCDEFGHI", 5),
        # It is never complete: what was held back comes as soon as that is known.
        (["DEFZ"], ["AB", "C", "", "DEFG", "HIJ", "KL", "M"], LETTERS, 7),
        # What was held back at the end comes with it.
        (["LMN"], ["AB", "CD", "EF", "G", "HIJ", "K", "LM"], LETTERS, 7),
        # The one that is complete first counts, and of two that end at once the longer.
        (["DEFGHIJ", "G"], ["AB", "C", "", "DEF"], "ABCDEFG", 4),
        (["I", "HI"], ["AB", "CD", "EF", "G", ""], "ABCDEFGHI", 5),
        # The last token that was asked for completes it.
        (["M"], ["AB", "CD", "EF", "G", "HIJ", "KL", ""], LETTERS, 7),
        (["A"], [""], "A", 1),
    ],
)
def test_nothing_of_a_stop_string_is_streamed_and_nothing_else_is_lost(
    speller: LLM, stop: list[str], pieces: list[str], with_stop: str, num_tokens: int
) -> None:
    found = next((one for one in sorted(stop, key=len, reverse=True) if with_stop.endswith(one)), None)
    assert streamed(speller, [0], letters(stop=stop)) == (
        pieces,
        list(range(1, num_tokens + 1)),
        "length" if found is None else "stop",
    )
    for include, text in [(False, "".join(pieces)), (True, with_stop)]:
        params = letters(stop=stop, include_stop_str_in_output=include)
        completion = speller.generate([[0]], params, use_tqdm=False)[0].outputs[0]
        assert completion.text == text == "".join(streamed(speller, [0], params)[0])
        assert completion.token_ids == list(range(1, num_tokens + 1))
        assert (completion.finish_reason, completion.stop_reason) == ("length" if found is None else "stop", found)


@pytest.mark.parametrize("output_kind", RequestOutputKind)
def test_async_streams_show_nothing_of_a_stop_string(speller_folder: Path, output_kind: RequestOutputKind) -> None:
    async def run(llm: AsyncLLM) -> None:
        outputs = await read(llm.generate([0], letters(stop="FGHI", output_kind=output_kind)))
        texts = [output.outputs[0].text for output in outputs if output.outputs]
        joined = "".join(texts) if output_kind is RequestOutputKind.DELTA else texts[-1]
        assert joined == "ABCDE"
        assert all("ABCDE".startswith(text) or text in "ABCDE" for text in texts)
        assert (outputs[-1].outputs[0].finish_reason, outputs[-1].outputs[0].stop_reason) == ("stop", "FGHI")
        assert_holds_nothing(llm)

    with closed_at_the_end(AsyncLLM(speller_folder, device="reference", max_model_len=64, num_kv_blocks=64)) as llm:
        asyncio.run(run(llm))


def test_a_stop_string_that_one_of_the_first_tokens_completes_is_text(speller: LLM) -> None:
    for min_tokens, expected in [(0, "AB"), (1, "AB"), (2, LETTERS), (7, LETTERS)]:
        [output] = speller.generate([[0]], letters(stop=["CD"], min_tokens=min_tokens), use_tqdm=False)
        assert output.outputs[0].text == expected
    # The match behind it counts.
    params = letters(stop=["CD", "DE"], min_tokens=2)
    assert streamed(speller, [0], params) == (["AB", "C", ""], [1, 2, 3], "stop")


def test_whichever_comes_first_ends_the_output_stop_token_or_stop_string(speller: LLM) -> None:
    for stop, stop_token_ids, text, reason in [
        ("HI", [5], "ABCDEFG", 5),
        ("GH", [5], "ABCDEFG", 5),
        ("EF", [5], "ABCD", "EF"),
        ("G", [5], "ABCDEF", "G"),
    ]:
        params = letters(stop=stop, stop_token_ids=stop_token_ids)
        completion = speller.generate([[0]], params, use_tqdm=False)[0].outputs[0]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", reason)
        assert "".join(streamed(speller, [0], params)[0]) == text


def test_log_probabilities_end_with_the_token_that_completes_the_stop_string(speller: LLM) -> None:
    params = letters(stop="FGHI", logprobs=1)
    completion = speller.generate([[0]], params, use_tqdm=False)[0].outputs[0]
    assert completion.logprobs is not None
    assert [token in row for token, row in zip(completion.token_ids, completion.logprobs, strict=True)] == [True] * 5


def test_stop_strings_without_text_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"^stop: found .*detokenize"):
        SamplingParams(stop="x", detokenize=False)


def first_end(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string that is complete first ends, and the longest that ends there."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    return (min(ends)[0], min(ends)[2]) if ends else None


def test_each_continuation_stops_by_itself_and_the_others_are_the_same(smollm2: LLM) -> None:
    params = SamplingParams(n=3, temperature=1, seed=4, max_tokens=32, ignore_eos=True)
    prompt = "The three of them went to the market and"
    whole = smollm2.generate([prompt], params, use_tqdm=False)[0].outputs
    # From the middle of each continuation something that the others do not have.
    stops = [
        next(
            choice.text[at : at + 6]
            for at in range(12 * (choice.index + 1), len(choice.text))
            if sum(choice.text[at : at + 6] in other.text for other in whole) == 1
        )
        for choice in whole
    ]
    for stop in [stops[1:2], stops]:
        stopping = replace(params, stop=stop)
        before = smollm2.get_metrics()
        stopped = smollm2.generate([prompt], stopping, use_tqdm=False)[0].outputs
        for choice, full in zip(stopped, whole, strict=True):
            end = first_end(full.text, stop)
            assert choice.text == (full.text if end is None else full.text[: end[0] - len(end[1])])
            assert choice.stop_reason == (None if end is None else end[1])
            assert choice.finish_reason == ("length" if end is None else "stop")
            assert choice.token_ids == full.token_ids[: len(choice.token_ids)]
            assert end is not None or len(choice.token_ids) == 32
        streams: list[list[str]] = [[], [], []]
        ended: set[int] = set()
        for output in smollm2.stream([prompt], stopping):
            assert output.choice not in ended, "nothing follows the end"
            streams[output.choice].append(output.text)
            ended |= {output.choice} if output.finished else set()
        assert ["".join(texts) for texts in streams] == [choice.text for choice in stopped]
        after = smollm2.get_metrics()
        assert (after.running, after.waiting, after.kv_blocks_free) == (0, 0, after.kv_blocks_total)
        counts = {reason: count - before.requests_finished[reason] for reason, count in after.requests_finished.items()}
        assert (counts["stop"], counts["length"]) == (2 * len(stop), 2 * (3 - len(stop)))


def test_a_stop_string_ends_one_request_and_not_its_neighbours(smollm2: LLM) -> None:
    prompts = ["Once upon a time", "The capital of France is", "Water boils at"]
    plain = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3
    alone = smollm2.generate(prompts, plain, use_tqdm=False)
    stop = alone[1].outputs[0].text[20:26]
    params = [plain[0], replace(plain[1], stop=stop), plain[2]]
    together = smollm2.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in together[::2]] == [
        output.outputs[0].token_ids for output in alone[::2]
    ]
    text = alone[1].outputs[0].text
    assert together[1].outputs[0].text == text[: text.index(stop)]


@pytest.mark.parametrize(
    ("stop", "text", "with_stop"),
    [("DEFGHIJ", "ABC", "ABCDEFGHIJ"), ("FGHI", "ABCDE", "ABCDEFGHI"), ("DEFZ", LETTERS, LETTERS)],
)
def test_letters_that_a_regular_expression_demands_end_at_the_stop_string(
    smollm2: LLM, stop: str, text: str, with_stop: str
) -> None:
    fields = {"temperature": 0, "max_tokens": 40, "structured_outputs": StructuredOutputsParams(regex=LETTERS)}
    for include, expected in [(False, text), (True, with_stop)]:
        params = SamplingParams(stop=[stop], include_stop_str_in_output=include, **fields)  # type: ignore[arg-type]
        completion = smollm2.generate(["x"], params, use_tqdm=False)[0].outputs[0]
        pieces, tokens, reason = streamed(smollm2, "x", params)
        assert "".join(pieces) == completion.text == expected
        assert tokens == completion.token_ids
        assert reason == completion.finish_reason == "stop"
        assert completion.stop_reason == (stop if stop in LETTERS else None)


CHARACTERS = ["a", "b", "aab", "ab", " ", "\u00e9", "\u65e5", "\U0001f600", "e\u0301", "A"]


def text_and_stops(chance: random.Random) -> tuple[str, list[str]]:
    """A text, and stop strings of which some are parts of it."""
    text = "".join(chance.choices(CHARACTERS, k=chance.randint(1, 12)))
    stops = ["".join(chance.choices(CHARACTERS, k=chance.randint(1, 3))) for _ in range(chance.randint(0, 2))]
    for _ in range(chance.randint(0, 2)):
        start = chance.randrange(len(text))
        stops.append(text[start : start + chance.randint(1, 4)])
    return text, stops


@pytest.mark.parametrize("seed", range(4))
def test_any_text_split_into_tokens_at_random_ends_where_a_search_through_all_of_it_says(
    smollm2: LLM, seed: int
) -> None:
    """A text that has to come is split by chance: at this temperature all tokens that fit are about as likely."""
    chance = random.Random(seed)
    cases = [text_and_stops(chance) for _ in range(24)]
    params = [
        SamplingParams(
            temperature=50,
            seed=at,
            max_tokens=120,
            stop=stops or None,
            include_stop_str_in_output=at % 2 == 1,
            structured_outputs=StructuredOutputsParams(regex=re.escape(text)),
        )
        for at, (text, stops) in enumerate(cases)
    ]
    outputs = smollm2.generate(["x"] * len(cases), params, use_tqdm=False)
    streams: list[list[str]] = [[] for _ in cases]
    for output in smollm2.stream(["x"] * len(cases), params):
        streams[output.index].append(output.text)
    for at, ((text, stops), result, pieces) in enumerate(zip(cases, outputs, streams, strict=True)):
        end = first_end(text, stops)
        expected = text
        if end is not None:
            expected = text[: end[0] - (0 if at % 2 == 1 else len(end[1]))]
        completion = result.outputs[0]
        # Whatever was given out early is a part of this, so nothing of the stop string was.
        assert completion.text == expected == "".join(pieces)
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None if end is None else end[1])
