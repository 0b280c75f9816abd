"""The vocabulary: names that every layer shares. It imports nothing of turnkv."""

from enum import StrEnum
from typing import NamedTuple, NewType

SessionId = NewType("SessionId", str)
"""Names one session (a view and its journal) within an engine."""

SegmentKey = NewType("SegmentKey", str)
"""Hex digest that identifies a segment by content, position, tier and the view that computed it."""


class Tier(NamedTuple):
    """How KV is stored: the number format of the keys and that of the values, each by its registered name."""

    keys: str
    values: str

    def __str__(self) -> str:
        return self.keys if self.keys == self.values else f"{self.keys}/{self.values}"


EXACT = Tier("exact", "exact")
"""The model's own number format, in which all KV is computed."""


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
    """What a run of tokens inside a message is, by the message's structure and by patterns."""

    TEXT = "text"
    TOOL_CALL = "tool_call"
    NUMBER = "number"
    CODE = "code"
    REASONING = "reasoning"
