"""Sessions: one conversation's messages, the view that its queries see, and the journal of how it came about."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from turnkv.cache import Entry, Extent, PagePool, Run, Segment, SegmentStore, View, Writer, coalesce, segment_key
from turnkv.cache.views import max_segment_tokens
from turnkv.conversation.messages import Message
from turnkv.conversation.turns import group_turns
from turnkv.engine.journal import Drop, Event, Extend, Fork, Open, Pin, Shift
from turnkv.types import Role, SessionId


@dataclass(slots=True)
class Record:
    """A message as a session holds it. Record 0 is the head: system text and tool schemas."""

    message: Message | None
    """None for the head, and for a reply not yet written."""
    tokens: list[int]
    header_tokens: int = 0
    """Leading tokens of a reply that are its generation prompt."""
    segments: list[Segment] = field(default_factory=list)
    num_computed: int = 0
    """Leading tokens whose KV was computed, dropped since or not."""
    is_dropped: bool = False

    @property
    def num_held(self) -> int:
        """Tokens whose KV is in the view."""
        return sum(len(segment) for segment in self.segments)

    @property
    def is_result_or_call(self) -> bool:
        """Whether the record belongs to a tool's use."""
        return self.message is not None and (self.message.role is Role.TOOL or bool(self.message.tool_calls))

    def copy(self) -> "Record":
        """A record of another session that holds the same segments."""
        return Record(
            self.message, self.tokens[:], self.header_tokens, self.segments[:], self.num_computed, self.is_dropped
        )


@dataclass(slots=True)
class _Piece:
    """Tokens computed and not yet sealed into a segment."""

    record: int
    tokens: list[int]
    extents: list[Extent]


class Session:
    """Owns one owner's share of each segment in its view, and the right to append behind it.

    Tokens are computed in chunks. Until `seal` makes segments of them they are *open*: `abandon` takes them back.
    """

    def __init__(self, session_id: SessionId, store: SegmentStore, pool: PagePool, max_positions: int | None) -> None:
        self.id = session_id
        self.records: list[Record] = []
        self.view = View()
        self.journal: list[Event] = []
        self.pinned_turns: set[int] = set()
        self.writer = Writer(pool)
        self.is_busy = False
        self.last_used = 0
        self.head_key = ""
        """What the head was made from; sessions of another head share nothing."""
        self._store = store
        self._pool = pool
        self.max_positions = max_positions
        self._open: list[_Piece] = []
        self._open_runs: tuple[Run, ...] = ()
        self._chunks: list[tuple[int, int]] = []

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation after the head."""
        return tuple(record.message for record in self.records if record.message is not None)

    @property
    def next_position(self) -> int:
        """Virtual position of the next token to compute."""
        return self.view.next_position + sum(len(piece.tokens) for piece in self._open)

    @property
    def num_held_tokens(self) -> int:
        """Tokens whose KV this session sees, the open ones included."""
        return self.view.num_tokens + sum(len(piece.tokens) for piece in self._open)

    def pending(self) -> list[tuple[int, int]]:
        """(record, token) of all tokens that are to be computed, in order."""
        return [
            (index, token)
            for index, record in enumerate(self.records)
            if not record.is_dropped
            for token in record.tokens[record.num_computed :]
        ]

    def extend(self, tokens: Sequence[tuple[int, int]]) -> tuple[int, tuple[Run, ...], tuple[Run, ...]]:
        """Take room for tokens `(record, token)` that the next step computes.

        Returns:
            The first one's virtual position, the runs they see, and the runs they go to.
        """
        position = self.next_position
        past = coalesce((*self.view.runs, *self._open_runs))
        extents = self.writer.fill(len(tokens))
        new = coalesce(Run(e.start, len(e), at, 0) for e, at in _placed(extents, position))
        self._open_runs = coalesce((*self._open_runs, *new))
        slots = iter(slot for extent in extents for slot in range(extent.start, extent.stop))
        for record, token in tokens:
            if not self._open or self._open[-1].record != record:
                self._open.append(_Piece(record, [], []))
            piece = self._open[-1]
            piece.tokens.append(token)
            _append_slot(piece.extents, next(slots))
            self.records[record].num_computed += 1
        if self._chunks and self._chunks[-1][0] == len(tokens):
            self._chunks[-1] = (len(tokens), self._chunks[-1][1] + 1)
        else:
            self._chunks.append((len(tokens), 1))
        return position, past, new

    def seal(self) -> None:
        """Make segments of the open tokens: one a message, or several where a message is very long."""
        if not self._open:
            return
        position = self.view.next_position
        parts, keys = [], []
        for piece in self._open:
            for tokens, extents in _split(piece, self.max_positions):
                key = segment_key(tokens, position, self.view.hash)
                segment = self._store.create(Segment(key, tokens, position, extents))
                position += len(tokens)
                self.view = self.view.extended([segment], position)
                self.records[piece.record].segments.append(segment)
                parts.append((piece.record, tokens))
                keys.append(key)
        first = position - sum(len(tokens) for _, tokens in parts)
        self.journal.append(Extend(first, tuple(parts), tuple(self._chunks), tuple(keys)))
        self._clear_open()

    def abandon(self) -> None:
        """Take back the open tokens, as if they had never been computed."""
        for piece in self._open:
            self.records[piece.record].num_computed -= len(piece.tokens)
            for extent in piece.extents:
                self._pool.release(extent)
        self._clear_open()
        self.writer.close()

    def drop(self, turn: int, records: Sequence[int], reason: str) -> int:
        """Take records out of the view. Nothing is computed and nothing else moves. Returns the tokens gone."""
        assert not self._open
        if not records:
            return 0
        segments = [segment for index in records for segment in self.records[index].segments]
        num_tokens = sum(self.num_droppable(index) for index in records)
        self.view = self.view.without(segments)
        for index in records:
            self.records[index].segments = []
            self.records[index].is_dropped = True
        self._store.release(segments)
        self.journal.append(Drop(turn, tuple(records), tuple(s.key for s in segments), num_tokens, reason))
        return num_tokens

    def num_droppable(self, record: int) -> int:
        """Tokens of a record that a drop would take: held, or waiting to be computed."""
        entry = self.records[record]
        return 0 if entry.is_dropped else entry.num_held + len(entry.tokens) - entry.num_computed

    def close_ranks(self, max_positions: int) -> None:
        """Let the survivors lie at consecutive positions again, if that many are fewer than the model has."""
        if self.view.num_tokens < max_positions:
            self._shift(View.closed_up, "close_ranks")

    def fold(self) -> None:
        """Make room for a quarter more positions by letting the middle of the view share positions."""
        assert self.max_positions is not None
        limit = self.max_positions
        self.seal()
        self._shift(lambda view: view.folded(limit), "fold")

    def pin(self, turn: int, is_pinned: bool) -> None:
        """Spare a turn from drops from now on, or no more."""
        (self.pinned_turns.add if is_pinned else self.pinned_turns.discard)(turn)
        self.journal.append(Pin(turn, is_pinned))

    def open(self, model: str, policy: str) -> None:
        """Write the journal's first line."""
        self.journal.append(Open(self.id, model, policy))

    def fork_from(self, parent: "Session", num_records: int) -> None:
        """Begin as another session was after its first records: segments are shared, drops and pins inherited."""
        assert not self.records
        assert not parent._open
        self.records = [record.copy() for record in parent.records]
        self.view = parent.view
        self._store.hold(self.view.segments)
        self.head_key = parent.head_key
        self.pinned_turns = set(parent.pinned_turns)
        self.journal = parent.journal[:]
        self.cut(Fork(self.id, parent.id, num_records, self._position_after(num_records)))
        self._unpin_gone_turns()

    def truncate(self, num_records: int) -> None:
        """Take back the last records. What was sealed or dropped of them before an interruption is journalled."""
        if any(record.segments or record.is_dropped for record in self.records[num_records:]):
            self.cut(Fork(self.id, self.id, num_records, self._position_after(num_records)))
        del self.records[num_records:]
        self._unpin_gone_turns()

    def cut(self, event: Fork) -> None:
        """Leave only the first records, in the view too, as a journal's line says."""
        gone = [segment for record in self.records[event.num_records :] for segment in record.segments]
        self.view = View(self.view.without(gone).entries, event.next_position)
        self._store.release(gone)
        del self.records[event.num_records :]
        self.journal.append(event)

    def pages(self, without: Iterable[int] = ()) -> set[int]:
        """Pages that hold its tokens, those of some records left out."""
        gone = set(without)
        extents = [extent for piece in self._open for extent in piece.extents]
        extents += [
            extent
            for index, record in enumerate(self.records)
            if index not in gone
            for segment in record.segments
            for extent in segment.extents
        ]
        return {page for extent in extents for page in extent.pages}

    def close(self) -> None:
        """Give back all memory."""
        self.abandon()
        self._store.release(self.view.segments)
        self.view = View()
        self.records = []

    def check(self) -> None:
        """Assert that records and view agree."""
        self.view.check()
        held = [segment for record in self.records for segment in record.segments]
        assert sorted(map(id, held)) == sorted(map(id, self.view.segments))
        unsealed = Counter[int]()
        for piece in self._open:
            assert len(piece.tokens) == sum(len(extent) for extent in piece.extents)
            unsealed[piece.record] += len(piece.tokens)
        for index, record in enumerate(self.records):
            assert record.num_computed <= len(record.tokens)
            assert record.num_held + unsealed[index] == (0 if record.is_dropped else record.num_computed)

    def _position_after(self, num_records: int) -> int:
        """Next position once later records have left the view."""
        gone = [segment for record in self.records[num_records:] for segment in record.segments]
        return _end(self.view.without(gone).entries) if gone else self.view.next_position

    def _unpin_gone_turns(self) -> None:
        num_turns = len(group_turns(self.messages))
        for turn in sorted(turn for turn in self.pinned_turns if turn >= num_turns):
            self.pin(turn, False)

    def _shift(self, change: Callable[[View], View], reason: str) -> None:
        before = {entry.segment.key: entry.offset for entry in self.view.entries}
        changed = change(self.view)
        if changed == self.view:
            return
        self.view = changed
        moved = tuple((e.segment.key, e.offset) for e in self.view.entries if before[e.segment.key] != e.offset)
        self.journal.append(Shift(reason, moved, self.view.next_position))

    def _clear_open(self) -> None:
        self._open, self._open_runs, self._chunks = [], (), []


def _placed(extents: Iterable[Extent], position: int) -> Iterable[tuple[Extent, int]]:
    for extent in extents:
        yield extent, position
        position += len(extent)


def _append_slot(extents: list[Extent], slot: int) -> None:
    if extents and extents[-1].stop == slot:
        extents[-1] = Extent(extents[-1].start, slot + 1)
    else:
        extents.append(Extent(slot, slot + 1))


def _split(piece: _Piece, max_positions: int | None) -> Iterable[tuple[tuple[int, ...], tuple[Extent, ...]]]:
    """A piece as segments: whole, unless it is longer than a view's fold allows."""
    limit = max_segment_tokens(max_positions) if max_positions is not None else len(piece.tokens)
    slots = [slot for extent in piece.extents for slot in range(extent.start, extent.stop)]
    for start in range(0, len(piece.tokens), limit):
        extents: list[Extent] = []
        for slot in slots[start : start + limit]:
            _append_slot(extents, slot)
        yield tuple(piece.tokens[start : start + limit]), tuple(extents)


def _end(entries: Sequence[Entry]) -> int:
    """Virtual position behind the last key."""
    return max((entry.position + len(entry.segment) for entry in entries), default=0)
