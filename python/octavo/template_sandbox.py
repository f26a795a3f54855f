"""Where chat templates run: jinja2's immutable sandbox, with a clock and a measure.

What is bounded: the time, looked at with each turn of a loop, each call and each piece of output; the length of the
result; the length of any text or list that `+`, `*`, `~` or a format makes; `range`; the size of whole numbers. What is
not: the time and memory of one single filter, such as `center` with an absurd width.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
from jinja2.visitor import NodeTransformer

from octavo.errors import InvalidRequest

if TYPE_CHECKING:
    from jinja2.parser import Parser

MAX_BITS = 4096
"""How large a whole number may become: the time of arithmetic grows with its length."""

# A width or a precision: digits that a conversion, a point or the end of a field follows.
_WIDTH = re.compile(r"([0-9]+)(?=[.a-zA-Z%},_])")
_FORMATS = ("format", "format_map")
_PADDINGS = ("center", "ljust", "rjust", "zfill", "expandtabs")


class TemplateSandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with a clock and a measure; may be used from several threads at once."""

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
