"""Text as the continuation of its prompt, whole character by whole character, on every kind of vocabulary."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

import tiny
from octavo import LLM, AsyncLLM, RequestOutputKind, SamplingParams, StructuredOutputsParams
from streams import closed_at_the_end, read

REPLACEMENT = "\ufffd"
# Four characters that the vocabulary of SmolLM2 spells in 3, 3, 2 and 2 tokens when they stand alone.
MIXED = "hi\U0001f600\U0001f980\u65e5\u010f"


def forced(text: str, **fields: object) -> SamplingParams:
    """Parameters with which a model has no choice but to write `text`."""
    form = StructuredOutputsParams(regex=re.escape(text))
    return SamplingParams(**({"temperature": 0, "max_tokens": 40, "structured_outputs": form} | fields))  # type: ignore[arg-type]


def assert_whole(pieces: Sequence[str], text: str) -> None:
    """The pieces are the text, and none of them ends inside a character or waits for what comes after it."""
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)
    for piece in pieces:
        piece.encode()
    first = next(at for at, piece in enumerate(pieces) if piece.endswith("i"))
    assert "".join(pieces[: first + 1]) == "hi", "plain text comes before what follows it is complete"


@pytest.mark.parametrize("count", [1, 8])
def test_no_stream_of_the_model_shows_a_broken_character(smollm2: LLM, count: int) -> None:
    [plain] = smollm2.generate(["x"], forced(MIXED), use_tqdm=False)
    assert plain.outputs[0].text == MIXED
    pieces: list[list[str]] = [[] for _ in range(count)]
    for output in smollm2.stream(["x"] * count, forced(MIXED)):
        pieces[output.index].append(output.text)
    for own in pieces:
        assert_whole(own, MIXED)


@pytest.mark.parametrize("count", [1, 8])
def test_no_async_stream_of_the_model_shows_a_broken_character(smollm2_file: Path, count: int) -> None:
    params = forced(MIXED, output_kind=RequestOutputKind.DELTA)

    async def run(llm: AsyncLLM) -> list[list[str]]:
        async def pieces() -> list[str]:
            return [output.outputs[0].text for output in await read(llm.generate("x", params)) if output.outputs]

        return await asyncio.gather(*(pieces() for _ in range(count)))

    with closed_at_the_end(AsyncLLM(smollm2_file, max_model_len=256, num_kv_blocks=128)) as llm:
        for own in asyncio.run(run(llm)):
            assert_whole(own, MIXED)


@pytest.mark.parametrize("seed", range(3))
def test_characters_come_whole_however_they_are_split(smollm2: LLM, seed: int) -> None:
    """At this temperature all tokens that fit are about as likely, single bytes too."""
    text = "e\u0301 \U0001f469\u200d\U0001f9b0 \u4f60\u597d\u0440\u0443\u0441 \u0928\u093f"
    pieces = [output.text for output in smollm2.stream(["x"], forced(text, temperature=50, seed=seed, max_tokens=120))]
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_the_text_follows_the_prompt(smollm2: LLM) -> None:
    [output] = smollm2.generate(["The capital of France is"], SamplingParams(temperature=0), use_tqdm=False)
    whole = smollm2.decode([*output.prompt_token_ids, *output.outputs[0].token_ids])
    assert whole == "The capital of France is" + output.outputs[0].text


def generated(llm: LLM, prompt: list[int], params: SamplingParams) -> str:
    """The text of an output, which a stream gives too."""
    [plain] = llm.generate([prompt], params, use_tqdm=False)
    assert "".join(output.text for output in llm.stream([prompt], params)) == plain.outputs[0].text
    return plain.outputs[0].text


def test_a_character_that_the_prompt_begins_comes_whole_or_not_at_all(tmp_path: Path) -> None:
    """Token t is followed by t + 1."""
    pieces = [b"start", b"a\xf0\x9f", b"\xa6", b"\x80!", b"\xe6\x97", b"b", b"\xe6", b"\xc4", b"\x8f", b"\x9f\x98"]
    folder = tiny.write(tmp_path, tiny.successor_weights(), first_pieces=pieces)
    with LLM(folder, device="reference", max_model_len=64) as llm:

        def text(prompt: list[int], max_tokens: int) -> str:
            return generated(llm, prompt, SamplingParams(temperature=0, max_tokens=max_tokens))

        assert text([1], 2) == "\U0001f980!"
        assert [output.text for output in llm.stream([[1]], SamplingParams(temperature=0, max_tokens=2))] == [
            "",
            "\U0001f980!",
        ]
        assert text([1, 2], 1) == "\U0001f980!"[0:2]
        # What follows completes nothing, and what is broken is the prompt's.
        assert text([0, 4], 1) == "b"
        assert text([1], 1) == ""
        # The output's own beginning is the output's.
        assert text([0, 6], 2) == "\u010f"
        assert text([0, 6], 1) == REPLACEMENT


def sentencepiece(pieces: Sequence[str]) -> Tokenizer:
    """Each piece is a token; a space stands before a word, and the first of a text is none."""
    vocabulary = {piece: at for at, piece in enumerate(["<unk>", *pieces])}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    built.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return built


def test_with_pieces_that_carry_their_space_the_first_word_keeps_it(tmp_path: Path) -> None:
    pieces = ["\u2581one", "\u2581two", "<0xF0>", "<0x9F>", "<0xA6>", "<0x80>", "\u2581three", "<0xC4>", "\u2581four"]
    built = sentencepiece(pieces)
    folder = tiny.write(tmp_path, tiny.successor_weights())
    built.save(str(folder / "tokenizer.json"))
    with LLM(folder, device="reference", max_model_len=64) as llm:
        everything = list(range(1, 8))
        for prompt_len in (1, 2, 6):
            prompt = everything[:prompt_len]
            text = generated(llm, prompt, SamplingParams(temperature=0, max_tokens=7 - prompt_len))
            assert built.decode(prompt) + text == built.decode(everything) == "one two\U0001f980 three"
        # Inside the character, which then comes whole.
        for prompt_len in (3, 4, 5):
            prompt = everything[:prompt_len]
            text = generated(llm, prompt, SamplingParams(temperature=0, max_tokens=7 - prompt_len))
            assert text == "\U0001f980 three"
        # What the prompt leaves broken gives nothing.
        assert generated(llm, [1, 8], SamplingParams(temperature=0, max_tokens=1)) == " four"


@pytest.mark.parametrize("prompt", ["One, two, three", "caf\u00e9 \U0001f600", ""])
def test_with_or_without_streaming_the_text_is_the_same(smollm2: LLM, prompt: str) -> None:
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=48, ignore_eos=True)
    ids = smollm2.encode(prompt) or [1]
    generated(smollm2, ids, params)
    generated(smollm2, ids, SamplingParams(temperature=1.5, seed=3, max_tokens=48, skip_special_tokens=False))


def test_a_greedy_output_ends_at_whichever_of_its_tokens_is_declared_to_stop_it(smollm2: LLM) -> None:
    prompt = "The three primary colours are"
    params = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
    whole = smollm2.generate([prompt], SamplingParams(**params), use_tqdm=False)[0].outputs[0].token_ids  # type: ignore[arg-type]
    places = [at for at in range(1, 7) if whole[at] not in whole[:at]]
    assert len(places) >= 4
    for at in places:
        stopping = SamplingParams(stop_token_ids=[whole[at]], **params)  # type: ignore[arg-type]
        completion = smollm2.generate([prompt], stopping, use_tqdm=False)[0].outputs[0]
        assert completion.token_ids == whole[: at + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", whole[at])
        before = smollm2.get_metrics().generation_tokens
        outputs = list(smollm2.stream([prompt], stopping))
        assert [token for output in outputs for token in output.token_ids] == whole[: at + 1]
        assert "".join(output.text for output in outputs) == completion.text == smollm2.decode(whole[:at])
        assert [output.finished for output in outputs] == [False] * at + [True]
        assert smollm2.get_metrics().generation_tokens - before == at + 1
