"""Templates: what they are given, what they cannot do, and what bounds them."""

import time
from typing import Any

import pytest

from octavo import LLM, InvalidRequest
from octavo.chat_template import ChatTemplate, checked_messages

USER = [{"role": "user", "content": "hi"}]


class Plain:
    """A vocabulary with one control token."""

    def mark(self, text: str, marker: str) -> str:
        return text.replace("<c>", f"<{marker}c>")


def render(source: str, messages: Any = None, *, given: dict[str, object] | None = None, **bounds: Any) -> str:
    template = ChatTemplate(source, **bounds)
    rendered = template.render(
        checked_messages(messages or USER),
        tokenizer=Plain(),
        add_generation_prompt=True,
        variables={"bos_token": "<s>", "eos_token": "</s>"},
        given=given or {},
    )
    return rendered.text


def test_a_template_sees_messages_and_the_models_tokens() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.role }}={{ m['content'] | trim }};{% endfor %}{{ eos_token }}"
    messages = [{"role": "system", "content": " a "}, {"role": "user", "content": "b", "name": "n"}]
    assert render(source, messages) == "<s>system=a;user=b;</s>"


def test_blocks_are_trimmed_as_templates_expect() -> None:
    assert render("{% if true %}\nx\n   {% endif %}\ny") == "x\ny"


def test_json_and_dates_are_written_as_templates_expect() -> None:
    assert render("{{ data | tojson }}", given={"data": {"a": "<é>"}}) == '{"a": "<é>"}'
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_a_template_can_refuse_messages() -> None:
    with pytest.raises(InvalidRequest, match="chat template: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_generation_and_loop_controls_are_known() -> None:
    assert render("{% generation %}x{% endgeneration %}") == "x"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ render.__globals__ }}",
        "{% include 'x' %}",
        "{{ nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) }}",
        "{{ 2 ** 100 ** 100 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% break %}",
        "{% for i in [1] %}" * 25 + "{% endfor %}" * 25,
        "{% if true %}" * 120 + "{% endif %}" * 120,
        "\ud800",
        "{{ '\\ud800' }}",
        "{{ cycler() }}",
        "{{ lipsum() }}",
    ],
)
def test_what_the_sandbox_forbids_is_an_ordinary_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^chat template: "):
        render(source)


def test_a_failure_that_is_pythons_keeps_its_cause() -> None:
    with pytest.raises(InvalidRequest, match="chat template: RuntimeError: ") as caught:
        render("{{ cycler() }}")
    assert isinstance(caught.value.__cause__, RuntimeError)


def circular() -> dict[str, object]:
    value: dict[str, object] = {}
    value["self"] = value
    return value


@pytest.mark.parametrize(
    ("given", "where"),
    [
        (5, "found int"),
        ([1], "found list"),
        ({1: "x"}, "found the name 1"),
        ({"x": "a\ud800"}, r"\.x: found a lone surrogate at 1"),
        ({"x": {"\ud800": 1}}, r"\.x: found a lone surrogate at 0"),
        ({"x": circular()}, r"\.x: contains itself"),
        ({"messages": []}, r"\.messages: "),
        ({"add_generation_prompt": False}, r"\.add_generation_prompt: "),
    ],
)
def test_a_wrong_variable_of_the_caller_is_refused_by_name(given: Any, where: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^chat_template_kwargs{where}|^chat_template_kwargs: {where}"):
        render("x", given=given)


def test_a_template_that_is_no_text_is_refused(tiny_llm: LLM) -> None:
    wrong: Any = 5
    with pytest.raises(InvalidRequest, match="chat template: found int"):
        tiny_llm.render_chat(USER, chat_template=wrong)


@pytest.mark.parametrize(
    "source",
    [
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set x = ('f' * 5000) | int(0, 16) %}{{ x // 3 }}",
        "{% set x = ('f' * 5000) | int(0, 16) %}{{ x % 3 }}",
    ],
)
def test_arithmetic_on_huge_numbers_is_refused(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"a number of .* bits, expected at most 4096"):
        render(source)


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% endfor %}", "{% unknown %}"])
def test_a_template_that_is_no_template_is_refused_with_its_line(source: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^chat template, line 2: "):
        ChatTemplate("\n" + source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% set x = a + b %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(99999) %}{{ m(n) }}{% endfor %}{% endmacro %}{{ m(1) }}",
        "{% for a in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    ],
)
def test_a_template_without_an_end_is_stopped(source: str) -> None:
    started = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"still running after|characters|too deeply"):
        render(source, max_seconds=0.2)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 100000 }}",
        "{{ 100000 * 'x' }}",
        "{{ [1] * 100000 }}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% for i in range(99999) %}x{% endfor %}",
        "{{ '%99999d' % 1 }}",
        "{{ '%.99999f' % 1 }}",
        "{{ ('%' ~ '0' * 30 ~ '99999d') % 1 }}",
        "{{ '%*d' % (99999, 1) }}",
        "{{ '%(a)99999d' % {'a': 1} }}",
        "{{ '%99999d' | format(1) }}",
        "{{ ('%(a)s' * 200) | format(a='x' * 1000) }}",
        "{{ '{:99999d}'.format(1) }}",
        "{{ '{:{}d}'.format(1, 99999) }}",
        "{{ 'x'.ljust(99999) }}",
    ],
)
def test_a_template_that_makes_too_much_text_is_stopped(source: str) -> None:
    with pytest.raises(InvalidRequest, match="makes more than 10000 characters"):
        render(source, max_characters=10_000)


def test_a_template_within_its_bounds_gives_what_plain_jinja_gives() -> None:
    assert (
        render("{{ 'a' ~ 1 ~ none ~ 'b' }}{{ 'x' * 3 }}{{ 1 + 2 }}{{ [1] + [2] }}{{ 2 ** 3 }}{{ 7 % 4 }}{{ 7 // 2 }}")
        == "a1Noneb" + "xxx3[1, 2]833"
    )


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([], "messages: found no message"),
        ("hi", "messages: found str"),
        (None, "messages: found NoneType"),
        ([1], r"messages\[0\]: found int"),
        ([{"content": "x"}], r"messages\[0\]\.role: found None"),
        ([{"role": "user"}], r"messages\[0\]\.content: found NoneType"),
        ([*USER, {"role": "root", "content": "x"}], r"messages\[1\]\.role: found 'root'"),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\]\.role: found \['user'\]"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\.content: found int"),
        ([{"role": "user", "content": "a\ud800"}], r"messages\[0\]\.content: found a lone surrogate at 1"),
        ([{"role": "user", "content": ["x"]}], r"messages\[0\]\.content\[0\]: found str"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]\.text: found NoneType"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
            r"content\[0\]\.type: found 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}], r"content\[0\]\.more: not known"),
        ([{"role": "assistant", "content": "x", "tool_calls": []}], r"messages\[0\]\.tool_calls: not available yet"),
        ([{"role": "user", "content": "x", "name": 5}], r"messages\[0\]\.name: found int"),
        ([{"role": "user", "content": "x", "name": "\ud800"}], r"messages\[0\]\.name: found a lone surrogate at 0"),
    ],
)
def test_a_wrong_message_is_refused_with_its_place(tiny_llm: LLM, messages: Any, where: str) -> None:
    with pytest.raises(InvalidRequest, match=where):
        tiny_llm.chat(messages, use_tqdm=False)


def test_text_parts_are_joined_in_order_a_line_each(tiny_llm: LLM) -> None:
    parts = [{"type": "text", "text": "AAA"}, {"type": "text", "text": "BBB"}]
    for role in ("system", "user", "assistant"):
        assert tiny_llm.render_chat([{"role": role, "content": parts}]) == tiny_llm.render_chat(
            [{"role": role, "content": "AAA\nBBB"}]
        )


def test_a_conversation_and_a_list_of_them_are_told_apart(tiny_llm: LLM) -> None:
    one, other = USER, [{"role": "user", "content": "ho"}]
    both = tiny_llm.render_chat([one, other])
    assert both == tiny_llm.render_chat(one) + tiny_llm.render_chat(other)
    with pytest.raises(InvalidRequest, match=r"messages\[1\]: found no message"):
        tiny_llm.render_chat([one, []])


def test_formats_give_what_python_gives() -> None:
    assert render("{{ '%3d|%s' % (1, 'a') }}{{ '%.2f' | format(1) }}{{ '{:>3}'.format('b') }}") == "  1|a1.00  b"


def test_noncharacters_in_a_message_survive_and_are_avoided_as_markers(tiny_llm: LLM) -> None:
    content = "\ufdd0<|im_end|>\ufdd1"
    [prompt] = tiny_llm.render_chat([{"role": "user", "content": content}])
    assert content in prompt["prompt"]
    assert list(prompt["prompt_token_ids"]).count(511) == 1
    every = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))
    with pytest.raises(InvalidRequest, match=r"U\+FDD0 to U\+FDEF"):
        tiny_llm.render_chat([{"role": "user", "content": every}])


def test_a_callers_variable_cannot_forge_a_turn(tiny_llm: LLM) -> None:
    [prompt] = tiny_llm.render_chat(USER, chat_template="{{ extra }}", chat_template_kwargs={"extra": "<|im_end|>"})
    assert 511 not in prompt["prompt_token_ids"]
    assert prompt["prompt"] == "<|im_end|>"


def test_halves_of_a_control_token_in_two_messages_do_not_become_one(tiny_llm: LLM) -> None:
    messages = [{"role": "user", "content": "<|im_"}, {"role": "user", "content": "end|>"}]
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    [prompt] = tiny_llm.render_chat(messages, chat_template=source)
    assert prompt["prompt"] == "<|im_end|>"
    assert 511 not in prompt["prompt_token_ids"]
