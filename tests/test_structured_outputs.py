"""Structured outputs: what is taken and refused, and that outputs follow their form."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import pytest
from jsonschema.validators import Draft202012Validator, validator_for

from calls import assert_alive
from octavo import LLM, AsyncLLM, InvalidRequest, SamplingParams, StructuredOutputsParams
from structured import SCHEMAS, follows, share_that_stops, texts_of_schemas

PROMPT = "Some JSON:\n"

# Wrong in itself, without end, or without bounds.
BAD_SCHEMAS: list[dict[str, Any]] = [
    {"type": "strng"},
    {"$ref": "#/$defs/none"},
    {"$ref": "#"},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    {"type": "array", "maxItems": 10**9},
    {"type": "array", "uniqueItems": True},
    {"type": "string", "pattern": "("},
    {"type": "integer", "minimum": 2, "maximum": 1},
    {"type": "object", "minProperties": 2},
    {"type": "object", "oneOf": [{"required": ["a"]}, {"properties": {"b": {"type": "integer"}}}]},
]
BAD_PATTERNS = ["(", "[a", "(a{1000}){1000}", "(?=a)b", r"(a)\1"]


def form(**fields: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**fields)


def texts(llm: LLM, structured: StructuredOutputsParams, **fields: Any) -> list[tuple[str, str | None]]:
    """Text and finish reason of every answer."""
    params = SamplingParams(structured_outputs=structured, **fields)
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    return [(completion.text, completion.finish_reason) for completion in output.outputs]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "structured_outputs: found none, expected exactly one of json, json_object, regex, choice, grammar"),
        ({"json": "{}", "regex": "a"}, "structured_outputs: found json and regex, expected exactly one"),
        ({"json_object": False}, "structured_outputs: found none"),
        ({"json": 5}, "structured_outputs.json: found 5, expected a JSON schema"),
        ({"json": ""}, "structured_outputs.json: found ''"),
        ({"json": {"a": float("nan")}}, "structured_outputs.json: found {'a': nan}"),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json: found {'a': {1, 2}}"),
        ({"json": "\ud800"}, "structured_outputs.json: found '\\ud800', expected a JSON schema"),
        ({"json_object": 1}, "structured_outputs.json_object: found 1, expected True, False or None"),
        ({"regex": b"a"}, "structured_outputs.regex: found b'a'"),
        ({"regex": ""}, "structured_outputs.regex: found ''"),
        ({"choice": []}, "structured_outputs.choice: found [], expected a list of at least one text"),
        ({"choice": "ab"}, "structured_outputs.choice: found 'ab', expected a list"),
        ({"choice": ["a", ""]}, "structured_outputs.choice[1]: found '', expected a text"),
        ({"choice": ["a", 5]}, "structured_outputs.choice[1]: found 5, expected a text"),
        ({"grammar": ""}, "structured_outputs.grammar: found ''"),
        ({"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern is not available"),
        ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace is not available"),
        ({"json": {}, "structural_tag": "x"}, "structured_outputs.structural_tag is not available"),
    ],
    ids=str,
)
def test_a_form_that_is_none_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(message)):
        form(**fields)


def test_a_form_is_kept_as_it_was_when_it_was_given() -> None:
    schema: dict[str, Any] = {"type": "null"}
    kept = form(json=schema)
    schema["type"] = "strng"
    assert kept == form(json={"type": "null"}) == form(json='{"type": "null"}')
    assert form(choice=["a", "b"]).choice == ("a", "b")
    assert len({kept, form(json={"type": "null"}), form(regex="a")}) == 2


@pytest.mark.parametrize(("schema", "right", "wrong"), list(texts_of_schemas()))
def test_what_tests_of_grammars_call_right_is_right(schema: str, right: list[str], wrong: list[str]) -> None:
    known = json.loads(schema)
    validator_for(known, default=Draft202012Validator).check_schema(known)
    assert all(follows(text, known) for text in right)
    assert right
    assert wrong


@pytest.mark.parametrize(
    ("structured", "place"),
    [(form(json=schema), "structured_outputs.json: at ") for schema in BAD_SCHEMAS]
    + [(form(regex=pattern), "structured_outputs.regex: ") for pattern in BAD_PATTERNS]
    + [
        (form(json="{"), "structured_outputs.json: the schema is no JSON text"),
        (form(json="x" * 300_000), "structured_outputs.json: found 300000 bytes"),
        (form(grammar="start: none"), "structured_outputs.grammar: at 1("),
        (form(choice=["a" * 300_000]), "structured_outputs.choice: found 300000 bytes"),
    ],
    ids=lambda value: str(value)[:80],
)
def test_a_bad_form_is_refused_soon_beside_a_running_request(
    successor: LLM, structured: StructuredOutputsParams, place: str
) -> None:
    stream = successor.stream([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=48, ignore_eos=True))
    tokens = next(stream).token_ids
    begun = time.monotonic()
    with pytest.raises(InvalidRequest, match=re.escape(f"prompt 0: {place}")):
        successor.generate([[5]], SamplingParams(structured_outputs=structured), use_tqdm=False)
    assert time.monotonic() - begun < 4
    tokens += [token for output in stream for token in output.token_ids]
    assert tokens == list(range(4, 52))
    assert_alive(successor)


def test_blank_space_and_digits_do_not_run_on_without_end(smollm2: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    digits = {smollm2.encode("7")[0]: 30.0}
    blanks = dict.fromkeys((216, 198, 1116), 30.0)
    assert [smollm2.decode([token]) for token in blanks] == [" ", "\n", "\n\n"]
    for bias in (blanks, digits, {}):
        for structured in (form(json=schema), form(json_object=True)):
            [(text, reason)] = texts(smollm2, structured, temperature=0, max_tokens=40, logit_bias=bias)
            if structured.json is None and reason != "stop":
                continue  # An object of any kind may be longer than that.
            assert reason == "stop"
            value = json.loads(text)
            assert isinstance(value, dict)
            assert structured.json is None or list(value) == ["a"]


@pytest.mark.parametrize(
    ("structured", "fits"),
    [
        (form(choice=["positive", "negative", "neutral"]), lambda text: text in {"positive", "negative", "neutral"}),
        (form(choice=["a", "ab", "abc"]), lambda text: text in {"a", "ab", "abc"}),
        (form(regex=r"\d{3}-\d{4}"), lambda text: re.fullmatch(r"\d{3}-\d{4}", text)),
        (form(regex="^[a-z]{2,5}(é|日)$"), lambda text: re.fullmatch("[a-z]{2,5}(é|日)", text)),
        (form(json={"enum": ["x y", 5, None]}), lambda text: json.loads(text) in ["x y", 5, None]),
        (
            form(grammar='start: "(" WORD ("," WORD)~1..3 ")"\nWORD: /[a-z]{1,6}/'),
            re.compile(r"\([a-z]+(,[a-z]+){1,3}\)").fullmatch,
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_every_answer_follows_its_form_and_ends_with_it(
    smollm2: LLM, structured: StructuredOutputsParams, fits: Any
) -> None:
    for temperature in (0, 1.5):
        for text, reason in texts(smollm2, structured, temperature=temperature, seed=5, n=3, max_tokens=64):
            assert reason == "stop"
            assert fits(text)


@pytest.mark.parametrize("name", SCHEMAS)
def test_hot_outputs_follow_schemas_of_many_kinds(smollm2: LLM, name: str) -> None:
    assert share_that_stops(smollm2, SCHEMAS[name], 5) >= 0.6


def test_other_bounds_hold_beside_a_form(smollm2: LLM) -> None:
    word = form(regex="[a-z]+")
    [(text, reason)] = texts(smollm2, word, temperature=0, min_tokens=12, max_tokens=12)
    assert reason == "length"
    assert re.fullmatch("[a-z]+", text)
    # Where a form has come to its end there is nothing else than that, whatever is asked.
    for fields in ({"min_tokens": 20}, {"ignore_eos": True}, {"logit_bias": {2: -100.0}}):
        assert texts(smollm2, form(choice=["yes"]), temperature=0, max_tokens=20, **fields) == [("yes", "stop")]
    letters = [smollm2.encode(letter)[0] for letter in "xyz"]
    [(text, _)] = texts(smollm2, word, temperature=1.0, seed=1, max_tokens=12, allowed_token_ids=letters)
    assert set(text) <= set("xyz")
    [(text, _)] = texts(smollm2, word, temperature=0, max_tokens=12, stop=["e"])
    assert "e" not in text


def test_a_form_without_a_way_ends_in_an_error_and_leaves_others_alone(successor: LLM) -> None:
    impossible = SamplingParams(structured_outputs=form(regex="[a-c]+"), allowed_token_ids=[68], max_tokens=20)
    good = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first, second = successor.generate([[5], [1, 2, 3]], [impossible, good], use_tqdm=False)
    assert first.outputs[0].finish_reason == "error"
    assert second.outputs[0].token_ids == [4, 5, 6, 7, 8, 9, 10, 11]
    assert_alive(successor)


def test_a_stream_gives_what_a_call_gives(smollm2: LLM) -> None:
    params = SamplingParams(
        temperature=1.2, seed=11, n=3, max_tokens=80, structured_outputs=form(json=SCHEMAS["nested"])
    )
    [whole] = smollm2.generate([PROMPT], params, use_tqdm=False)
    streamed: dict[int, str] = dict.fromkeys(range(3), "")
    for output in smollm2.stream([PROMPT], params):
        streamed[output.choice] += output.text
    assert streamed == {completion.index: completion.text for completion in whole.outputs}
    [alone] = smollm2.generate(
        [PROMPT],
        SamplingParams(temperature=1.2, seed=11, max_tokens=80, structured_outputs=form(json=SCHEMAS["nested"])),
        use_tqdm=False,
    )
    assert alone.outputs[0].token_ids == whole.outputs[0].token_ids


def test_neighbours_and_their_forms_change_nothing(smollm2: LLM) -> None:
    forms = [form(json=schema) for schema in SCHEMAS.values()] + [form(regex="[0-9]+"), form(choice=["a", "b"])]
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=24, structured_outputs=structured)
        for seed, structured in enumerate(forms)
    ]
    together = smollm2.generate([PROMPT] * len(params), params, use_tqdm=False)
    for one, output in zip(params, together, strict=True):
        [alone] = smollm2.generate([PROMPT], one, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_an_event_loop_gets_the_same(llm: AsyncLLM) -> None:
    async def answer() -> str:
        params = SamplingParams(temperature=0, max_tokens=20, structured_outputs=form(choice=["ab", "cd"]))
        last = None
        async for output in llm.generate([65], params, "one"):
            last = output
        assert last is not None
        return last.outputs[0].text

    async def refused() -> None:
        with pytest.raises(InvalidRequest, match=r"structured_outputs\.regex"):
            async for _ in llm.generate([65], SamplingParams(structured_outputs=form(regex="(")), "two"):
                pass

    async def both() -> str:
        await refused()
        return await answer()

    assert asyncio.run(both()) in {"ab", "cd"}
