"""Restoring: a journal makes its session's view again, by the same forward passes."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, repeat

from turnkv.cache import KVStorage
from turnkv.engine.journal import Drop, Event, Extend, Fork, Open, Pin, Settle, Shift
from turnkv.engine.runner import Chunk, ModelRunner
from turnkv.engine.session import Record, Session
from turnkv.engine.table import SessionTable
from turnkv.errors import InvalidFileError, OverBudgetError
from turnkv.types import SegmentKey, SessionId, Tier


def restore(
    events: Sequence[Event], table: SessionTable, runner: ModelRunner, storage: KVStorage, model: str
) -> Session:
    """Run a journal from its first line.

    Raises:
        InvalidFileError: the journal is damaged, belongs to another model, or its session is held already.
        OverBudgetError: its view does not fit.
    """
    if not events or not isinstance(events[0], Open):
        raise InvalidFileError("the journal does not begin with an open event; give the whole file")
    if events[0].model != model:
        raise InvalidFileError(f"the journal was written with the model {events[0].model!r}, not {model!r}; load that")
    name = [event.session for event in events if isinstance(event, Open | Fork)][-1]
    if any(session.id == name for session in table):
        raise InvalidFileError(f"session {name!r} of the journal is held already; close it first")
    session = table.create(SessionId(name))
    session.is_busy = True
    try:
        for number, event in enumerate(events, 1):
            _apply(event, session, table, runner, storage)
            if session.journal[-1] != event:
                raise InvalidFileError(f"line {number} of the journal does not follow from those before; it is damaged")
    except BaseException:
        table.close(session.id)
        raise
    session.writer.trim()
    session.is_busy = False
    return session


def _apply(event: Event, session: Session, table: SessionTable, runner: ModelRunner, storage: KVStorage) -> None:
    match event:
        case Open():
            session.journal.append(event)  # a fork's journal begins with its parent's opening
        case Fork():
            session.cut(event)
        case Extend():
            _compute(event, session, table, runner, storage)
        case Drop():
            _grow(session, max(event.messages, default=0))
            session.drop(event.turn, event.messages, event.reason)
            if isinstance(made := session.journal[-1], Drop):  # text that was never computed is in no journal
                session.journal[-1] = replace(made, num_tokens=event.num_tokens)
        case Settle():
            _settle(event, session)
        case Shift():
            offsets = {SegmentKey(key): offset for key, offset in event.offsets}
            session.view = session.view.placed(offsets, event.next_position)
            session.journal.append(event)
        case Pin():
            session.pin(event.turn, event.is_pinned)


def _compute(event: Extend, session: Session, table: SessionTable, runner: ModelRunner, storage: KVStorage) -> None:
    tokens = [(record, token) for record, part in event.parts for token in part]
    if not tokens or sum(size * times for size, times in event.chunks) != len(tokens):
        raise InvalidFileError("an extend event of the journal has steps that do not add up to its tokens")
    _grow(session, max(record for record, _ in event.parts))
    for record, token in tokens:
        session.records[record].tokens.append(token)
    if not table.reserve(session, len(tokens)):
        raise OverBudgetError("the journal's view does not fit into the KV budget; raise it")
    start = 0
    for size in chain.from_iterable(repeat(size, times) for size, times in event.chunks):
        part = tokens[start : start + size]
        position, groups, slots = session.extend(part)
        runner.run(storage, [Chunk([token for _, token in part], position, groups, slots, "none")])
        start += size
    session.seal()


def _settle(event: Settle, session: Session) -> None:
    _grow(session, event.message)
    held = [tier for segment in session.records[event.message].segments for tier in segment.tiers]
    keys = [segment.key for segment in session.records[event.message].segments]
    if event.key not in keys:
        raise InvalidFileError("a settle event of the journal names a segment that is not held")
    first = sum(
        len(segment) for segment in session.records[event.message].segments[: keys.index(SegmentKey(event.key))]
    )
    wanted = [Tier(key, value) for count, key, value in event.tiers for _ in range(count)]
    held[first : first + len(wanted)] = wanted
    session.settle(event.message, held, "exact")


def _grow(session: Session, last_record: int) -> None:
    while len(session.records) <= last_record:
        session.records.append(Record(None, []))
