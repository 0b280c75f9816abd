"""Messages of the OpenAI form: checked once at the door, frozen afterwards."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, cast

from turnkv.errors import InvalidMessagesError
from turnkv.types import Role

MAX_JSON_DEPTH = 100
"""Nesting of arguments and tool schemas at most; deeper input would run some walker of it out of stack."""

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_PART_TEXT = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_ROLES = {**{role.value: role for role in Role}, "developer": Role.SYSTEM}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool. `arguments` is the JSON text of an object, as the client or the model gave it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One message. Immutable; `key` tells whether two messages say the same."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    """A result's is the name of the function it answers, whatever the client wrote."""
    reasoning: str | None = None
    call_ordinal: int | None = None
    """For a result: which call of its assistant message it answers, from 0."""
    key: str = field(init=False, repr=False, compare=False)
    """Hex digest for matching. Reasoning and call ids are left out, since clients drop or rewrite them."""

    def __post_init__(self) -> None:
        calls = [(call.name, canonical_arguments(call.arguments)) for call in self.tool_calls]
        said = [self.role.value, self.content, self.name, calls, self.call_ordinal]
        object.__setattr__(self, "key", hashlib.sha256(json.dumps(said).encode()).hexdigest())

    def to_openai(self) -> dict[str, object]:
        """Return the message as a client would send it; `parse_messages` reads it back."""
        raw: dict[str, object] = {"role": self.role.value, "content": self.content}
        if self.tool_calls:
            raw["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        optional = {"tool_call_id": self.tool_call_id, "name": self.name, "reasoning_content": self.reasoning}
        return raw | {name: value for name, value in optional.items() if value is not None}


def load_arguments(text: str) -> dict[str, object]:
    """Read the JSON text of a call's arguments.

    Raises:
        ValueError: not JSON, not an object, not finite, nested too deeply, or not encodable as UTF-8.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError(f"is nested deeper than {MAX_JSON_DEPTH} levels") from None
    if not isinstance(value, dict):
        raise ValueError("is JSON but not an object")
    check_json(value)
    return value


def canonical_arguments(text: str) -> str:
    """Return arguments with sorted keys and no whitespace, so that equal arguments are equal text."""
    return json.dumps(load_arguments(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def parse_messages(raw: object, *, allow_open_calls: bool = False) -> tuple[Message, ...]:
    """Check a conversation of the OpenAI form and freeze it.

    `developer` counts as system. Parts of text are joined by newlines. Empty arguments, which some models write for a
    call without any, count as `{}`. Fields that turnkv has no use for are ignored.

    Args:
        raw: the request's `messages`.
        allow_open_calls: accept a conversation whose last calls have no results yet.

    Raises:
        InvalidMessagesError: anything else that is wrong, with the message's index, the field and the remedy.
    """
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes | bytearray):
        raise InvalidMessagesError("is not a list", remedy="send a list of message objects")
    if not raw:
        raise InvalidMessagesError("is empty", remedy="send at least one message")
    parsed: list[Message] = []
    calls: dict[str, tuple[int, str]] = {}
    answered: set[str] = set()
    calls_at: int | None = None
    for index, entry in enumerate(raw):
        parser = _MessageParser(entry, index)
        message = parser.message()
        if message.role is Role.TOOL:
            message = parser.result(message, calls, answered)
            answered.add(cast(str, message.tool_call_id))
        else:
            _refuse_open_calls(calls, answered, calls_at, f"messages[{index}] ({message.role.value}) comes before them")
            answered = set()
            calls = {call.id: (ordinal, call.name) for ordinal, call in enumerate(message.tool_calls)}
            calls_at = index
        parsed.append(message)
    if not allow_open_calls:
        _refuse_open_calls(calls, answered, calls_at, "the conversation ends before them")
    return tuple(parsed)


class _MessageParser:
    """Reads one message; every complaint names its index."""

    def __init__(self, entry: object, index: int) -> None:
        self._index = index
        if not isinstance(entry, Mapping):
            self._refuse(None, f"is {_kind(entry)}, not an object", "send {'role': ..., 'content': ...}")
        self._raw: Mapping[object, object] = entry

    def message(self) -> Message:
        role = self._role()
        calls = self._calls(role)
        reasoning = None
        if role is Role.ASSISTANT:
            reasoning = self._text("reasoning_content") or self._text("reasoning") or None
        has_other = bool(calls) or reasoning is not None
        return Message(role, self._content(role, has_other), calls, None, self._text("name"), reasoning)

    def result(self, message: Message, calls: Mapping[str, tuple[int, str]], answered: set[str]) -> Message:
        """Tie a tool message to the call that it answers."""
        call_id = self._text("tool_call_id")
        if not call_id:
            self._refuse("tool_call_id", "is missing", "give the id of the call that this result answers")
        if call_id not in calls:
            self._refuse(
                "tool_call_id",
                f"{call_id!r} answers no call of the assistant message before it",
                "keep a call and its result together, or remove the result too",
            )
        if call_id in answered:
            self._refuse("tool_call_id", f"{call_id!r} is answered twice", "send one result for each call")
        ordinal, name = calls[call_id]
        return Message(Role.TOOL, message.content, (), call_id, name, None, ordinal)

    def _role(self) -> Role:
        role = self._raw.get("role")
        if role == "function":
            self._refuse("role", "'function' is obsolete", "send role 'tool' with the tool_call_id of the call")
        if not isinstance(role, str) or role not in _ROLES:
            self._refuse("role", f"{_short(role)} is unknown", f"use one of {', '.join(_ROLES)}")
        return _ROLES[role]

    def _content(self, role: Role, has_other: bool) -> str:
        content = self._raw.get("content")
        if content is None and role is Role.ASSISTANT:
            content = self._raw.get("refusal")
        if content is None:
            if self._raw.get("function_call") is not None:
                self._refuse("function_call", "is obsolete", "send tool_calls")
            if not has_other:
                self._refuse("content", "is missing", "give a string; only an assistant message with calls needs none")
            return ""
        if isinstance(content, str):
            return self._clean("content", content)
        if not isinstance(content, Sequence) or isinstance(content, bytes | bytearray):
            self._refuse("content", f"is {_kind(content)}", "give a string or a list of text parts")
        return "\n".join(self._part(part, f"content[{place}]") for place, part in enumerate(content))

    def _part(self, part: object, path: str) -> str:
        if not isinstance(part, Mapping):
            self._refuse(path, f"is {_kind(part)}, not an object", "send {'type': 'text', 'text': ...}")
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _PART_TEXT:
            self._refuse(path, f"is a part of type {_short(kind)}", "send text parts only; turnkv serves text models")
        text = part.get(_PART_TEXT[kind])
        if not isinstance(text, str):
            self._refuse(f"{path}.{_PART_TEXT[kind]}", f"is {_kind(text)}", "give a string")
        return self._clean(f"{path}.{_PART_TEXT[kind]}", text)

    def _calls(self, role: Role) -> tuple[ToolCall, ...]:
        raw = self._raw.get("tool_calls")
        if raw is None or raw == []:
            return ()
        if role is not Role.ASSISTANT:
            self._refuse("tool_calls", f"is set on a {role.value} message", "only assistant messages call tools")
        if not isinstance(raw, Sequence) or isinstance(raw, str | bytes | bytearray):
            self._refuse("tool_calls", f"is {_kind(raw)}", "give a list of calls")
        calls = tuple(self._call(call, f"tool_calls[{place}]") for place, call in enumerate(raw))
        seen: set[str] = set()
        for place, call in enumerate(calls):
            if call.id in seen:
                self._refuse(f"tool_calls[{place}].id", f"{call.id!r} is used twice", "give each call an id of its own")
            seen.add(call.id)
        return calls

    def _call(self, raw: object, path: str) -> ToolCall:
        if not isinstance(raw, Mapping):
            self._refuse(path, f"is {_kind(raw)}, not an object", "send {'id', 'type': 'function', 'function'}")
        if raw.get("type") != "function":
            self._refuse(f"{path}.type", f"{_short(raw.get('type'))} is not 'function'", "send function calls only")
        function = raw.get("function")
        if not isinstance(function, Mapping):
            self._refuse(f"{path}.function", f"is {_kind(function)}", "send {'name': ..., 'arguments': ...}")
        call_id, name = raw.get("id"), function.get("name")
        for where, value in ((f"{path}.id", call_id), (f"{path}.function.name", name)):
            if not isinstance(value, str) or not value:
                self._refuse(where, f"{_short(value)} is not a name", "give a non-empty string")
            self._clean(where, value)
        arguments = self._arguments(function.get("arguments"), f"{path}.function.arguments")
        return ToolCall(cast(str, call_id), cast(str, name), arguments)

    def _arguments(self, raw: object, path: str) -> str:
        remedy = "give the JSON text of an object, '{}' for none"
        try:
            text = json.dumps(raw, ensure_ascii=False) if isinstance(raw, dict) else raw
            if not isinstance(text, str):
                self._refuse(path, f"is {_kind(raw)}", remedy)
            text = text if text.strip() else "{}"
            load_arguments(text)
        except RecursionError:
            self._refuse(path, f"is nested deeper than {MAX_JSON_DEPTH} levels", remedy)
        except (ValueError, TypeError) as error:
            self._refuse(path, str(error), remedy)
        return self._clean(path, text)

    def _text(self, name: str) -> str | None:
        value = self._raw.get(name)
        if value is not None and not isinstance(value, str):
            self._refuse(name, f"is {_kind(value)}", "give a string or leave it out")
        return None if value is None else self._clean(name, value)

    def _clean(self, path: str, text: str) -> str:
        if _SURROGATE.search(text):
            self._refuse(path, "holds a lone surrogate, which is no text", "send valid UTF-8")
        return text

    def _refuse(self, path: str | None, problem: str, remedy: str) -> NoReturn:
        raise InvalidMessagesError(problem, remedy=remedy, index=self._index, field=path)


def _refuse_open_calls(
    calls: Mapping[str, tuple[int, str]], answered: set[str], calls_at: int | None, then: str
) -> None:
    missing = [call_id for call_id in calls if call_id not in answered]
    if missing:
        raise InvalidMessagesError(
            f"calls without a result: {', '.join(map(repr, missing))}; {then}",
            remedy="send a tool message for each call right after it, or remove the calls",
            index=calls_at,
            field="tool_calls",
        )


def check_json(value: object) -> None:
    """Refuse what JSON text cannot carry or a recursive walker cannot walk."""
    layer: list[object] = [value]
    for _ in range(MAX_JSON_DEPTH):
        texts = [item for item in layer if isinstance(item, str)]
        texts += [key for item in layer if isinstance(item, dict) for key in item]
        if any(not isinstance(text, str) or _SURROGATE.search(text) for text in texts):
            raise ValueError("holds a lone surrogate or a key that is no string")
        layer = [
            child
            for item in layer
            if isinstance(item, dict | list | tuple)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not layer:
            return
    raise ValueError(f"is nested deeper than {MAX_JSON_DEPTH} levels")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"holds {name}, which is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"holds {text}, which no float can hold")
    return value


def _kind(value: object) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"


def _short(value: object) -> str:
    return ascii(value[:60]) if isinstance(value, str) else f"a value of type {type(value).__name__}"
