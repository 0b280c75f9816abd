"""Matching: which recorded conversation a request continues, forks or edits, message by message."""

import hashlib
import json
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

from turnkv.conversation.messages import Message
from turnkv.engine.retention import open_messages, undroppable_messages
from turnkv.engine.session import Session


@dataclass(frozen=True, slots=True)
class Match:
    """The recorded conversation that shares most with a request."""

    session: Session
    num_messages: int
    """Messages after the head that both begin with, up to one that was dropped or settled there and is open here."""

    @property
    def is_whole(self) -> bool:
        """Whether the request holds all that the session recorded, so that it extends it."""
        return self.num_messages == len(self.session.records) - 1


def head_key(systems: Sequence[Message], tools: Sequence[object]) -> str:
    """Digest of what a head is made from. A date that the template writes is no part of it."""
    said = [[message.key for message in systems], tools]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def best_match(sessions: Iterable[Session], head: str, messages: Sequence[Message]) -> Match | None:
    """The session with the longest common beginning; of equals the last used. None if none has this head."""
    unforgettable, unclosed = undroppable_messages(messages), open_messages(messages)
    best: Match | None = None
    for session in sorted(sessions, key=lambda session: -session.last_used):
        if session.head_key != head or session.is_busy:
            continue
        match = Match(session, _num_common(session, messages, unforgettable, unclosed))
        if best is None or (match.num_messages, match.is_whole) > (best.num_messages, best.is_whole):
            best = match
    return best


def _num_common(session: Session, messages: Sequence[Message], unforgettable: Set[int], unclosed: Set[int]) -> int:
    count = 0
    for record, message in zip(session.records[1:], messages, strict=False):
        if record.message is None or record.message.key != message.key:
            break
        # Going back to a turn that was dropped or settled when it had long been closed: it is open again.
        if (record.is_dropped and count in unforgettable) or (record.form != "exact" and count in unclosed):
            break
        count += 1
    return count
