from itertools import combinations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from turnkv.cache import Extent, PagePool
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


class Pool(RuleBasedStateMachine):
    """Pages are claimed, filled, unclaimed and released in any order; the model is three sets."""

    @initialize(num_pages=st.integers(0, 14))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.claimed: set[int] = set()
        self.used: set[int] = set()
        """Slots that hold a token."""

    @property
    def free(self) -> set[int]:
        return set(range(self.pool.num_pages)) - self.claimed - {slot // PAGE_TOKENS for slot in self.used}

    @rule(count=st.integers(0, 8))
    def claim(self, count: int) -> None:
        free = self.free
        if count > len(free):
            with pytest.raises(OutOfPagesError, match=rf"^{count} pages .* {len(free)} of {self.pool.num_pages} "):
                self.pool.claim(count)
            return
        extents = self.pool.claim(count)
        assert all(extent.start % PAGE_TOKENS == extent.stop % PAGE_TOKENS == 0 < len(extent) for extent in extents)
        pages = [page for e in extents for page in range(e.start // PAGE_TOKENS, e.stop // PAGE_TOKENS)]
        assert len(pages) == len(set(pages)) == count
        assert set(pages) <= free
        assert len(extents) == fewest_runs(free, count)
        fitting = [start for start in free if free.issuperset(range(start, start + count))]
        assert not count or not fitting or pages[0] == min(fitting), "the lowest run that fits"
        self.claimed.update(pages)

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.claimed)))
        slots = range(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
        first = next((slot for slot in slots if self.used.isdisjoint(range(slot, slots.stop))), slots.stop)
        if first < slots.stop:
            stop = data.draw(st.integers(first + 1, slots.stop))
            self.pool.use(Extent(first, stop))
            self.used.update(range(first, stop))

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        first = data.draw(st.sampled_from(sorted(self.used)))
        longest = next(stop for stop in range(first + 1, max(self.used) + 2) if stop not in self.used)
        stop = data.draw(st.integers(first + 1, longest))
        self.pool.release(Extent(first, stop))
        self.used.difference_update(range(first, stop))

    @precondition(lambda self: self.claimed)
    @rule(data=st.data())
    def unclaim(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.claimed)))
        self.pool.unclaim(page)
        self.claimed.remove(page)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.pool.check()
        assert self.pool.num_used_slots == len(self.used)
        assert self.pool.num_free_pages == len(self.free)
        assert self.pool.num_held_pages == self.pool.num_pages - len(self.free)
        assert self.pool.num_free_runs == len(runs_in(self.free))

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for page in self.claimed:
            self.pool.unclaim(page)
        for slot in self.used:
            self.pool.release(Extent(slot, slot + 1))
        self.pool.check()
        assert self.pool.num_used_slots == self.pool.num_held_pages == 0
        assert self.pool.num_free_runs == min(1, self.pool.num_pages)


TestPoolKeepsCountOfEveryPage = Pool.TestCase
TestPoolKeepsCountOfEveryPage.settings = settings(max_examples=250, stateful_step_count=30, deadline=None)


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
