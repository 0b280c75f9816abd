"""Sessions: one conversation's messages, the view that its queries see, and the journal of how it came about."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from turnkv.cache import (
    Entry,
    Extent,
    KVMemory,
    Page,
    Part,
    Segment,
    TileGroup,
    View,
    Writer,
    segment_key,
    settled_key,
    slots_of,
)
from turnkv.cache.storage import Slots
from turnkv.cache.views import max_segment_tokens
from turnkv.config import PAGE_TOKENS
from turnkv.conversation.messages import Message
from turnkv.conversation.turns import group_turns
from turnkv.engine.journal import Drop, Event, Extend, Fork, Open, Pin, Settle, Shift
from turnkv.errors import OutOfPagesError
from turnkv.policy import Form
from turnkv.types import EXACT, Role, SegmentKey, SessionId, Tier


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
    form: Form = "exact"
    """How the policy had it stored when it last looked."""

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
        return replace(self, tokens=self.tokens[:], segments=self.segments[:])


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

    def __init__(self, session_id: SessionId, memory: KVMemory, max_positions: int | None) -> None:
        self.id = session_id
        self.records: list[Record] = []
        self.view = View()
        self.journal: list[Event] = []
        self.pinned_turns: set[int] = set()
        self.writer = Writer(memory.pools[EXACT])
        """Where newly computed tokens go."""
        self.settled_writers = {tier: Writer(pool) for tier, pool in memory.pools.items()}
        """Where settled tokens go: apart, so that what is exact and short-lived leaves whole pages behind."""
        self.is_due = False
        """Whether turns closed at the last request wait to be settled, before the next one sees them."""
        self.settled_turns: list[int] = []
        """Turns that the next request is the first to see settled."""
        self.is_busy = False
        self.last_used = 0
        self.head_key = ""
        """What the head was made from; sessions of another head share nothing."""
        self._memory = memory
        self._store = memory.store
        self.max_positions = max_positions
        self._open: list[_Piece] = []
        self._open_slots: list[Slots] = []
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

    @property
    def held_bytes(self) -> int:
        """KV bytes that this session sees, the open tokens' included."""
        num_open = sum(len(piece.tokens) for piece in self._open)
        return num_open * self._memory.token_bytes() + sum(map(self._memory.segment_bytes, self.view.segments))

    def pending(self) -> list[tuple[int, int]]:
        """(record, token) of all tokens that are to be computed, in order."""
        return [
            (index, token)
            for index, record in enumerate(self.records)
            if not record.is_dropped
            for token in record.tokens[record.num_computed :]
        ]

    def extend(self, tokens: Sequence[tuple[int, int]]) -> tuple[int, tuple[TileGroup, ...], Slots]:
        """Take room for tokens `(record, token)` that the next step computes.

        Returns:
            The first one's virtual position, all keys that the tokens see (their own too), and the slots they go to.
        """
        position = self.next_position
        new = slots_of(self.writer.fill(len(tokens)))
        self._open_slots.append(new)
        open_slots = np.concatenate(self._open_slots)
        self._open_slots = [open_slots]
        first = self.view.next_position
        own = TileGroup.of(EXACT, 0, open_slots, np.arange(first, first + len(open_slots), dtype=np.int32))
        slots = iter(new.tolist())
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
        return position, (*self.view.tiles, own), new

    def seal(self) -> None:
        """Make segments of the open tokens: one a message, or several where a message is very long."""
        if not self._open:
            return
        position = self.view.next_position
        parts, keys = [], []
        for piece in self._open:
            for tokens, extents in _split(piece, self.max_positions):
                key = segment_key(tokens, position, self.view.hash)
                segment = self._store.create(Segment.exact(key, tokens, position, extents))
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
                self._memory.pools[EXACT].release(extent)
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

    def forget(self, turn: int, first: int, records: Sequence[int]) -> int:
        """Take records of a turn that begins at record `first`, and let all that follows be computed anew.

        Returns the tokens of the turn, dropped before or not. What had been dropped of later turns stays so.
        """
        assert not self._open
        later = self.records[first:]
        self.cut(Fork(self.id, self.id, first, self._position_after(first)))
        for record in later:
            self.records.append(replace(record, segments=[], num_computed=0, is_dropped=False, form="exact"))
        num_tokens = self.drop(turn, records, "forgotten")
        turns = {place: each.index for each in group_turns(self.messages) for place in range(each.start, each.stop)}
        for index, record in enumerate(later, first):
            if record.is_dropped and index not in records:
                self.drop(turns[index - 1], [index], "forgotten")
        return num_tokens

    def num_droppable(self, record: int) -> int:
        """Tokens of a record that a drop would take: held, or waiting to be computed."""
        entry = self.records[record]
        return 0 if entry.is_dropped else entry.num_held + len(entry.tokens) - entry.num_computed

    def droppable_bytes(self, record: int) -> int:
        """KV bytes of those tokens; what waits to be computed will be exact."""
        entry = self.records[record]
        if entry.is_dropped:
            return 0
        num_pending = len(entry.tokens) - entry.num_computed
        return num_pending * self._memory.token_bytes() + self.record_bytes(record)

    def record_bytes(self, record: int) -> int:
        """KV bytes of a record in the view."""
        return sum(map(self._memory.segment_bytes, self.records[record].segments))

    def settle(self, record: int, tiers: Sequence[Tier], form: Form) -> None:
        """Store the held tokens of a record in these tiers, one a token, from what is stored now.

        Raises:
            OutOfPagesError: there is no room for the new beside the old. Segments settled so far stay so.
        """
        entry = self.records[record]
        assert len(tiers) == entry.num_held
        start = 0
        for segment in tuple(entry.segments):
            wanted = tiers[start : start + len(segment)]
            start += len(segment)
            if wanted != segment.tiers:
                self._exchange(record, segment, wanted)
        entry.form = form

    def settling_bytes(self, tiers: Iterable[Tier]) -> int:
        """Bytes that storing so many tokens in these tiers would claim beside what is held."""
        wanted = Counter(tiers)
        return sum(
            self.settled_writers[tier].num_pages_needed(count) * self._memory.page_bytes[tier]
            for tier, count in wanted.items()
        )

    @property
    def num_gap_pages(self) -> int:
        """Pages that would be free if the segments that are this session's alone lay without gaps."""
        pages, tokens = set[Page](), Counter[Tier]()
        for segment in self.view.segments:
            for part in segment.parts if segment.owners == 1 else ():
                pages |= {(part.tier, page) for extent in part.extents for page in extent.pages}
                tokens[part.tier] += len(part)
        return len(pages) - sum(-(-count // PAGE_TOKENS) for count in tokens.values())

    def repack(self) -> None:
        """Store the segments that are this session's alone again as they are, one behind the other.

        Raises:
            OutOfPagesError: there is no room for a segment beside itself. Those before it lie packed.
        """
        for index, record in enumerate(self.records):
            for segment in tuple(record.segments):
                if segment.owners == 1:
                    self._replace(index, segment, self._stored(segment, segment.tiers, segment.key))

    def _exchange(self, record: int, segment: Segment, tiers: Sequence[Tier]) -> None:
        """Settle one segment and journal it."""
        runs = tuple((len(list(run)), tier) for tier, run in groupby(tiers))
        key = settled_key(segment.key, runs)
        # Sessions that share a segment share what it settles to.
        settled = self._store.find(key) or self._stored(segment, tiers, key)
        self._replace(record, segment, settled)
        self.journal.append(
            Settle(record, segment.key, settled.key, tuple((count, tier.keys, tier.values) for count, tier in runs))
        )

    def _stored(self, segment: Segment, tiers: Sequence[Tier], key: SegmentKey) -> Segment:
        """A copy of a segment with its tokens in these tiers."""
        now = np.empty(len(segment), dtype=np.int32)
        sources = segment.tiers
        for part in segment.parts:
            now[part.members] = part.slots
        members: dict[Tier, list[int]] = {}
        for index, tier in enumerate(tiers):
            members.setdefault(tier, []).append(index)
        if self.settling_bytes(tiers) > self._memory.budget.free_bytes:
            raise OutOfPagesError("there is no room to settle a turn; raise the KV budget")
        parts = []
        for tier, found in members.items():
            writer = self.settled_writers[tier]
            writer.reserve(len(found))
            part = Part(tier, tuple(writer.fill(len(found))), np.array(found, dtype=np.int32))
            for source in sorted({sources[index] for index in found}):
                is_from = np.array([sources[index] == source for index in found])
                self._memory.storage.settle(source, now[part.members[is_from]], tier, part.slots[is_from])
            parts.append(part)
        return self._store.create(Segment(key, segment.tokens, segment.position, tuple(parts)))

    def _replace(self, record: int, old: Segment, new: Segment) -> None:
        segments = self.records[record].segments
        segments[segments.index(old)] = new
        self.view = self.view.replaced({old: new})
        self._store.release([old])

    def close_ranks(self, max_positions: int | None) -> None:
        """Let the survivors lie at consecutive positions again, if that many are fewer than the model has."""
        if max_positions is None or self.view.num_tokens < max_positions:
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

    def pages(self, without: Iterable[int] = ()) -> set[Page]:
        """Pages that hold its tokens, those of some records left out."""
        gone = set(without)
        extents = [(EXACT, extent) for piece in self._open for extent in piece.extents]
        extents += [
            (part.tier, extent)
            for index, record in enumerate(self.records)
            if index not in gone
            for segment in record.segments
            for part in segment.parts
            for extent in part.extents
        ]
        return {(tier, page) for tier, extent in extents for page in extent.pages}

    @property
    def reserved_pages(self) -> set[Page]:
        """Pages that its writers hold for tokens to come."""
        found = {(EXACT, page) for page in self.writer.pages}
        return found.union((tier, page) for tier, writer in self.settled_writers.items() for page in writer.pages)

    def close(self) -> None:
        """Give back all memory."""
        self.abandon()
        for writer in self.settled_writers.values():
            writer.close()
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
        self._open, self._open_slots, self._chunks = [], [], []


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
