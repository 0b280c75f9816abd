"""Restoring: a journal makes its session's view again, by the same forward passes."""

from collections.abc import Sequence
from itertools import chain, repeat

from turnkv.cache import KVStorage
from turnkv.engine.journal import Drop, Event, Extend, Fork, Open, Pin, Shift
from turnkv.engine.runner import Chunk, ModelRunner
from turnkv.engine.session import Record, Session
from turnkv.engine.table import SessionTable
from turnkv.errors import InvalidFileError, OverBudgetError
from turnkv.types import SegmentKey, SessionId


def restore(events: Sequence[Event], table: SessionTable, runner: ModelRunner, storage: KVStorage) -> Session:
    """Run a journal from its first line.

    Raises:
        InvalidFileError: the journal does not begin with an opening, or belongs to another model.
        OverBudgetError: its view does not fit.
    """
    if not events or not isinstance(events[0], Open):
        raise InvalidFileError("the journal does not begin with an open event; give the whole file")
    names = [event.session for event in events if isinstance(event, Open | Fork)]
    session = table.create(SessionId(names[-1]))
    session.is_busy = True
    try:
        for event in events:
            _apply(event, session, table, runner, storage)
    except BaseException:
        table.close(session.id)
        raise
    session.writer.trim()
    session.is_busy = False
    return session


def _apply(event: Event, session: Session, table: SessionTable, runner: ModelRunner, storage: KVStorage) -> None:
    match event:
        case Open():
            session.open(event.model, event.policy)
        case Fork():
            session.truncate(event.num_records)
        case Extend():
            _compute(event, session, table, runner, storage)
        case Drop():
            _grow(session, max(event.messages, default=0))
            session.drop(event.turn, event.messages, event.reason)
        case Shift():
            offsets = {SegmentKey(key): offset for key, offset in event.offsets}
            session.view = session.view.placed(offsets, event.next_position)
            session.journal.append(event)
        case Pin():
            session.pin(event.turn, event.is_pinned)


def _compute(event: Extend, session: Session, table: SessionTable, runner: ModelRunner, storage: KVStorage) -> None:
    tokens = [(record, token) for record, part in event.parts for token in part]
    _grow(session, max(record for record, _ in event.parts))
    for record, token in tokens:
        session.records[record].tokens.append(token)
    if not table.reserve(session, len(tokens)):
        raise OverBudgetError("the journal's view does not fit into the KV budget; raise it")
    start = 0
    for size in chain.from_iterable(repeat(size, times) for size, times in event.chunks):
        part = tokens[start : start + size]
        position, past, new = session.extend(part)
        runner.run(storage, [Chunk([token for _, token in part], position, past, new, "none")])
        start += size
    session.seal()


def _grow(session: Session, last_record: int) -> None:
    while len(session.records) <= last_record:
        session.records.append(Record(None, []))
