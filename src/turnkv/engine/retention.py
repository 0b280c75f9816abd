"""Retention: shows a session to the policy and carries out what it decides."""

from collections.abc import Sequence
from dataclasses import dataclass

from turnkv.conversation.messages import Message
from turnkv.conversation.turns import Turn, group_turns
from turnkv.engine.session import Session
from turnkv.policy import Drop, Policy, Size, Snapshot, TurnSnapshot, decide
from turnkv.types import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds one session."""

    max_bytes: int
    """By the device's budget."""
    max_positions: int | None
    """By the model."""
    token_bytes: int
    """KV bytes of one token as it is computed."""
    can_shift: bool
    """Whether the model's keys can be read at other positions."""


@dataclass(frozen=True, slots=True)
class PlannedDrop:
    """A drop in terms of a session's records."""

    turn: int
    records: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a request does to a session before anything is computed."""

    drops: tuple[PlannedDrop, ...]
    total: Size
    """What is held when the request ends, the reply's room included."""
    new_tokens: int
    """Tokens to compute before the reply."""


def plan_drops(session: Session, policy: Policy, reply_tokens: int, limits: Limits) -> Plan:
    """Ask the policy. The session, whose records hold the whole request already, is not changed."""
    messages = session.messages
    turns, closed = group_turns(messages), closed_turns(messages)
    everything = sum((_size(session, index) for index in range(len(session.records))), Size())
    total = everything + Size(reply_tokens, reply_tokens * limits.token_bytes)
    spared = _latest_user(messages)
    snapshots = []
    for turn in turns:
        records = [index for index in _records(turn) if index != spared]
        tools = [index for index in records if session.records[index].is_result_or_call]
        chat = [index for index in records if not session.records[index].is_result_or_call]
        snapshots.append(
            TurnSnapshot(
                index=turn.index,
                kind=turn.kind,
                is_closed=turn in closed,
                is_pinned=is_pinned(session, policy, turn, messages),
                chat=sum((_size(session, index) for index in chat), Size()),
                tools=sum((_size(session, index) for index in tools), Size()),
            )
        )
    decisions = decide(
        policy,
        Snapshot(turns=snapshots, total=total, max_tokens=limits.max_positions, max_bytes=limits.max_bytes),
    )
    drops = tuple(_planned(session, turns[drop.turn], drop, spared) for drop in decisions)
    gone = {index for drop in drops for index in drop.records}
    return Plan(
        drops=drops,
        total=total - sum((_size(session, index) for index in gone), Size()),
        new_tokens=sum(record not in gone for record, _ in session.pending()),
    )


def _size(session: Session, record: int) -> Size:
    """What a drop of the record would free."""
    return Size(session.num_droppable(record), session.droppable_bytes(record))


def closed_turns(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """All turns but the last, and but those with a tool's result that no answer has read yet."""
    last_answer = max((i for i, message in enumerate(messages) if message.role is Role.ASSISTANT), default=-1)
    last_result = max((i for i, message in enumerate(messages) if message.role is Role.TOOL), default=-1)
    is_read = last_result < last_answer
    return tuple(turn for turn in group_turns(messages)[:-1] if is_read or not turn.start <= last_result < turn.stop)


def undroppable_messages(messages: Sequence[Message]) -> frozenset[int]:
    """Indices of messages that no policy may drop at a request: those of open turns, and the latest user message."""
    record = _latest_user(messages)
    return open_messages(messages) | (frozenset() if record is None else {record - 1})


def open_messages(messages: Sequence[Message]) -> frozenset[int]:
    """Indices of messages in turns that are not closed, which are held as they were computed."""
    closed = {index for turn in closed_turns(messages) for index in range(turn.start, turn.stop)}
    return frozenset(range(len(messages))) - closed


def droppable_records(session: Session, turn: Turn, *, is_gone_too: bool = False) -> tuple[int, ...]:
    """The records of a turn that a drop takes: not the latest user message nor, unless wanted, those gone already."""
    spared = _latest_user(session.messages)
    if is_gone_too:
        return tuple(index for index in _records(turn) if index != spared)
    return _planned(session, turn, Drop(turn.index), spared).records


def is_pinned(session: Session, policy: Policy, turn: Turn, messages: Sequence[Message]) -> bool:
    """Whether the user or the policy's patterns spare a turn."""
    return turn.index in session.pinned_turns or any(
        policy.keep.is_pinned(message.content) for message in messages[turn.start : turn.stop]
    )


def _planned(session: Session, turn: Turn, drop: Drop, spared: int | None) -> PlannedDrop:
    return PlannedDrop(
        turn.index,
        tuple(
            index
            for index in _records(turn)
            if index != spared
            and session.num_droppable(index)
            and (drop.part == "all" or session.records[index].is_result_or_call)
        ),
    )


def _records(turn: Turn) -> range:
    """Record 0 is the head, so message i is record i + 1."""
    return range(turn.start + 1, turn.stop + 1)


def _latest_user(messages: Sequence[Message]) -> int | None:
    """Record of the latest user message."""
    return next((i + 1 for i in reversed(range(len(messages))) if messages[i].role is Role.USER), None)
