"""Settling: closed turns are stored again in the tiers that the policy decides, between two requests of a session.

A turn that closed at one request is seen settled from the session's next request on, whenever the work was done: when
the engine was idle, or at the latest when that next request arrives. So what a query sees depends on no timing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from turnkv.cache import KVMemory
from turnkv.conversation.rendering import Renderer
from turnkv.conversation.spans import Classifier
from turnkv.conversation.turns import group_turns
from turnkv.engine.retention import closed_turns
from turnkv.engine.session import Session
from turnkv.errors import OutOfPagesError
from turnkv.policy import Form, Policy, Precision
from turnkv.types import Tier


@dataclass(frozen=True, slots=True)
class Due:
    """A message that is to be stored otherwise."""

    record: int
    turn: int | None
    """None for the head."""
    form: Form


class Settler:
    """Knows how a policy stores closed turns."""

    def __init__(self, policy: Policy, renderer: Renderer, memory: KVMemory) -> None:
        self.precision = policy.precision
        self._renderer = renderer
        self._memory = memory
        self._classifier = Classifier({} if policy.precision is None else policy.precision.patterns)

    def settle(self, session: Session, make_room: Callable[[int], bool]) -> bool:
        """Settle all that is due in an idle session; False if `make_room`, asked for free bytes, made too little.

        Messages settled so far stay so: each is complete in itself.
        """
        if self.precision is None or not session.is_due:
            return True
        assert not session.is_busy
        for due in tuple(_due(session, self.precision)):
            tiers = self._tiers(session, due, self.precision)
            try:
                if not make_room(session.settling_bytes(tiers)):
                    return False
                session.settle(due.record, tiers, due.form)
            except OutOfPagesError:
                return False
            if due.turn is not None and due.turn not in session.settled_turns:
                session.settled_turns.append(due.turn)
        session.is_due = False
        return True

    def _tiers(self, session: Session, due: Due, precision: Precision) -> list[Tier]:
        """The tier of each held token of a message."""
        record = session.records[due.record]
        tiers = [
            precision.tier(due.form, span.role, span.span_class)
            for span in self._renderer.spans(record.message, record.tokens, self._classifier, record.header_tokens)
            for _ in range(span.start, span.stop)
        ]
        return tiers[: record.num_held]


def _due(session: Session, precision: Precision) -> Iterator[Due]:
    """Messages of closed turns, and the head, that are not stored as they should be."""
    messages = session.messages
    closed = closed_turns(messages)
    if not closed:
        return
    places: list[tuple[int, int | None, int]] = [(0, None, len(group_turns(messages)))]
    for later, turn in enumerate(reversed(closed)):
        places += [(message + 1, turn.index, later) for message in range(turn.start, turn.stop)]
    for index, turn_index, num_later in sorted(places, key=lambda place: place[0]):
        record, form = session.records[index], precision.form(num_later)
        # What is old stays so where a client went back: nothing finer could be made of it.
        if record.form not in (form, "old") and record.segments and record.num_computed == record.num_held:
            yield Due(index, turn_index, form)
