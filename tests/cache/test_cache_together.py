"""Pool, writers, segments, storage and views together, as several sessions use them at once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from turnkv.cache import (
    Extent,
    KVStorage,
    LayerShape,
    PagePool,
    Segment,
    SegmentStore,
    View,
    Writer,
    segment_key,
)
from turnkv.config import PAGE_TOKENS
from turnkv.errors import OutOfPagesError
from turnkv.types import SegmentKey

SHAPES = (LayerShape(num_heads=2, key_dim=1, value_dim=3), LayerShape(num_heads=1, key_dim=2, value_dim=1))


@dataclass
class ModelSession:
    """What the test believes about one session."""

    writer: Writer
    room: int = 0
    last_slot: int | None = None
    """The last slot that its writer filled, while a rest of that page is reserved."""
    view: View = field(default_factory=View)
    held: list[tuple[Segment, int]] = field(default_factory=list)
    """Segments and the virtual position of each one's first token."""


def slots_of(segment: Segment) -> list[int]:
    return [slot for extent in segment.extents for slot in range(extent.start, extent.stop)]


def payload_of(segments: list[Segment], payload: dict[int, int]) -> list[int]:
    return [payload[slot] for segment in segments for slot in slots_of(segment)]


class Cache(RuleBasedStateMachine):
    """Sessions append, fork, drop, shift and close in any order.

    Every token has a serial number, which is written into the storage as its KV. The model knows slots by number.
    """

    @initialize(num_pages=st.integers(1, 12))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.store = SegmentStore(self.pool)
        self.storage = KVStorage(SHAPES, num_pages, torch.float64, torch.device("cpu"))
        self.sessions: list[ModelSession] = []
        self.payload: dict[int, int] = {}
        """Serial number of the token in each used slot."""
        self.serial = 0
        self.seen_by_hash: dict[str, object] = {}

    def session(self, index: int) -> ModelSession:
        return self.sessions[index % len(self.sessions)]

    @property
    def segments(self) -> set[Segment]:
        return {segment for session in self.sessions for segment, _ in session.held}

    @precondition(lambda self: len(self.sessions) < 4)
    @rule()
    def open(self) -> None:
        self.sessions.append(ModelSession(Writer(self.pool)))

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3), num_tokens=st.integers(0, 70))
    def reserve(self, index: int, num_tokens: int) -> None:
        session = self.session(index)
        num_pages = -(-max(0, num_tokens - session.room) // PAGE_TOKENS)
        assert session.writer.num_pages_needed(num_tokens) == num_pages
        if num_pages > self.num_free_pages:
            with pytest.raises(OutOfPagesError):
                session.writer.reserve(num_tokens)
        else:
            session.writer.reserve(num_tokens)
            session.room += num_pages * PAGE_TOKENS

    @precondition(lambda self: any(session.room for session in self.sessions))
    @rule(index=st.integers(0, 3), share=st.integers(1, 20), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def append(self, index: int, share: int, tokens: list[int]) -> None:
        """Fill part of the room of a session and make a segment of it."""
        session = [session for session in self.sessions if session.room][index % sum(s.room > 0 for s in self.sessions)]
        count = max(1, session.room * min(share, 10) // 10)
        extents = session.writer.fill(count)
        slots = [slot for extent in extents for slot in range(extent.start, extent.stop)]
        assert len(slots) == len(set(slots)) == count
        assert self.payload.keys().isdisjoint(slots)
        assert all(a.stop != b.start for a, b in pairwise(extents))
        if session.last_slot is not None:
            assert slots[0] == session.last_slot + 1
        session.room -= count
        session.last_slot = slots[-1] if slots[-1] % PAGE_TOKENS != PAGE_TOKENS - 1 else None
        self.write(slots)
        content = tuple(tokens[i % len(tokens)] for i in range(count))
        position = session.view.next_position
        key = segment_key(content, position, session.view.hash)
        segment = self.store.create(Segment(key, content, position, tuple(extents)))
        session.view = session.view.extended([segment], position + count)
        session.held.append((segment, position))

    def write(self, slots: list[int]) -> None:
        serials = range(self.serial, self.serial + len(slots))
        self.serial += len(slots)
        self.payload.update(zip(slots, serials, strict=True))
        for layer, shape in enumerate(SHAPES):
            numbers = torch.tensor(serials, dtype=torch.float64)[None, :, None]
            key = numbers.expand(shape.num_heads, -1, shape.key_dim)
            self.storage.write(layer, torch.tensor(slots), key, -numbers.expand(shape.num_heads, -1, shape.value_dim))

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3))
    def trim(self, index: int) -> None:
        session = self.session(index)
        session.writer.trim()
        session.room %= PAGE_TOKENS

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3))
    def close_writer(self, index: int) -> None:
        """What a session does when it is interrupted: it gives its room back and may append again later."""
        session = self.session(index)
        session.writer.close()
        session.room, session.last_slot = 0, None

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3))
    def close(self, index: int) -> None:
        session = self.session(index)
        session.writer.close()
        self.store.release(session.view.segments)
        self.sessions.remove(session)
        self.forget_released()

    @precondition(lambda self: 0 < len(self.sessions) < 4)
    @rule(index=st.integers(0, 3))
    def fork(self, index: int) -> None:
        parent = self.session(index)
        self.store.hold(parent.view.segments)
        self.sessions.append(ModelSession(Writer(self.pool), view=parent.view, held=parent.held[:]))

    @precondition(lambda self: any(session.held for session in self.sessions))
    @rule(index=st.integers(0, 3), picks=st.sets(st.integers(0, 7), min_size=1))
    def drop(self, index: int, picks: set[int]) -> None:
        session = self.session(index)
        gone = [segment for place, (segment, _) in enumerate(session.held) if place in picks]
        before = session.view
        session.view = before.without(gone)
        session.held = [(segment, at) for segment, at in session.held if segment not in gone]
        assert session.view.next_position == before.next_position
        self.store.release(gone)
        self.forget_released()

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3))
    def close_up(self, index: int) -> None:
        session = self.session(index)
        session.view = session.view.closed_up()
        position = 0
        for place, (segment, _) in enumerate(session.held):
            session.held[place] = (segment, position)
            position += len(segment)
        assert session.view.next_position == position

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3), slack=st.integers(0, 3))
    def fold(self, index: int, slack: int) -> None:
        session = self.session(index)
        longest = max((len(segment) for segment, _ in session.held), default=1)
        num_positions = 4 * longest + slack
        session.view = session.view.folded(num_positions)
        assert session.view.next_position <= num_positions * 3 / 4
        session.held = [(entry.segment, entry.position) for entry in session.view.entries]

    @precondition(lambda self: any(session.held for session in self.sessions))
    @rule(index=st.integers(0, 3), shift=st.integers(0, 40), gap=st.integers(0, 3))
    def place(self, index: int, shift: int, gap: int) -> None:
        """Give every other segment a place of its own."""
        session = self.session(index)
        offsets: dict[SegmentKey, int] = {}
        for place, (segment, _) in list(enumerate(session.held))[::2]:
            offsets[segment.key] = shift - segment.position
            session.held[place] = (segment, shift)
        end = max((at + len(segment) for segment, at in session.held), default=0)
        session.view = session.view.placed(offsets, end + gap)

    def forget_released(self) -> None:
        live = {slot for segment in self.segments for slot in slots_of(segment)}
        self.payload = {slot: serial for slot, serial in self.payload.items() if slot in live}

    @property
    def num_free_pages(self) -> int:
        """By the model alone: pages with tokens, open pages, and whole pages reserved."""
        open_pages = {s.last_slot // PAGE_TOKENS for s in self.sessions if s.last_slot is not None}
        pages = open_pages | {slot // PAGE_TOKENS for slot in self.payload}
        return self.pool.num_pages - len(pages) - sum(session.room // PAGE_TOKENS for session in self.sessions)

    @invariant()
    def counts_are_exact(self) -> None:
        self.pool.check()
        self.store.check()
        assert self.pool.num_used_slots == self.store.num_live_tokens == len(self.payload)
        assert self.pool.num_free_pages == self.num_free_pages
        assert len(self.store) == len(self.segments)
        assert self.store.num_runs == sum(len(segment.extents) for segment in self.segments)
        for session in self.sessions:
            assert session.writer.room_tokens == session.room
        for segment in self.segments:
            assert segment.owners == sum((segment in session.view.segments) for session in self.sessions)

    @invariant()
    def every_view_reads_its_own_tokens(self) -> None:
        for session in self.sessions:
            session.view.check()
            assert [(entry.segment, entry.position) for entry in session.view.entries] == session.held
            expected = payload_of([segment for segment, _ in session.held], self.payload)
            for layer in range(len(SHAPES)):
                seen = [
                    self.storage.keys[layer][:, run.slot : run.slot + run.length, 0].tolist()[0]
                    for run in session.view.runs
                ]
                assert [number for part in seen for number in part] == expected
            places = [place for run in session.view.runs for place in range(run.position, run.position + run.length)]
            assert places == [at + i for segment, at in session.held for i in range(len(segment))]

    @invariant()
    def a_hash_names_one_thing_seen(self) -> None:
        for session in self.sessions:
            entries = tuple(
                (entry.segment.tokens, entry.segment.position, entry.offset, entry.segment.key)
                for entry in session.view.entries
            )
            seen = (session.view.next_position, entries)
            assert self.seen_by_hash.setdefault(session.view.hash, seen) == seen

    def teardown(self) -> None:
        while getattr(self, "sessions", None):
            self.close(0)
            self.counts_are_exact()
        if hasattr(self, "pool"):
            assert self.pool.num_used_slots == self.pool.num_held_pages == len(self.store) == 0
            assert self.pool.num_free_runs == 1


TestSessionsShareTheCache = Cache.TestCase
TestSessionsShareTheCache.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)


@pytest.fixture
def two_tokens() -> Segment:
    pool = PagePool(1)
    writer = Writer(pool)
    writer.reserve(2)
    return Segment(segment_key((1, 2), 0, ""), (1, 2), 0, tuple(writer.fill(2)))


def test_a_released_segment_cannot_be_held_again(two_tokens: Segment) -> None:
    pool = PagePool(1)
    pool.claim(1)
    pool.use(Extent(0, 2))
    store = SegmentStore(pool)
    store.create(two_tokens)
    store.release([two_tokens])
    assert pool.num_used_slots == 0
    actions: list[Callable[[list[Segment]], None]] = [store.hold, store.release]
    for action in actions:
        with pytest.raises(AssertionError):
            action([two_tokens])


def test_a_segment_must_have_a_slot_for_each_token() -> None:
    store = SegmentStore(PagePool(1))
    for tokens, extents in (((1, 2), (Extent(0, 3),)), ((), ())):
        with pytest.raises(AssertionError):
            store.create(Segment(SegmentKey("k"), tokens, 0, extents))


def test_the_store_notices_a_slot_in_two_segments() -> None:
    store = SegmentStore(PagePool(1))
    store.create(Segment(SegmentKey("a"), (1, 2), 0, (Extent(0, 2),)))
    store.create(Segment(SegmentKey("b"), (3, 4), 2, (Extent(1, 3),)))
    with pytest.raises(AssertionError):
        store.check()
