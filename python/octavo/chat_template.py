"""Messages to a prompt, by the model's own template.

A template is a program that comes with a checkpoint; `octavo.template_sandbox` runs it.

Text in a message stays text. Every spelling of a control token in a message is broken with a marker before the template
is rendered, and the marker is taken out again when the result is encoded; see `crates/octavo-py/src/tokenizer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from octavo.checks import flag
from octavo.errors import InvalidRequest
from octavo.messages import Tool, checked_text, checked_tools, each_text, plain
from octavo.shown import shown

if TYPE_CHECKING:
    import jinja2

    from octavo.template_sandbox import TemplateSandbox

MAX_SECONDS = 5.0
"""How long a template may run."""
MAX_CHARACTERS = 1 << 24
"""How long a prompt may become, and any text or list on the way."""

_OWN_NAMES = ("messages", "tools", "add_generation_prompt")
# Unicode sets these aside for internal use: no text that is interchanged has one.
_MARKERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class Marking(Protocol):
    """The part of a tokenizer that chat needs."""

    def mark(self, text: str, marker: str) -> str:
        """`text` with the marker wherever it could become a control token."""


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How a conversation becomes a prompt, as callers of `chat` say it."""

    add_generation_prompt: bool = True
    """End with what an answer begins with."""
    continue_final_message: bool = False
    """End with the last message's content, for the model to go on with it."""
    tools: Sequence[Tool] | None = None
    """What the model may call, as OpenAI's clients describe it."""
    chat_template: str | None = None
    """A template to use instead of the model's."""
    chat_template_kwargs: Mapping[str, object] | None = None
    """Further variables for the template."""

    def __post_init__(self) -> None:
        """Check what does not depend on the messages."""
        flag("add_generation_prompt", self.add_generation_prompt)
        if flag("continue_final_message", self.continue_final_message) and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message: found together with add_generation_prompt, expected one of them: "
                "a prompt ends in the last message, or in what a new one begins with"
            )


@dataclass(frozen=True)
class RenderedChat:
    """A prompt in which message text is marked."""

    marked: str
    marker: str

    @property
    def text(self) -> str:
        """The prompt as it reads."""
        return self.marked.replace(self.marker, "")


class ChatTemplate:
    """A compiled template; may be used from several threads at once."""

    def __init__(self, source: str, *, max_seconds: float = MAX_SECONDS, max_characters: int = MAX_CHARACTERS) -> None:
        """Compile `source`, or raise `InvalidRequest` with the line that is wrong."""
        if not isinstance(source, str):
            raise InvalidRequest(f"chat template: found {type(source).__name__}, expected a text")
        # Only who chats waits for these.
        import jinja2
        import jinja2.meta

        from octavo.template_sandbox import TemplateSandbox

        self.source = checked_text(source, "chat template")
        self._sandbox: TemplateSandbox = TemplateSandbox(max_seconds=max_seconds, max_characters=max_characters)
        try:
            self._template: jinja2.Template = self._sandbox.from_string(source)
            self._knows_tool_calls = "tool_calls" in source
            self._knows_tools = "tools" in jinja2.meta.find_undeclared_variables(self._sandbox.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(f"chat template, line {error.lineno}: {error.message}") from error
        except RecursionError:
            raise InvalidRequest("chat template: nested too deeply") from None
        except Exception as error:
            # The template becomes a Python program, and Python's compiler has limits and rules of its own.
            raise InvalidRequest(f"chat template: {type(error).__name__}: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tokenizer: Marking,
        options: ChatOptions,
        variables: Mapping[str, object],
    ) -> RenderedChat:
        """Render checked messages.

        `variables` are the model's own. Messages, tools and the caller's variables stay text.
        """
        given = _checked_variables({} if options.chat_template_kwargs is None else options.chat_template_kwargs)
        tools = checked_tools(options.tools)
        if tools and not self._knows_tools:
            raise InvalidRequest("tools: the chat template has no place for them, expected none, or another template")
        for index, message in enumerate(messages):
            if "tool_calls" in message and not self._knows_tool_calls:
                raise InvalidRequest(
                    f"messages[{index}].tool_calls: the chat template has no place for them, expected none, or another "
                    "template"
                )
        marker, end = self._free_markers(messages, tools, given)

        def mark(text: str) -> str:
            return tokenizer.mark(text, marker)

        marked_messages = each_text(messages, mark)
        if options.continue_final_message:
            _close(marked_messages, end)
        context = {
            **variables,
            **{name: each_text(value, mark) for name, value in given.items()},
            "messages": marked_messages,
            "tools": each_text(tools, mark),
            "add_generation_prompt": options.add_generation_prompt,
        }
        # A template can make what no text may have, from an escape or from a number.
        marked = checked_text(self._sandbox.run(self._template, context), "chat template: its result")
        return RenderedChat(_cut(marked, end) if options.continue_final_message else marked, marker)

    def _free_markers(self, *values: object) -> tuple[str, str]:
        """One for control tokens and one for the end of a content: neither is in what is rendered."""
        taken: set[str] = set()

        def note(text: str) -> str:
            taken.update(set(text).intersection(_MARKERS))
            return text

        each_text([self.source, *values], note)
        free = [marker for marker in _MARKERS if marker not in taken]
        if len(free) < 2:
            raise InvalidRequest("messages: found all of U+FDD0 to U+FDEF but one, expected two of them to be free")
        return free[0], free[1]


def _close(messages: list[dict[str, Any]], end: str) -> None:
    """Put the mark of its end after the last content. A template that trims contents will take the space away."""
    if not messages[-1]["content"]:
        raise InvalidRequest("messages: found no content in the last one, expected a text to continue")
    messages[-1]["content"] += f"{end} "


def _cut(marked: str, end: str) -> str:
    """The prompt up to the end of the last content, trimmed if the template trims contents."""
    text, found, rest = marked.rpartition(end)
    if not found:
        raise InvalidRequest(
            "continue_final_message: the chat template does not show the last message's content, expected it to"
        )
    return (text if rest.startswith(" ") else text.rstrip()).replace(end, "")


def _checked_variables(given: object) -> dict[str, object]:
    """Copy the caller's variables, or refuse the first one that is wrong."""
    where = "chat_template_kwargs"
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{where}: found {type(given).__name__}, expected an object")
    checked: dict[str, object] = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise InvalidRequest(f"{where}: found the name {shown(name)}, expected a text")
        if name in _OWN_NAMES:
            raise InvalidRequest(f"{where}.{name}: the call itself gives it, expected another name")
        checked[name] = plain(value, f"{where}.{checked_text(name, where)}")
    return checked
