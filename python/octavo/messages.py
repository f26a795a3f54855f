"""Conversations and tools as callers hand them in: copied into plain data, or refused with the place that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from octavo.errors import InvalidRequest
from octavo.shown import shown

Message: TypeAlias = Mapping[str, object]
Conversation: TypeAlias = Sequence[Message]
Tool: TypeAlias = Mapping[str, object]

_ROLES = ("system", "developer", "user", "assistant", "tool")
# The fields of a message, with the roles that may have them.
_FIELDS: dict[str, tuple[str, ...]] = {
    "role": _ROLES,
    "content": _ROLES,
    "name": _ROLES,
    "tool_calls": ("assistant",),
    "tool_call_id": ("tool",),
}
# What a client's answer may carry along, and says nothing while it is null.
_NULL_FIELDS = ("refusal", "audio", "function_call", "annotations", "tool_calls", "name")


def iter_conversations(messages: object) -> Iterator[tuple[str, object]]:
    """One conversation or a list of them, each with its name in messages of error."""
    if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)) and messages:
        first = messages[0]
        if isinstance(first, Sequence) and not isinstance(first, (str, bytes)):
            for index, conversation in enumerate(messages):
                yield f"messages[{index}]", conversation
            return
    yield "messages", messages


def checked_messages(messages: object, *, where: str = "messages") -> list[dict[str, Any]]:
    """Copy the messages of a conversation, with every content as one text, or refuse the first one that is wrong."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"{where}: found {type(messages).__name__}, expected a list of messages")
    if not messages:
        raise InvalidRequest(f"{where}: found no message, expected at least 1")
    return [_checked_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def _checked_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where}: found {type(message).__name__}, expected an object with role and content")
    given = {name: value for name, value in message.items() if value is not None or name not in _NULL_FIELDS}
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(f"{where}.role: found {shown(role)}, expected one of {', '.join(_ROLES)}")
    for name in given:
        if name not in _FIELDS:
            raise InvalidRequest(f"{where}.{name}: not known, expected one of {', '.join(_FIELDS)}")
        if role not in _FIELDS[name]:
            raise InvalidRequest(f"{where}.{name}: found in a message of role {role}, expected {_FIELDS[name][0]}")
    checked: dict[str, Any] = {"role": role}
    calls = _checked_calls(given.get("tool_calls", ()), f"{where}.tool_calls")
    content = given.get("content")
    # An assistant that calls tools need not say anything. Templates join contents with text: null is the empty one.
    checked["content"] = "" if calls and content is None else _checked_content(content, f"{where}.content")
    if calls:
        checked["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if name in given:
            checked[name] = _text_of(given, name, where)
    return checked


def _checked_content(content: object, where: str) -> str:
    """Parts of text are joined in order, a line each."""
    if isinstance(content, str):
        return checked_text(content, where)
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRequest(f"{where}: found {type(content).__name__}, expected a text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise InvalidRequest(f"{where}[{index}]: found {type(part).__name__}, expected type and text")
        if part.get("type") != "text":
            raise InvalidRequest(
                f"{where}[{index}].type: found {shown(part.get('type'))}, expected 'text': octavo takes nothing else"
            )
        _refuse_others(part, ("type", "text"), f"{where}[{index}]")
        texts.append(_text_of(part, "text", f"{where}[{index}]"))
    return "\n".join(texts)


def _checked_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """What an assistant called, with the arguments as values: templates write them down themselves."""
    if isinstance(calls, (str, bytes, Mapping)) or not isinstance(calls, Sequence):
        raise InvalidRequest(f"{where}: found {type(calls).__name__}, expected a list of tool calls")
    return [_checked_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _checked_call(call: object, where: str) -> dict[str, Any]:
    call = _object_of_function(call, where, ("id", "type", "function", "index"))
    checked: dict[str, Any] = {"type": "function"}
    if call.get("id") is not None:
        checked["id"] = _text_of(call, "id", where)
    function = call["function"]
    _refuse_others(function, ("name", "arguments"), f"{where}.function")
    checked["function"] = {
        "name": _text_of(function, "name", f"{where}.function"),
        "arguments": _checked_arguments(function.get("arguments"), f"{where}.function.arguments"),
    }
    return checked


def _checked_arguments(arguments: object, where: str) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(checked_text(arguments, where))
        except (ValueError, RecursionError) as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(f"{where}: found no JSON ({error}), expected an object as JSON") from None
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{where}: found {type(arguments).__name__}, expected an object, or one as JSON")
    copy: dict[str, Any] = plain(arguments, where)
    return copy


def checked_tools(tools: object) -> list[dict[str, Any]] | None:
    """Copy the tools that a model may call, or refuse the first one that is wrong; None where there are none."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise InvalidRequest(f"tools: found {type(tools).__name__}, expected None or a list of tools")
    checked = [_checked_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    names: set[str] = set()
    for index, tool in enumerate(checked):
        name = tool["function"]["name"]
        if name in names:
            raise InvalidRequest(f"tools[{index}].function.name: found {shown(name)} twice, expected each name once")
        names.add(name)
    return checked or None


def _checked_tool(tool: object, where: str) -> dict[str, Any]:
    function = _object_of_function(tool, where, ("type", "function"))["function"]
    at = f"{where}.function"
    _refuse_others(function, ("name", "description", "parameters", "strict"), at)
    checked: dict[str, Any] = {"name": _text_of(function, "name", at)}
    if function.get("description") is not None:
        checked["description"] = _text_of(function, "description", at)
    if function.get("parameters") is not None:
        if not isinstance(function["parameters"], Mapping):
            found = type(function["parameters"]).__name__
            raise InvalidRequest(f"{at}.parameters: found {found}, expected a JSON schema as an object")
        checked["parameters"] = plain(function["parameters"], f"{at}.parameters")
    if function.get("strict") is not None:
        if not isinstance(function["strict"], bool):
            raise InvalidRequest(f"{at}.strict: found {shown(function['strict'])}, expected True or False")
        checked["strict"] = function["strict"]
    return {"type": "function", "function": checked}


def _object_of_function(value: object, where: str, fields: tuple[str, ...]) -> Mapping[str, Any]:
    """An object of type `function` with the object `function`."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where}: found {type(value).__name__}, expected an object with type and function")
    _refuse_others(value, fields, where)
    if value.get("type", "function") != "function":
        raise InvalidRequest(f"{where}.type: found {shown(value['type'])}, expected 'function'")
    if not isinstance(value.get("function"), Mapping):
        found = type(value.get("function")).__name__
        raise InvalidRequest(f"{where}.function: found {found}, expected an object with a name")
    return value


def _refuse_others(value: Mapping[str, Any], fields: tuple[str, ...], where: str) -> None:
    for name in value:
        if name not in fields:
            raise InvalidRequest(f"{where}.{name}: not known, expected only {' and '.join(fields)}")


def _text_of(value: Mapping[str, Any], name: str, where: str) -> str:
    text = value.get(name)
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{name}: found {type(text).__name__}, expected a text")
    return checked_text(text, f"{where}.{name}")


def checked_text(text: str, where: str) -> str:
    """A text that UTF-8 can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{where}: found a lone surrogate at {error.start}, expected Unicode text") from None
    return text


def plain(value: object, where: str) -> Any:
    """A copy of plain data whose texts are checked."""
    try:
        return each_text(value, lambda text: checked_text(text, where))
    except RecursionError:
        raise InvalidRequest(f"{where}: contains itself, or is nested too deeply") from None


def each_text(value: object, change: Callable[[str], str]) -> Any:
    """A copy of plain data with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {each_text(key, change): each_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [each_text(item, change) for item in value]
    return value
