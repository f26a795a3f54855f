"""Text as it comes: whole characters, nothing held back for long, and the same text in the end."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

import tiny
from octavo import LLM, EngineDeadError, InvalidRequest, SamplingParams, StreamOutput

# Pieces that end inside characters; token t is followed by t + 1, so they come in this order.
PIECES = [b"hi", b"\xf0", b"\x9f\x98", b"\x80\xf0", b"\x9f", b"\xa6", b"\x80", b"\xe6", b"\x97\xa5", b"\xc4", b"\x8f!"]
TEXT = b"".join(PIECES).decode()


@pytest.fixture(scope="module")
def speller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model that spells `TEXT`, byte by byte where it hurts."""
    pieces = [b"start", *PIECES]
    folder = tiny.write(tmp_path_factory.mktemp("speller"), tiny.successor_weights(), first_pieces=pieces)
    with LLM(folder, device="reference", max_model_len=64, num_kv_blocks=64) as llm:
        yield llm


def greedy(max_tokens: int = len(PIECES)) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def by_prompt(outputs: Iterator[StreamOutput], count: int) -> list[list[StreamOutput]]:
    sorted_outputs: list[list[StreamOutput]] = [[] for _ in range(count)]
    for output in outputs:
        sorted_outputs[output.index].append(output)
    return sorted_outputs


@pytest.mark.parametrize("count", [1, 8])
def test_no_piece_of_a_stream_ends_inside_a_character(speller: LLM, count: int) -> None:
    [plain] = speller.generate([[0]], greedy(), use_tqdm=False)
    assert plain.outputs[0].text == TEXT
    for outputs in by_prompt(speller.stream([[0]] * count, greedy()), count):
        pieces = [output.text for output in outputs]
        assert pieces == ["hi", "", "", "😀", "", "", "🦀", "", "日", "", "ď!"]
        assert [token for output in outputs for token in output.token_ids] == plain.outputs[0].token_ids


def test_a_stream_cut_inside_a_character_ends_with_one_replacement(speller: LLM) -> None:
    outputs = list(speller.stream([[0]], greedy(3)))
    assert [output.text for output in outputs] == ["hi", "", "\ufffd"]
    [plain] = speller.generate([[0]], greedy(3), use_tqdm=False)
    assert plain.outputs[0].text == "hi\ufffd" == speller.decode(plain.outputs[0].token_ids)


def test_the_last_output_of_a_stream_says_why_and_when(speller: LLM) -> None:
    *earlier, last = speller.stream([[0]], greedy())
    assert not any(output.finished or output.finish_reason or output.metrics for output in earlier)
    assert (last.finished, last.finish_reason) == (True, "length")
    assert last.metrics is not None
    story = last.metrics
    assert story.scheduled_time is not None and story.first_token_time is not None and story.last_token_time is not None  # noqa: PT018
    assert story.arrival_time <= story.scheduled_time <= story.first_token_time <= story.last_token_time


def test_the_token_that_stops_is_in_the_ids_and_not_in_the_text(speller: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, stop_token_ids=[5])
    [output] = speller.generate([[0]], params, use_tqdm=False)
    completion = output.outputs[0]
    assert completion.token_ids == [1, 2, 3, 4, 5]
    assert completion.text == "hi😀\ufffd"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", 5)


def test_without_detokenize_there_is_no_text(speller: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    [output] = speller.generate([[0]], params, use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [1, 2, 3, 4])


def test_control_tokens_give_text_only_when_they_are_not_skipped(speller: LLM) -> None:
    for skip, expected in [(True, ""), (False, "<|endoftext|><|im_start|>")]:
        params = SamplingParams(temperature=0, max_tokens=2, skip_special_tokens=skip)
        [output] = speller.generate([[508]], params, use_tqdm=False)
        assert output.outputs[0].text == expected


def test_the_continuations_of_a_prompt_stream_side_by_side(speller: LLM) -> None:
    params = SamplingParams(n=3, temperature=0, max_tokens=len(PIECES))
    outputs = list(speller.stream([[0], [0]], params))
    for index in range(2):
        for choice in range(3):
            own = [output for output in outputs if (output.index, output.choice) == (index, choice)]
            assert [output.text for output in own] == ["hi", "", "", "😀", "", "", "🦀", "", "日", "", "ď!"]
            assert [output.finished for output in own] == [False] * (len(own) - 1) + [True]
    # The continuations part after the prompt, whose last token gives each its first.
    [plain] = speller.generate([[0]], params, use_tqdm=False)
    assert [choice.text for choice in plain.outputs] == [TEXT] * 3


def test_a_wrong_prompt_is_refused_by_the_call_and_not_by_the_first_step(speller: LLM) -> None:
    with pytest.raises(InvalidRequest):
        speller.stream([[]], greedy())


@pytest.mark.parametrize("read_first", [False, True])
def test_dropping_a_stream_ends_its_requests(successor: LLM, read_first: bool) -> None:
    stream = successor.stream([[0]] * 3, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    if read_first:
        next(stream)
    del stream
    # Only what was submitted before counts, so the request behind it sees the engine without the others.
    successor.generate([[0]], greedy(1), use_tqdm=False)
    metrics = successor.get_metrics()
    assert (metrics.running, metrics.waiting, metrics.kv_blocks_free) == (0, 0, metrics.kv_blocks_total)


@pytest.mark.parametrize("read_first", [False, True])
def test_closing_a_stream_ends_its_requests_and_the_stream(successor: LLM, read_first: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    for kind in ("prompts", "chat"):
        stream = (
            successor.stream([[0]] * 3, params)
            if kind == "prompts"
            else successor.stream_chat([{"role": "user", "content": "x"}], params)
        )
        if read_first:
            next(stream)
        stream.close()
        successor.generate([[0]], greedy(1), use_tqdm=False)
        metrics = successor.get_metrics()
        assert (metrics.running, metrics.waiting, metrics.kv_blocks_free) == (0, 0, metrics.kv_blocks_total)
        assert list(stream) == []
        stream.close()


def test_closing_the_engine_ends_a_stream_with_an_error(successor_folder: Path) -> None:
    llm = LLM(successor_folder, device="reference", max_model_len=512)
    stream = llm.stream([[0]], SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))
    next(stream)
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        list(stream)


def test_a_vocabulary_without_bytes_of_its_own_streams_whole_characters_too(tmp_path: Path) -> None:
    pieces = [
        "\u2581a",
        "\u2581",
        "b",
        "<0xF0>",
        "<0x9F>",
        "<0xA6>",
        "<0x80>",
        "c",
        "\u2581d",
        "<0xC4>",
        "<0x8F>",
        "<0xFF>",
    ]
    vocabulary = {piece: at for at, piece in enumerate(["<unk>", *pieces])}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    built.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder = tiny.write(tmp_path, tiny.successor_weights())
    built.save(str(folder / "tokenizer.json"))
    with LLM(folder, device="reference", max_model_len=64) as llm:
        outputs = list(llm.stream([[0]], greedy(12)))
        assert [output.text for output in outputs] == [" a", " ", "b", "", "", "", "🦀", "c", " d", "", "ď", "\ufffd"]
        assert "<unk>" + "".join(output.text for output in outputs[:-1]) == built.decode(list(range(12)))
