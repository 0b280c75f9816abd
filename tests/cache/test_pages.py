from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from turnkv.cache import Budget, Extent, PagePool
from turnkv.config import PAGE_TOKENS
from turnkv.errors import OutOfPagesError


def runs_in(pages: set[int]) -> list[range]:
    """Maximal runs of adjacent pages."""
    starts = sorted(page for page in pages if page - 1 not in pages)
    stops = sorted(page + 1 for page in pages if page + 1 not in pages)
    return [range(start, stop) for start, stop in zip(starts, stops, strict=True)]


def fewest_runs(pages: set[int], count: int) -> int:
    """The smallest number of runs that hold `count` pages, by trying every choice."""
    runs = runs_in(pages)
    return next(
        size
        for size in range(len(runs) + 1)
        if any(sum(map(len, choice)) >= count for choice in combinations(runs, size))
    )


@dataclass
class Known:
    """What the test believes about one pool."""

    pool: PagePool
    claimed: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)
    """Slots that hold a token."""
    touched: set[int] = field(default_factory=set)
    """Pages claimed since they were last given back."""

    @property
    def free(self) -> set[int]:
        return set(range(self.pool.num_pages)) - self.claimed - {slot // PAGE_TOKENS for slot in self.used}

    @property
    def held_bytes(self) -> int:
        return (self.pool.num_pages - len(self.free)) * self.pool.page_bytes


class Pools(RuleBasedStateMachine):
    """Pages of several pools are claimed, filled, unclaimed and released in any order; the model is three sets each.

    The pools share a budget of bytes, at times too small for all their pages.
    """

    @initialize(
        pages=st.lists(st.tuples(st.integers(0, 14), st.sampled_from([1, 3, 7])), min_size=1, max_size=3),
        share=st.sampled_from([1.0, 1.0, 0.7, 0.4]),
    )
    def start(self, pages: list[tuple[int, int]], share: float) -> None:
        self.budget = Budget(int(share * sum(count * size for count, size in pages)))
        self.known = [Known(PagePool(count, size, self.budget)) for count, size in pages]

    @property
    def free_bytes(self) -> int:
        return self.budget.total_bytes - sum(known.held_bytes for known in self.known)

    def num_free(self, known: Known) -> int:
        return min(len(known.free), self.free_bytes // known.pool.page_bytes)

    @rule(index=st.integers(0, 2), count=st.integers(0, 8))
    def claim(self, index: int, count: int) -> None:
        known = self.known[index % len(self.known)]
        pool, free, num_free = known.pool, known.free, self.num_free(known)
        if count > num_free:
            with pytest.raises(OutOfPagesError, match=rf"^{count} pages .* {num_free} of {pool.num_pages} "):
                pool.claim(count)
            return
        extents = pool.claim(count)
        assert all(extent.start % PAGE_TOKENS == extent.stop % PAGE_TOKENS == 0 < len(extent) for extent in extents)
        pages = [page for extent in extents for page in extent.pages]
        assert len(pages) == len(set(pages)) == count
        assert set(pages) <= free
        assert len(extents) == fewest_runs(free, count)
        fitting = [start for start in free if free.issuperset(range(start, start + count))]
        assert not count or not fitting or pages[0] == min(fitting), "the lowest run that fits"
        known.claimed.update(pages)
        known.touched.update(pages)

    @precondition(lambda self: any(known.claimed for known in self.known))
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from([known for known in self.known if known.claimed]))
        page = data.draw(st.sampled_from(sorted(known.claimed)))
        slots = range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
        first = next((slot for slot in slots if known.used.isdisjoint(range(slot, slots.stop))), slots.stop)
        if first < slots.stop:
            stop = data.draw(st.integers(first + 1, slots.stop))
            known.pool.use(Extent(first, stop))
            known.used.update(range(first, stop))

    @precondition(lambda self: any(known.used for known in self.known))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from([known for known in self.known if known.used]))
        first = data.draw(st.sampled_from(sorted(known.used)))
        longest = next(stop for stop in range(first + 1, max(known.used) + 2) if stop not in known.used)
        stop = data.draw(st.integers(first + 1, longest))
        known.pool.release(Extent(first, stop))
        known.used.difference_update(range(first, stop))

    @precondition(lambda self: any(known.claimed for known in self.known))
    @rule(data=st.data())
    def unclaim(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from([known for known in self.known if known.claimed]))
        page = data.draw(st.sampled_from(sorted(known.claimed)))
        known.pool.unclaim(page)
        known.claimed.remove(page)

    @rule(index=st.integers(0, 2))
    def untouch(self, index: int) -> None:
        known = self.known[index % len(self.known)]
        extents = known.pool.untouch()
        pages = {page for extent in extents for page in extent.pages}
        assert all(extent.start % PAGE_TOKENS == extent.stop % PAGE_TOKENS == 0 for extent in extents)
        assert pages <= known.free, "nothing held is given back"
        assert pages >= known.touched & known.free, "all that is free is"
        assert {page for extent in extents for page in extent.pages if known.touched.isdisjoint(extent.pages)} == set()
        known.touched -= known.free
        assert known.pool.untouch() == []

    @invariant()
    def agrees_with_the_model(self) -> None:
        for known in self.known:
            known.pool.check()
            assert known.pool.num_used_slots == len(known.used)
            assert known.pool.num_free_pages == self.num_free(known)
            assert known.pool.num_held_pages == known.pool.num_pages - len(known.free)
            assert known.pool.num_free_runs == len(runs_in(known.free))

    @invariant()
    def the_budget_is_never_passed(self) -> None:
        assert self.budget.held_bytes == sum(known.held_bytes for known in self.known) <= self.budget.total_bytes
        assert self.budget.free_bytes == self.free_bytes
        touched = sum(len(known.touched) * known.pool.page_bytes for known in self.known)
        assert self.budget.touched_bytes == touched >= self.budget.held_bytes

    def teardown(self) -> None:
        for known in getattr(self, "known", []):
            for page in known.claimed:
                known.pool.unclaim(page)
            for slot in known.used:
                known.pool.release(Extent(slot, slot + 1))
            known.pool.check()
            known.pool.untouch()
            assert known.pool.num_used_slots == known.pool.num_held_pages == 0
            assert known.pool.num_free_runs == min(1, known.pool.num_pages)
        if hasattr(self, "budget"):
            assert self.budget.held_bytes == self.budget.touched_bytes == 0


TestPoolsKeepCountOfEveryPage = Pools.TestCase
TestPoolsKeepCountOfEveryPage.settings = settings(max_examples=250, stateful_step_count=30, deadline=None)


def test_a_pool_may_not_take_what_another_holds_of_the_budget() -> None:
    budget = Budget(100)
    large, small = PagePool(10, 10, budget), PagePool(33, 3, budget)
    small.claim(20)
    assert (large.num_free_pages, small.num_free_pages) == (4, 13)
    with pytest.raises(OutOfPagesError, match="4 of 10"):
        large.claim(5)
    assert (budget.held_bytes, budget.touched_bytes) == (60, 60)
    large.claim(4)
    assert (budget.free_bytes, large.num_free_pages, small.num_free_pages) == (0, 0, 0)
    small.unclaim(3)
    assert (budget.free_bytes, large.num_free_pages, small.num_free_pages) == (3, 0, 1)
    assert (budget.held_bytes, budget.touched_bytes) == (97, 100)


def test_pages_claimed_again_are_touched_once() -> None:
    pool = PagePool(8, 5)
    for _ in range(3):
        (extent,) = pool.claim(4)
        for page in extent.pages:
            pool.unclaim(page)
    assert pool.budget.touched_bytes == 20
    pool.claim(2)
    assert pool.untouch() == [Extent(2 * PAGE_TOKENS, 8 * PAGE_TOKENS)]
    assert pool.budget.touched_bytes == pool.budget.held_bytes == 10


def test_the_lowest_run_that_is_large_enough_is_taken() -> None:
    pool = PagePool(10)
    pool.claim(10)
    for page in (0, 2, 3, 4, 7, 8):
        pool.unclaim(page)
    assert pool.claim(2) == [Extent(2 * PAGE_TOKENS, 4 * PAGE_TOKENS)]


def test_memory_touched_stays_near_what_is_held_however_many_messages_come_and_go() -> None:
    pool = PagePool(1000)
    held: list[Extent] = []
    highest = 0
    for number in range(200):
        [extent] = pool.claim(1 + number % 3)
        held.append(extent)
        highest = max(highest, extent.stop)
        if len(held) > 8:
            for page in held.pop(0).pages:
                pool.unclaim(page)
    assert highest <= 2 * 9 * 3 * PAGE_TOKENS


def test_filling_a_page_that_nobody_claimed_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        PagePool(1).use(Extent(0, 1))


def test_filling_a_slot_twice_is_a_bug() -> None:
    pool = PagePool(1)
    pool.claim(1)
    pool.use(Extent(0, PAGE_TOKENS))
    with pytest.raises(AssertionError):
        pool.use(Extent(3, 4))


def test_releasing_more_than_was_used_is_a_bug() -> None:
    pool = PagePool(1)
    pool.claim(1)
    pool.use(Extent(0, 1))
    with pytest.raises(AssertionError):
        pool.release(Extent(0, 2))
