"""Memory, writers, segments, storage and views together, as several sessions use them at once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby, pairwise

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from turnkv.cache import (
    Extent,
    KVMemory,
    KVStorage,
    LayerKV,
    LayerShape,
    PagePool,
    Part,
    Segment,
    SegmentStore,
    TierPlan,
    TileGroup,
    View,
    Writer,
    segment_key,
    settled_key,
    slots_of,
)
from turnkv.config import PAGE_TOKENS
from turnkv.errors import OutOfPagesError, OverBudgetError
from turnkv.types import EXACT, SegmentKey, Tier

SHAPES = (
    LayerShape(num_heads=2, key_dim=8, value_dim=8),
    LayerShape(num_heads=1, key_dim=8, value_dim=16),
)
INT8, MIXED = Tier("int8", "int8"), Tier("int8", "int4")
TIERS = (EXACT, INT8, MIXED)
PLANS = {tier: TierPlan.of(tier, SHAPES, torch.float32, frozenset({1} if tier == MIXED else ())) for tier in TIERS}
"""The last tier is exact in one layer."""
PAGE_BYTES = {
    EXACT: 16 * 4 * (2 * 16 + 24),
    INT8: 2 * (128 + 128 + 64) + (128 + 256 + 64),
    MIXED: 2 * (128 + 64 + 64) + 16 * 4 * 24,
}


@dataclass
class ModelWriter:
    """What the test believes about a writer."""

    writer: Writer
    room: int = 0
    last_slot: int | None = None
    """The last slot that it filled, while a rest of that page is reserved."""


@dataclass
class ModelSession:
    """What the test believes about one session: a writer per tier, and a view."""

    writers: dict[Tier, ModelWriter]
    view: View = field(default_factory=View)
    held: list[tuple[Segment, int]] = field(default_factory=list)
    """Segments and the virtual position of each one's first token."""


def signs(serials: list[int]) -> torch.Tensor:
    """[N, 16]: a number's bits as -1 and 1. So large that no tier takes one for the other."""
    return torch.tensor([[1.0 if serial >> bit & 1 else -1.0 for bit in range(16)] for serial in serials])


def serials_of(keys: torch.Tensor, values: torch.Tensor) -> list[int]:
    """Numbers of the tokens whose keys [N, D] and values [N, E] these are."""
    is_set = torch.cat([keys, values[:, :8]], dim=-1) > 0
    return (is_set.long() << torch.arange(16)).sum(dim=-1).tolist()


def serials_in(kv: LayerKV, group: TileGroup) -> list[tuple[int, int]]:
    """(virtual position, number) of each key of a group, from memory; all heads agree."""
    keys, values = kv.read(group.tier, torch.from_numpy(group.pages).long())
    lanes = [i for i in range(16 * len(group.pages)) if group.masks[i // 16] >> (i % 16) & 1]
    found = [serials_of(k[lanes], v[lanes]) for k, v in zip(keys, values, strict=True)]
    assert all(head == found[0] for head in found)
    return list(zip(group.positions.flatten()[lanes].tolist(), found[0], strict=True))


class Cache(RuleBasedStateMachine):
    """Sessions append, settle, fork, drop, shift and close in any order, under a budget of bytes.

    Every token has a serial number, which is written into the storage as its KV.
    """

    @initialize(num_pages=st.integers(1, 12), slack=st.integers(0, 3000))
    def start(self, num_pages: int, slack: int) -> None:
        budget_bytes = num_pages * PAGE_BYTES[EXACT] + slack
        storage = KVStorage(PLANS, KVMemory.num_pages(PLANS, budget_bytes), torch.device("cpu"))
        self.memory = KVMemory(PLANS, budget_bytes, storage)
        self.store = self.memory.store
        self.sessions: list[ModelSession] = []
        self.serials: dict[Segment, list[int]] = {}
        """Number of each token."""
        self.tiers: dict[Segment, list[Tier]] = {}
        self.by_key: dict[SegmentKey, Segment] = {}
        """The segment made last of those with a key."""
        self.serial = 0
        self.seen_by_hash: dict[str, object] = {}

    def session(self, index: int) -> ModelSession:
        return self.sessions[index % len(self.sessions)]

    def new_session(self) -> ModelSession:
        return ModelSession({tier: ModelWriter(Writer(self.memory.pools[tier])) for tier in TIERS})

    @property
    def segments(self) -> set[Segment]:
        return {segment for session in self.sessions for segment, _ in session.held}

    @property
    def writers(self) -> list[tuple[Tier, ModelWriter]]:
        return [(tier, writer) for session in self.sessions for tier, writer in session.writers.items()]

    @precondition(lambda self: len(self.sessions) < 4)
    @rule()
    def open(self) -> None:
        self.sessions.append(self.new_session())

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3), tier=st.sampled_from([EXACT, *TIERS]), num_tokens=st.integers(0, 70))
    def reserve(self, index: int, tier: Tier, num_tokens: int) -> None:
        self.try_reserve(self.session(index).writers[tier], tier, num_tokens)

    def try_reserve(self, model: ModelWriter, tier: Tier, num_tokens: int) -> bool:
        num_pages = -(-max(0, num_tokens - model.room) // PAGE_TOKENS)
        assert model.writer.num_pages_needed(num_tokens) == num_pages
        if num_pages > self.num_free_pages(tier):
            with pytest.raises(OutOfPagesError):
                model.writer.reserve(num_tokens)
            return False
        model.writer.reserve(num_tokens)
        model.room += num_pages * PAGE_TOKENS
        assert self.memory.budget.touched_bytes <= self.memory.budget.total_bytes
        return True

    def fill(self, model: ModelWriter, tier: Tier, count: int) -> tuple[Extent, ...]:
        extents = model.writer.fill(count)
        slots = [slot for extent in extents for slot in range(extent.start, extent.stop)]
        assert len(slots) == len(set(slots)) == count
        assert self.used_slots[tier].isdisjoint(slots)
        assert all(a.stop != b.start for a, b in pairwise(extents))
        if model.last_slot is not None:
            assert slots[0] == model.last_slot + 1
        model.room -= count
        model.last_slot = slots[-1] if slots[-1] % PAGE_TOKENS != PAGE_TOKENS - 1 else None
        return tuple(extents)

    @precondition(lambda self: any(session.writers[EXACT].room for session in self.sessions))
    @rule(index=st.integers(0, 3), share=st.integers(1, 20), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def append(self, index: int, share: int, tokens: list[int]) -> None:
        """Fill part of the room of a session and make a segment of it."""
        able = [session for session in self.sessions if session.writers[EXACT].room]
        session = able[index % len(able)]
        model = session.writers[EXACT]
        count = max(1, model.room * min(share, 10) // 10)
        extents = self.fill(model, EXACT, count)
        serials = [(self.serial + i) * 7919 % 2**16 for i in range(count)]
        self.serial += count
        bits = signs(serials)
        for layer, shape in enumerate(SHAPES):
            key = bits[None, :, :8].expand(shape.num_heads, -1, -1)
            value = bits[None, :, 8:].repeat(shape.num_heads, 1, shape.value_dim // 8)
            self.memory.storage.write(layer, slots_of(extents), key, value)
        content = tuple(tokens[i % len(tokens)] for i in range(count))
        position = session.view.next_position
        segment = Segment.exact(segment_key(content, position, session.view.hash), content, position, extents)
        self.add(segment, serials, [EXACT] * count)
        session.view = session.view.extended([segment], position + count)
        session.held.append((segment, position))

    def add(self, segment: Segment, serials: list[int], tiers: list[Tier]) -> None:
        assert self.store.create(segment) is segment
        assert segment.tiers == tiers
        self.serials[segment], self.tiers[segment] = serials, tiers
        self.by_key[segment.key] = segment

    @precondition(lambda self: any(session.held for session in self.sessions))
    @rule(
        index=st.integers(0, 3),
        pick=st.integers(0, 7),
        pattern=st.lists(st.sampled_from(TIERS), min_size=1, max_size=5),
        run=st.integers(1, 20),
    )
    def settle(self, index: int, pick: int, pattern: list[Tier], run: int) -> None:
        """Store a segment again, each run of tokens in a tier; or share what another session made of the same."""
        able = [session for session in self.sessions if session.held]
        session = able[index % len(able)]
        place = pick % len(session.held)
        old, at = session.held[place]
        tiers = [pattern[i // run % len(pattern)] for i in range(len(old))]
        key = settled_key(old.key, [(len(list(same)), tier) for tier, same in groupby(tiers)])
        new = self.store.find(key)
        assert new is self.by_key.get(key)
        if new is None:
            new = self.stored_again(session, old, key, tiers)
            if new is None:
                return
        before = session.view
        session.view = before.replaced({old: new})
        session.held[place] = (new, at)
        assert session.view.next_position == before.next_position
        self.store.release([old])
        self.forget_released()

    def stored_again(self, session: ModelSession, old: Segment, key: SegmentKey, tiers: list[Tier]) -> Segment | None:
        wanted = {tier: [i for i, own in enumerate(tiers) if own == tier] for tier in dict.fromkeys(tiers)}
        if not all(self.try_reserve(session.writers[tier], tier, len(m)) for tier, m in wanted.items()):
            return None
        parts = []
        for tier, members in wanted.items():
            part = Part(tier, self.fill(session.writers[tier], tier, len(members)), np.array(members, dtype=np.int32))
            for source in old.parts:
                is_from, is_to = np.isin(source.members, part.members), np.isin(part.members, source.members)
                if is_from.any():
                    self.memory.storage.settle(source.tier, source.slots[is_from], tier, part.slots[is_to])
            parts.append(part)
        new = Segment(key, old.tokens, old.position, tuple(parts))
        self.add(new, self.serials[old], tiers)
        return new

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3), tier=st.sampled_from(TIERS))
    def trim(self, index: int, tier: Tier) -> None:
        model = self.session(index).writers[tier]
        model.writer.trim()
        model.room %= PAGE_TOKENS

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3))
    def close_writers(self, index: int) -> None:
        """What a session does when it is interrupted: it gives its room back and may append again later."""
        for model in self.session(index).writers.values():
            model.writer.close()
            model.room, model.last_slot = 0, None

    @precondition(lambda self: self.sessions)
    @rule(index=st.integers(0, 3))
    def close(self, index: int) -> None:
        session = self.session(index)
        for model in session.writers.values():
            model.writer.close()
        self.store.release(session.view.segments)
        self.sessions.remove(session)
        self.forget_released()

    @precondition(lambda self: 0 < len(self.sessions) < 4)
    @rule(index=st.integers(0, 3))
    def fork(self, index: int) -> None:
        parent = self.session(index)
        self.store.hold(parent.view.segments)
        child = self.new_session()
        child.view, child.held = parent.view, parent.held[:]
        self.sessions.append(child)

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

    @rule()
    def give_back(self) -> None:
        """Memory of free pages goes back to the system: what is held is still there, and no more is committed."""
        self.memory.give_back()
        assert self.memory.budget.touched_bytes == self.memory.budget.held_bytes

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
        live = self.segments
        self.serials = {segment: own for segment, own in self.serials.items() if segment in live}
        self.tiers = {segment: own for segment, own in self.tiers.items() if segment in live}
        self.by_key = {key: segment for key, segment in self.by_key.items() if segment in live}

    @property
    def used_slots(self) -> dict[Tier, set[int]]:
        used: dict[Tier, set[int]] = {tier: set() for tier in TIERS}
        for segment in self.segments:
            for part in segment.parts:
                for extent in part.extents:
                    used[part.tier].update(range(extent.start, extent.stop))
        return used

    @property
    def num_held_pages(self) -> dict[Tier, int]:
        """By the model alone: pages with tokens, open pages, and whole pages reserved."""
        found = {}
        for tier, slots in self.used_slots.items():
            own = [model for other, model in self.writers if other == tier]
            pages = {m.last_slot // PAGE_TOKENS for m in own if m.last_slot is not None}
            pages |= {slot // PAGE_TOKENS for slot in slots}
            found[tier] = len(pages) + sum(model.room // PAGE_TOKENS for model in own)
        return found

    @property
    def held_bytes(self) -> int:
        return sum(count * PAGE_BYTES[tier] for tier, count in self.num_held_pages.items())

    def num_free_pages(self, tier: Tier) -> int:
        budget_bytes = self.memory.budget.total_bytes
        num_pages = budget_bytes // PAGE_BYTES[tier]
        return min(num_pages - self.num_held_pages[tier], (budget_bytes - self.held_bytes) // PAGE_BYTES[tier])

    @invariant()
    def counts_are_exact(self) -> None:
        self.memory.check()
        segments = self.segments
        assert self.memory.budget.held_bytes == self.held_bytes <= self.memory.budget.total_bytes
        assert self.memory.budget.touched_bytes >= self.held_bytes
        for tier, pool in self.memory.pools.items():
            assert pool.num_used_slots == sum(own.count(tier) for own in self.tiers.values())
            assert pool.num_held_pages == self.num_held_pages[tier]
            assert pool.num_free_pages == self.num_free_pages(tier)
        assert self.store.num_live_tokens == sum(len(own) for own in self.serials.values())
        live_bytes = sum(PAGE_BYTES[tier] // 16 for own in self.tiers.values() for tier in own)
        assert self.memory.live_bytes == live_bytes == sum(map(self.memory.segment_bytes, segments))
        assert len(self.store) == len(segments)
        assert self.store.num_parts == sum(len(set(own)) for own in self.tiers.values())
        assert self.store.num_runs == sum(len(part.extents) for segment in segments for part in segment.parts)
        for _, model in self.writers:
            assert model.writer.room_tokens == model.room
        for segment in segments:
            assert segment.owners == sum((segment in session.view.segments) for session in self.sessions)

    @invariant()
    def every_view_reads_its_own_tokens(self) -> None:
        for session in self.sessions:
            session.view.check()
            assert [(entry.segment, entry.position) for entry in session.view.entries] == session.held
            expected: dict[tuple[Tier, int], list[tuple[int, int]]] = {}
            for segment, at in session.held:
                for i, (tier, serial) in enumerate(zip(self.tiers[segment], self.serials[segment], strict=True)):
                    expected.setdefault((tier, at - segment.position), []).append((at + i, serial))
            for kv in self.memory.storage.layers:
                found = {(group.tier, group.offset): sorted(serials_in(kv, group)) for group in session.view.tiles}
                assert found == {group: sorted(keys) for group, keys in expected.items()}

    @invariant()
    def segments_are_found_by_their_keys(self) -> None:
        for segment in self.segments:
            found = self.store.find(segment.key)
            assert found is self.by_key.get(segment.key)
            self.store.release([] if found is None else [found])
        assert self.store.find(SegmentKey("none of them")) is None

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
        if hasattr(self, "memory"):
            assert self.memory.budget.held_bytes == self.memory.live_bytes == len(self.store) == 0
            assert all(pool.num_free_runs == 1 for pool in self.memory.pools.values())
            self.give_back()
            assert self.memory.budget.touched_bytes == 0


TestSessionsShareTheCache = Cache.TestCase
TestSessionsShareTheCache.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_the_page_bytes_of_the_machine_are_the_plans() -> None:
    assert {tier: plan.page_bytes for tier, plan in PLANS.items()} == PAGE_BYTES


def test_a_budget_smaller_than_a_page_is_refused_with_the_bytes_of_one() -> None:
    with pytest.raises(OverBudgetError, match="3,584"):
        KVMemory.num_pages(PLANS, PAGE_BYTES[EXACT] - 1)
    assert KVMemory.num_pages(PLANS, 10_000) == {EXACT: 2, INT8: 9, MIXED: 4}


def test_memory_is_given_back_before_more_is_committed_than_the_budget() -> None:
    """A turn that settles leaves exact pages behind: the system may count them as used until they are given back."""
    shapes = [LayerShape(num_heads=4, key_dim=64, value_dim=64)]
    plans = {tier: TierPlan.of(tier, shapes, torch.float32) for tier in (EXACT, INT8)}
    budget_bytes = 2 * plans[EXACT].page_bytes
    memory = KVMemory(
        plans, budget_bytes, KVStorage(plans, KVMemory.num_pages(plans, budget_bytes), torch.device("cpu"))
    )
    exact, settled = Writer(memory.pools[EXACT]), Writer(memory.pools[INT8])
    exact.reserve(32)
    extents = exact.fill(32)
    memory.storage.write(0, slots_of(extents), torch.ones(4, 32, 64), torch.ones(4, 32, 64))
    for extent in extents:
        memory.pools[EXACT].release(extent)
    assert memory.budget.touched_bytes == budget_bytes
    settled.reserve(16)
    assert memory.budget.touched_bytes == memory.budget.held_bytes == plans[INT8].page_bytes
    assert not memory.storage.layers[0].arenas[EXACT].any()


@pytest.fixture
def two_tokens() -> Segment:
    pool = PagePool(1)
    writer = Writer(pool)
    writer.reserve(2)
    return Segment.exact(segment_key((1, 2), 0, ""), (1, 2), 0, tuple(writer.fill(2)))


def test_a_released_segment_cannot_be_held_again(two_tokens: Segment) -> None:
    pool = PagePool(1)
    pool.claim(1)
    pool.use(Extent(0, 2))
    store = SegmentStore({EXACT: pool})
    store.create(two_tokens)
    store.release([two_tokens])
    assert pool.num_used_slots == 0
    actions: list[Callable[[list[Segment]], None]] = [store.hold, store.release]
    for action in actions:
        with pytest.raises(AssertionError):
            action([two_tokens])


def test_a_segment_must_have_a_slot_for_each_token() -> None:
    store = SegmentStore({EXACT: PagePool(1)})
    part = Part(EXACT, (Extent(0, 3),), np.arange(3, dtype=np.int32))
    for tokens, parts in (((1, 2), (part,)), ((1, 2, 3, 4), (part,)), ((), ())):
        with pytest.raises(AssertionError):
            store.create(Segment(SegmentKey("k"), tokens, 0, parts))
    with pytest.raises(AssertionError):
        Segment.exact(SegmentKey("k"), (1, 2), 0, (Extent(0, 3),))


def segment_in(tier: Tier, key: str, extent: Extent) -> Segment:
    members = np.arange(len(extent), dtype=np.int32)
    return Segment(SegmentKey(key), (0,) * len(extent), 0, (Part(tier, (extent,), members),))


def test_the_store_notices_a_slot_in_two_segments() -> None:
    store = SegmentStore({tier: PagePool(1) for tier in TIERS})
    store.create(segment_in(INT8, "a", Extent(0, 2)))
    store.create(segment_in(MIXED, "b", Extent(1, 3)))
    store.check()
    store.create(segment_in(INT8, "c", Extent(1, 3)))
    with pytest.raises(AssertionError):
        store.check()


def test_the_store_notices_a_token_stored_twice_or_not_at_all() -> None:
    store = SegmentStore({tier: PagePool(1) for tier in TIERS})
    first = Part(EXACT, (Extent(0, 2),), np.array([0, 1], dtype=np.int32))
    second = Part(INT8, (Extent(0, 1),), np.array([1], dtype=np.int32))
    store.create(Segment(SegmentKey("k"), (1, 2, 3), 0, (first, second)))
    with pytest.raises(AssertionError):
        store.check()


def test_of_two_segments_with_a_key_the_one_made_last_is_found_while_it_lives() -> None:
    pool = PagePool(1)
    pool.claim(1)
    pool.use(Extent(0, 4))
    store = SegmentStore({EXACT: pool})
    first, second = (store.create(segment_in(EXACT, "k", Extent(i, i + 2))) for i in (0, 2))
    assert store.find(SegmentKey("k")) is second
    assert (first.owners, second.owners) == (1, 2)
    store.release([first])
    assert store.find(SegmentKey("k")) is second
    store.release([second, second, second])
    assert store.find(SegmentKey("k")) is None
    assert pool.num_used_slots == 0
