"""Journals: every change of a session's view, one event a line, enough to make the view again."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from turnkv.errors import InvalidFileError


@dataclass(frozen=True, slots=True)
class Event:
    """One change of a view."""

    kind: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """The event as a line of the journal."""
        return {"event": self.kind} | asdict(self)


@dataclass(frozen=True, slots=True)
class Open(Event):
    """A session begins."""

    kind: ClassVar[str] = "open"
    session: str
    model: str
    policy: str


@dataclass(frozen=True, slots=True)
class Fork(Event):
    """A session continues another's first messages: what comes before this line is the other's journal."""

    kind: ClassVar[str] = "fork"
    session: str
    parent: str
    num_records: int
    """Messages kept, the head included; everything after them leaves the view."""
    next_position: int


@dataclass(frozen=True, slots=True)
class Extend(Event):
    """Tokens were computed at the end of the view."""

    kind: ClassVar[str] = "extend"
    position: int
    parts: tuple[tuple[int, tuple[int, ...]], ...]
    """(message, tokens) in order; message 0 is the head."""
    chunks: tuple[tuple[int, int], ...]
    """(tokens in a step, how many such steps in a row)."""
    keys: tuple[str, ...]
    """Key of the segment that each part became."""


@dataclass(frozen=True, slots=True)
class Drop(Event):
    """A turn, or its calls and results alone, left the view; nothing was computed."""

    kind: ClassVar[str] = "drop"
    turn: int
    messages: tuple[int, ...]
    keys: tuple[str, ...]
    """Segments that left; fewer than the messages' where some were never computed."""
    num_tokens: int
    reason: str


@dataclass(frozen=True, slots=True)
class Settle(Event):
    """A segment's tokens are stored in other tiers from now on, made from what was stored before."""

    kind: ClassVar[str] = "settle"
    message: int
    key: str
    into: str
    """Key of the segment that took its place."""
    tiers: tuple[tuple[int, str, str], ...]
    """(tokens in a row, format of their keys, format of their values)."""


@dataclass(frozen=True, slots=True)
class Shift(Event):
    """Segments are read at other positions from now on; no key was touched."""

    kind: ClassVar[str] = "shift"
    reason: str
    """`close_ranks`, or `fold` where even closed ranks outrun the model."""
    offsets: tuple[tuple[str, int], ...]
    next_position: int


@dataclass(frozen=True, slots=True)
class Pin(Event):
    """A turn is spared by all drops from now on, or no more."""

    kind: ClassVar[str] = "pin"
    turn: int
    is_pinned: bool


_KINDS: dict[str, type[Event]] = {event.kind: event for event in (Open, Fork, Extend, Drop, Settle, Shift, Pin)}


def dump_journal(events: Iterable[Event]) -> str:
    """The journal as JSON lines."""
    return "".join(json.dumps(event.to_json(), separators=(",", ":")) + "\n" for event in events)


def load_journal(path: Path) -> list[Event]:
    """Read a journal's lines.

    Raises:
        InvalidFileError: the file cannot be read, or a line is no event; names file and line.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidFileError(f"{path}: cannot be read ({error}); give a journal that turnkv wrote") from None
    events = []
    for number, line in enumerate(lines, 1):
        try:
            raw = json.loads(line)
            events.append(_KINDS[raw.pop("event")](**{name: _frozen(value) for name, value in raw.items()}))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidFileError(f"{path}:{number}: no journal event ({error}); the line is damaged") from None
    return events


def _frozen(value: Any) -> Any:
    return (
        tuple(_frozen(item) for item in value) if isinstance(value, Sequence) and not isinstance(value, str) else value
    )
