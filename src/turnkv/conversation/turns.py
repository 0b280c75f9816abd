"""Turns: the grouping of messages that policies decide about."""

from collections.abc import Sequence
from dataclasses import dataclass

from turnkv.conversation.messages import Message
from turnkv.types import Role, TurnKind


@dataclass(frozen=True, slots=True)
class Turn:
    """Messages `[start, stop)` of a conversation, which go or stay together."""

    index: int
    start: int
    stop: int
    kind: TurnKind


def head_length(messages: Sequence[Message]) -> int:
    """Count the leading system messages, which belong to no turn."""
    return next((index for index, message in enumerate(messages) if message.role is not Role.SYSTEM), len(messages))


def group_turns(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """Group the messages after the head into turns, which partition them in order.

    A turn starts at the first message after the head, at a user message, and at an assistant message right after a
    tool result. So a call and its results share a turn, and a later system message lies in the turn before it.
    No messages after the head: no turns.
    """
    head = head_length(messages)
    starts = [
        index
        for index in range(head, len(messages))
        if index == head
        or messages[index].role is Role.USER
        or (messages[index].role is Role.ASSISTANT and messages[index - 1].role is Role.TOOL)
    ]
    stops = [*starts[1:], len(messages)]
    return tuple(
        Turn(index, start, stop, _kind(messages[start:stop]))
        for index, (start, stop) in enumerate(zip(starts, stops, strict=False))
    )


def _kind(messages: Sequence[Message]) -> TurnKind:
    has_tools = any(message.tool_calls or message.role is Role.TOOL for message in messages)
    return TurnKind.TOOL if has_tools else TurnKind.CHAT
