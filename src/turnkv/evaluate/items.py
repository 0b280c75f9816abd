"""What `turnkv eval` asks: conversations, and ways in which each may go on, some of them right."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from turnkv.conversation.messages import parse_messages
from turnkv.conversation.tools import parse_tools
from turnkv.errors import InvalidFileError, InvalidMessagesError
from turnkv.evaluate.sessions import RecordedSession
from turnkv.types import Role

Kind = Literal["session", "recall", "toolcall", "arithmetic", "leakage", "text"]
KINDS: tuple[Kind, ...] = ("session", "recall", "toolcall", "arithmetic", "leakage", "text")

Messages = tuple[dict[str, object], ...]

MAX_CANDIDATES = 16
"""Answers that a right one is ranked among, itself included."""

_COMMON = {"id", "source", "license", "url", "lang", "messages", "tools", "origin", "changes", "group"}
_FIELDS = _COMMON | {
    "agent_model", "task_id", "reward", "dialogue_type", "domain",
    "question", "answer", "accepted_answers", "evidence_turns", "answer_source",
    "gold_calls", "turn_index", "all_turn_gold_calls", "user_turns", "initial_config", "involved_classes",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A conversation, and continuations of it. Every assistant message of a continuation is scored."""

    id: str
    kind: Kind
    lang: str
    group: str
    """Items of one group share a conversation and are resampled together."""
    history: Messages
    tools: tuple[dict[str, object], ...]
    continuations: tuple[Messages, ...]
    """The first one is right. All share what comes before their first assistant message."""
    num_right: int = 1
    """Leading continuations that are right; the others are what they are ranked among."""
    evidence: tuple[int, ...] = ()
    """Indices into `history` of what a right answer rests on."""
    twin: Messages | None = None
    """The same history had it never held the evidence."""

    @property
    def num_asked(self) -> int:
        """Messages, history included, before the first that is scored."""
        first = next(i for i, message in enumerate(self.continuations[0]) if message["role"] == Role.ASSISTANT)
        return len(self.history) + first

    @property
    def num_characters(self) -> int:
        """Its size, roughly, for an estimate of time."""
        once = sum(len(str(message)) for message in (*self.history, *self.tools))
        return once + sum(len(str(message)) for each in self.continuations for message in each)

    def session(self) -> RecordedSession:
        """History and right continuation as one session."""
        return RecordedSession(id=self.id, messages=(*self.history, *self.continuations[0]), tools=self.tools)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A line that is no item, and why."""

    where: str
    problem: str


def load_items(paths: Iterable[Path], *, skip_bad: bool = False) -> tuple[list[Item], list[Skipped]]:
    """Read items from JSON lines; the fields of a line say of which kind it is.

    Raises:
        InvalidFileError: a file cannot be read or, unless `skip_bad`, a line is no item; names file and line.
    """
    raws: dict[str, tuple[str, dict[str, Any]]] = {}
    skipped: list[Skipped] = []
    for path in paths:
        try:
            lines = path.read_text("utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidFileError(f"{path}: cannot be read ({error}); give a file of JSON lines") from None
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                raw = _checked(line)
                if str(raw["id"]) in raws:
                    raise ValueError(f"the id {raw['id']!r} occurs twice; give each item its own")
                raws[str(raw["id"])] = (where, raw)
            except ValueError as error:
                if not skip_bad:
                    raise InvalidFileError(f"{where}: {error}; mend the line, or leave it out by --skip-bad") from None
                skipped.append(Skipped(where, str(error)))
    answers = _answers([raw for _, raw in raws.values()])
    return [_item(raw, answers) for _, raw in raws.values()], skipped


def _checked(line: str) -> dict[str, Any]:
    """A line as an object whose messages, calls and fields are sound."""
    try:
        raw = json.loads(line)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(raw, dict) or "messages" not in raw or "id" not in raw:
        raise ValueError("is no item: it needs an id and messages")
    if unknown := sorted(raw.keys() - _FIELDS):
        raise ValueError(f"has the unknown field {unknown[0]!r}")
    try:
        messages = parse_messages(raw["messages"], allow_open_calls=True)
        raw["tools"] = parse_tools(raw.get("tools") or ())
    except InvalidMessagesError as error:
        raise ValueError(str(error)) from None
    raw["messages"] = tuple(message.to_openai() for message in messages)
    if "question" in raw:
        accepted = raw.get("accepted_answers")
        if (
            not isinstance(accepted, list)
            or not accepted
            or not all(isinstance(each, str) and each for each in accepted)
        ):
            raise ValueError("accepted_answers is no list of texts")
        if not all(type(turn) is int and 0 <= turn < len(messages) for turn in raw.get("evidence_turns", ())):
            raise ValueError("evidence_turns names messages that are not there")
    if "gold_calls" in raw and not all(isinstance(call, dict) and "name" in call for call in raw["gold_calls"]):
        raise ValueError("gold_calls is no list of calls with a name")
    return raw


def _answers(raws: Sequence[dict[str, Any]]) -> dict[str, list[str]]:
    """All accepted answers of each language, in order."""
    found: dict[str, list[str]] = {}
    for raw in raws:
        if "question" in raw:
            found.setdefault(str(raw.get("lang", "")), []).append(raw["accepted_answers"][0])
    return {lang: list(dict.fromkeys(answers)) for lang, answers in found.items()}


def _item(raw: dict[str, Any], answers: dict[str, list[str]]) -> Item:
    lang = str(raw.get("lang", ""))
    given = {"id": str(raw["id"]), "lang": lang, "tools": raw["tools"]}
    group = json.dumps([each["content"] for each in raw["messages"][:8]], ensure_ascii=False)[:400]
    if "question" in raw:
        accepted = list(dict.fromkeys(raw["accepted_answers"]))
        others = _spread([each for each in answers[lang] if each not in accepted], MAX_CANDIDATES - 1, given["id"])
        question: dict[str, object] = {"role": "user", "content": str(raw["question"])}
        candidates: list[dict[str, object]] = [{"role": "assistant", "content": each} for each in accepted + others]
        return Item(
            **given, kind="recall", group=group, history=raw["messages"], num_right=len(accepted),
            continuations=tuple((question, each) for each in candidates),
            evidence=tuple(raw.get("evidence_turns", ())),
        )  # fmt: skip
    if "gold_calls" in raw:
        calls = [(str(call["name"]), dict(call.get("arguments") or {})) for call in raw["gold_calls"]]
        wrong = _wrong_calls(calls, raw["tools"], raw["messages"], given["id"])
        replies = tuple((calls_message(each),) for each in [calls, *wrong])
        return Item(**given, kind="toolcall", group=given["id"], history=raw["messages"], continuations=replies)
    session = RecordedSession(id=given["id"], messages=raw["messages"], tools=raw["tools"])
    return session_item(session, lang, len(session.requests))


def session_item(session: RecordedSession, lang: str, num_requests: int) -> Item:
    """The first requests of a session: the last few of them are what is scored after the history."""
    messages, requests = session.messages, session.requests[:num_requests]
    start = requests[max(0, len(requests) - SCORED_REQUESTS)] if requests else len(messages)
    if start and messages[start - 1]["role"] == Role.USER:
        start -= 1
    rest = messages[start : requests[-1] + 1] if requests else ()
    return Item(
        id=session.id,
        kind="session",
        lang=lang,
        group=session.id,
        history=messages[:start],
        tools=session.tools,
        continuations=(rest,),
    )


SCORED_REQUESTS = 6
"""Requests at the end of a session that `oneshot` scores after the policy has acted."""

Calls = Sequence[tuple[str, dict[str, Any]]]


def calls_message(calls: Calls) -> dict[str, object]:
    """An assistant message that makes calls."""
    made = [
        {
            "id": f"call_{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _wrong_calls(gold: Calls, tools: Sequence[dict[str, Any]], messages: Messages, seed: str) -> list[Calls]:
    """The gold call to other tools, and with other values: those that the conversation uses elsewhere."""
    (name, arguments), *rest = gold
    names = [tool["function"]["name"] for tool in tools if tool["function"]["name"] != name]
    wrong: list[Calls] = [[(other, arguments), *rest] for other in _spread(names, MAX_CANDIDATES // 2, seed)]
    values = _values(messages)
    for key, value in arguments.items():
        alike = [each for each in values if type(each) is type(value) and each != value]
        if isinstance(value, int | float) and not isinstance(value, bool):
            alike += [value + 1, value * 10]
        wrong += [[(name, arguments | {key: each}), *rest] for each in _spread(alike, 4, seed)]
    return wrong[: MAX_CANDIDATES - 1]


def _values(messages: Messages) -> list[Any]:
    """Values of arguments and results in a conversation."""
    found: list[Any] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict | list):
            for each in value.values() if isinstance(value, dict) else value:
                walk(each)
        elif value is not None and value not in found and len(str(value)) < 80:
            found.append(value)

    for message in messages:
        texts = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]  # type: ignore[attr-defined]
        texts += [message["content"]] if message["role"] == Role.TOOL else []
        for text in texts:
            try:
                walk(json.loads(str(text)))
            except ValueError:
                continue
    return found


def _spread(values: Sequence[Any], count: int, seed: str) -> list[Any]:
    """At most `count` of the values, evenly spread from a place that the seed decides."""
    if len(values) <= count:
        return list(values)
    first = sum(seed.encode()) % len(values)
    return [values[(first + i * len(values) // count) % len(values)] for i in range(count)]
