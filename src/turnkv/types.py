"""The vocabulary: names that every layer shares. It imports nothing of turnkv."""

from enum import StrEnum
from typing import NewType

SessionId = NewType("SessionId", str)
"""Names one session (a view and its journal) within an engine."""

SegmentKey = NewType("SegmentKey", str)
"""Hex digest that identifies a segment by content, position, tier and the view that computed it."""


class Role(StrEnum):
    """Who a message is from."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class TurnKind(StrEnum):
    """`tool` if the turn holds calls or results, else `chat`."""

    CHAT = "chat"
    TOOL = "tool"


class SpanClass(StrEnum):
    """What a run of tokens inside a message is, as far as the message's structure tells."""

    TEXT = "text"
    TOOL_CALL = "tool_call"
    REASONING = "reasoning"
