"""Messages to a prompt, by the model's own template.

A template is a program that comes with a checkpoint. It runs in jinja2's immutable sandbox, without access to Python.
What is bounded: the time, looked at with each turn of a loop, each call and each piece of output; the length of the
result; the length of any text or list that `+`, `*`, `~` or a format makes; `range`; the size of whole numbers. What is
not: the time and memory of one single filter, such as `center` with an absurd width.

Text in a message stays text. Every spelling of a control token in a message is broken with a marker before the template
is rendered, and the marker is taken out again when the result is encoded; see `crates/octavo-py/src/tokenizer`.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
from jinja2.visitor import NodeTransformer

from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from jinja2.parser import Parser

Message: TypeAlias = Mapping[str, object]
Conversation: TypeAlias = Sequence[Message]

MAX_SECONDS = 5.0
"""How long a template may run."""
MAX_CHARACTERS = 1 << 24
"""How long a prompt may become, and any text or list on the way."""
MAX_BITS = 4096
"""How large a whole number may become: the time of arithmetic grows with its length."""

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = ("role", "content", "name")
_OWN_NAMES = ("messages", "add_generation_prompt")
# A width or a precision: digits that a conversion, a point or the end of a field follows.
_WIDTH = re.compile(r"([0-9]+)(?=[.a-zA-Z%},_])")
_FORMATS = ("format", "format_map")
_PADDINGS = ("center", "ljust", "rjust", "zfill", "expandtabs")
# Unicode sets these aside for internal use: no text that is interchanged has one.
_MARKERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class Marking(Protocol):
    """The part of a tokenizer that chat needs."""

    def mark(self, text: str, marker: str) -> str:
        """`text` with the marker wherever it could become a control token."""


@dataclass(frozen=True)
class RenderedChat:
    """A prompt in which message text is marked."""

    marked: str
    marker: str

    @property
    def text(self) -> str:
        """The prompt as it reads."""
        return self.marked.replace(self.marker, "")


def checked_messages(messages: object, *, where: str = "messages") -> list[dict[str, str]]:
    """Copy the messages of a conversation, with every content as one text, or refuse the first one that is wrong."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"{where}: found {type(messages).__name__}, expected a list of messages")
    if not messages:
        raise InvalidRequest(f"{where}: found no message, expected at least 1")
    return [_checked_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: object, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where}: found {type(message).__name__}, expected an object with role and content")
    for name in message:
        if name not in _FIELDS:
            raise InvalidRequest(f"{where}.{name}: not available yet, expected one of {', '.join(_FIELDS)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}.role: found {role!r}, expected one of {', '.join(_ROLES)}")
    checked = {"role": role, "content": _checked_content(message.get("content"), f"{where}.content")}
    if "name" in message:
        name = message["name"]
        if not isinstance(name, str):
            raise InvalidRequest(f"{where}.name: found {type(name).__name__}, expected a text")
        checked["name"] = _checked_text(name, f"{where}.name")
    return checked


def _checked_content(content: object, where: str) -> str:
    """Parts of text are joined in order, a line each."""
    if isinstance(content, str):
        return _checked_text(content, where)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f"{where}: found {type(content).__name__}, expected a text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise InvalidRequest(f"{where}[{index}]: found {type(part).__name__}, expected type and text")
        if part.get("type") != "text":
            raise InvalidRequest(f"{where}[{index}].type: found {part.get('type')!r}, expected 'text'")
        if extra := [name for name in part if name not in ("type", "text")]:
            raise InvalidRequest(f"{where}[{index}].{extra[0]}: not known, expected only type and text")
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"{where}[{index}].text: found {type(text).__name__}, expected a text")
        texts.append(_checked_text(text, f"{where}[{index}].text"))
    return "\n".join(texts)


def _checked_text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{where}: found a lone surrogate at {error.start}, expected Unicode text") from None
    return text


class ChatTemplate:
    """A compiled template; may be used from several threads at once."""

    def __init__(self, source: str, *, max_seconds: float = MAX_SECONDS, max_characters: int = MAX_CHARACTERS) -> None:
        """Compile `source`, or raise `InvalidRequest` with the line that is wrong."""
        if not isinstance(source, str):
            raise InvalidRequest(f"chat template: found {type(source).__name__}, expected a text")
        self.source = _checked_text(source, "chat template")
        self._environment = _Environment(max_seconds=max_seconds, max_characters=max_characters)
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidRequest(f"chat template, line {error.lineno}: {error.message}") from error
        except RecursionError:
            raise InvalidRequest("chat template: nested too deeply") from None
        except Exception as error:
            # The template becomes a Python program, and Python's compiler has limits and rules of its own.
            raise InvalidRequest(f"chat template: {type(error).__name__}: {error}") from error

    def render(
        self,
        messages: list[dict[str, str]],
        *,
        tokenizer: Marking,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
        given: Mapping[str, object],
    ) -> RenderedChat:
        """Render checked messages.

        `variables` are the model's own; `given` are the caller's and stay text as messages do.
        """
        given = _checked_variables(given)
        marker = self._free_marker(messages, given)

        def mark(text: str) -> str:
            return tokenizer.mark(text, marker)

        context = {
            **variables,
            **{name: _each_text(value, mark) for name, value in given.items()},
            "messages": _each_text(messages, mark),
            "add_generation_prompt": add_generation_prompt,
        }
        # A template can make what no text may have, from an escape or from a number.
        marked = _checked_text(self._environment.run(self._template, context), "chat template: its result")
        return RenderedChat(marked, marker)

    def _free_marker(self, *values: object) -> str:
        taken: set[str] = set()

        def note(text: str) -> str:
            taken.update(set(text).intersection(_MARKERS))
            return text

        _each_text([self.source, *values], note)
        free = [marker for marker in _MARKERS if marker not in taken]
        if not free:
            raise InvalidRequest("messages: found all of U+FDD0 to U+FDEF, expected one of them to be free")
        return free[0]


def _checked_variables(given: object) -> dict[str, object]:
    """Copy the caller's variables, or refuse the first one that is wrong."""
    where = "chat_template_kwargs"
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{where}: found {type(given).__name__}, expected an object")
    checked: dict[str, object] = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise InvalidRequest(f"{where}: found the name {name!r}, expected a text")
        if name in _OWN_NAMES:
            raise InvalidRequest(f"{where}.{name}: the call itself gives it, expected another name")
        place = f"{where}.{_checked_text(name, where)}"
        try:
            checked[name] = _each_text(value, lambda text, place=place: _checked_text(text, place))  # type: ignore[misc]
        except RecursionError:
            raise InvalidRequest(f"{place}: contains itself, or is nested too deeply") from None
    return checked


def _each_text(value: object, change: Callable[[str], str]) -> Any:
    """A copy of plain data with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_each_text(key, change): _each_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each_text(item, change) for item in value]
    return value


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a clock and a measure."""

    intercepted_binops = frozenset({"+", "*", "**", "//", "%"})

    def __init__(self, *, max_seconds: float, max_characters: int) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
        self._max_seconds = max_seconds
        self._max_characters = max_characters
        self._deadline = threading.local()
        # A call of it makes as much text as its argument says, and no clock is looked at on the way.
        del self.globals["lipsum"]
        self.filters["tojson"] = _to_json
        self.filters["format"] = self._format
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def run(self, template: jinja2.Template, context: Mapping[str, object]) -> str:
        """Render within the bounds."""
        self._deadline.at = time.monotonic() + self._max_seconds
        pieces: list[str] = []
        length = 0
        try:
            for piece in template.generate(context):
                self.octavo_tick()
                length += len(piece)
                self._check_length(length)
                pieces.append(piece)
        except InvalidRequest:
            raise
        except RecursionError:
            raise InvalidRequest("chat template: calls itself too deeply") from None
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"chat template: {error}") from error
        except Exception as error:
            # Whatever a template runs into is the template's fault.
            raise InvalidRequest(f"chat template: {type(error).__name__}: {error}") from error
        return "".join(pieces)

    def octavo_tick(self) -> str:
        """Look at the clock."""
        if time.monotonic() > self._deadline.at:
            raise InvalidRequest(f"chat template: still running after {self._max_seconds:g} s")
        return ""

    def octavo_concat(self, *values: object) -> str:
        """`a ~ b`."""
        texts = [str(value) for value in values]
        self._check_length(sum(map(len, texts)))
        return "".join(texts)

    def _check_length(self, length: int) -> None:
        if length > self._max_characters:
            raise InvalidRequest(f"chat template: makes more than {self._max_characters} characters")

    def call(self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the template."""
        self.octavo_tick()
        method = getattr(function, "__wrapped__", function)
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name in _PADDINGS:
                self._check_length(_sum_of_numbers(args))
            elif name in _FORMATS:
                values = [*args, *kwargs.values()]
                self._check_format(owner, values, places=owner.count("{"), extra=_sum_of_numbers(values))
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result could be huge."""
        if operator == "**" and (abs(left) > 1 << 32 or abs(right) > 64):
            raise InvalidRequest("chat template: a power too large")
        if operator == "%" and isinstance(left, str):
            self._check_percent(left, right)
        elif operator in ("*", "//", "%") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise InvalidRequest(f"chat template: a number of {bits} bits, expected at most {MAX_BITS}")
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self._check_length(len(left) + len(right))
        if operator == "*":
            for sequence, count in ((left, right), (right, left)):
                if hasattr(sequence, "__len__") and isinstance(count, int):
                    self._check_length(len(sequence) * count)
        return super().call_binop(context, operator, left, right)

    def _format(self, value: object, *args: Any, **kwargs: Any) -> str:
        self._check_percent(str(value), kwargs or args)
        return jinja2.filters.do_format(str(value), *args, **kwargs)

    def _check_percent(self, form: str, values: object) -> None:
        """Measure `form % values` before it is made."""
        if isinstance(values, Mapping):
            listed = list(values.values())
        else:
            listed = list(values) if isinstance(values, tuple) else [values]
        widths = _sum_of_numbers(listed) if "*" in form else 0
        self._check_format(form, listed, places=form.count("%"), extra=widths)

    def _check_format(self, form: str, values: list[Any], *, places: int, extra: int) -> None:
        # int() refuses a very long text; a width of 20 digits is far too large already.
        written = sum(int("0" + digits.lstrip("0")[:20]) for digits in _WIDTH.findall(form))
        longest = max((len(value) for value in values if isinstance(value, str)), default=0)
        self._check_length(len(form) + written + extra + places * longest)

    def _generate(
        self, source: jinja2.nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        _Bounded().visit(source)
        source.set_environment(self)
        return super()._generate(source, name, filename, defer_init)


class _Bounded(NodeTransformer):
    """Puts a look at the clock into every loop, and a measure on every joining of texts."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802  # jinja2's name
        self.generic_visit(node)
        node.body.insert(0, jinja2.nodes.ExprStmt(_own("octavo_tick", []), lineno=node.lineno))
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802  # jinja2's name
        self.generic_visit(node)
        return _own("octavo_concat", node.nodes)


def _own(name: str, arguments: list[jinja2.nodes.Expr]) -> jinja2.nodes.Call:
    return jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute(name), arguments, [], None, None)


def _sum_of_numbers(values: Sequence[object]) -> int:
    return sum(abs(value) for value in values if isinstance(value, int))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which some templates put around what the model says: of no meaning here."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is, without escapes for HTML: this is what templates are written for."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def iter_conversations(messages: object) -> Iterator[tuple[str, object]]:
    """One conversation or a list of them, each with its name in messages of error."""
    if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)) and messages:
        first = messages[0]
        if isinstance(first, Sequence) and not isinstance(first, (str, bytes)):
            for index, conversation in enumerate(messages):
                yield f"messages[{index}]", conversation
            return
    yield "messages", messages
