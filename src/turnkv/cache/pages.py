"""Pages: the unit of allocation, and who still needs each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from turnkv.config import PAGE_TOKENS
from turnkv.errors import OutOfPagesError


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous run of slots `[start, stop)`, never empty."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def pages(self) -> range:
        """Pages that it touches."""
        return range(self.start // PAGE_TOKENS, (self.stop - 1) // PAGE_TOKENS + 1)


class Budget:
    """Bytes that the pools of all tiers may hold together."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.held_bytes = 0
        """Of pages in use or claimed."""
        self.touched_bytes = 0
        """Of pages that were ever claimed, less those given back to the system: what is committed, but for the edges of
        runs given back, which share a page of the system's own with a neighbour."""
        self.relieve: Callable[[], None] = lambda: None
        """Called when a claim has taken `touched_bytes` over the total, to give back what free pages had committed."""

    @property
    def free_bytes(self) -> int:
        """What pools may still claim."""
        return self.total_bytes - self.held_bytes

    def touch(self, num_bytes: int) -> None:
        """Count newly claimed pages as committed; by the time they are written, no more than the total is."""
        self.touched_bytes += num_bytes
        if self.touched_bytes > self.total_bytes:
            self.relieve()


class PagePool:
    """Knows of each page how many of its slots hold tokens and whether a writer has claimed it.

    A page is free when it has neither. Slots are counted rather than owners, so that the sum over pages
    is exactly the number of tokens held, and a slot used twice is found at once. Pools of several tiers share a budget
    of bytes; each has pages enough to use all of it.
    """

    def __init__(self, num_pages: int, page_bytes: int = 1, budget: Budget | None = None) -> None:
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.budget = budget or Budget(num_pages * page_bytes)
        self._is_touched = bytearray(num_pages)
        self._used_slots = [0] * num_pages
        self._is_claimed = bytearray(num_pages)
        self._free_runs: dict[int, int] = {0: num_pages} if num_pages else {}
        self._free_starts: dict[int, int] = {num_pages: 0} if num_pages else {}
        self._num_free = num_pages
        self._num_used_slots = 0

    @property
    def num_free_pages(self) -> int:
        """Pages that `claim` can hand out."""
        return min(self._num_free, self.budget.free_bytes // self.page_bytes)

    @property
    def num_held_pages(self) -> int:
        """Pages in use or claimed."""
        return self.num_pages - self._num_free

    @property
    def num_used_slots(self) -> int:
        """Slots that hold a token."""
        return self._num_used_slots

    @property
    def num_free_runs(self) -> int:
        """Contiguous runs of free pages; 1 when the pool is not fragmented at all."""
        return len(self._free_runs)

    def claim(self, count: int) -> list[Extent]:
        """Hand out `count` pages to a writer, in the fewest contiguous runs, or none at all.

        Of several runs that are long enough the lowest is taken, so that the memory touched stays near what is held
        at once, however many turns come and go.

        Returns:
            Runs of slots, in the order in which to write them.

        Raises:
            OutOfPagesError: fewer than `count` are free. The pool is unchanged.
        """
        if count > self.num_free_pages:
            raise OutOfPagesError(
                f"{count} pages are wanted and {self.num_free_pages} of {self.num_pages} are free; "
                "raise the KV budget, or end a session"
            )
        chosen: list[tuple[int, int]] = []
        lowest = min((start for start, length in self._free_runs.items() if length >= count), default=None)
        if count and lowest is not None:
            chosen.append((lowest, count))
        elif count:
            left = count
            for start, length in sorted(self._free_runs.items(), key=lambda run: (-run[1], run[0])):
                chosen.append((start, min(left, length)))
                left -= chosen[-1][1]
                if not left:
                    break
        for start, length in chosen:
            self._cut_free(start, length)
            self._is_claimed[start : start + length] = b"\1" * length
            num_new = self._is_touched.count(0, start, start + length)
            self._is_touched[start : start + length] = b"\1" * length
            self.budget.touch(num_new * self.page_bytes)
        return [Extent(start * PAGE_TOKENS, (start + length) * PAGE_TOKENS) for start, length in chosen]

    def unclaim(self, page: int) -> None:
        """The writer will put nothing more into this page."""
        assert self._is_claimed[page], page
        self._is_claimed[page] = 0
        self._free_if_idle(page)

    def use(self, extent: Extent) -> None:
        """Count the slots of an extent as holding tokens. Their pages must be claimed."""
        for page, count in _slots_by_page(extent):
            assert self._is_claimed[page], page
            self._used_slots[page] += count
            assert self._used_slots[page] <= PAGE_TOKENS, page
        self._num_used_slots += len(extent)

    def release(self, extent: Extent) -> None:
        """The tokens in these slots are needed no more."""
        for page, count in _slots_by_page(extent):
            self._used_slots[page] -= count
            assert self._used_slots[page] >= 0, page
            self._free_if_idle(page)
        self._num_used_slots -= len(extent)

    def untouch(self) -> list[Extent]:
        """Count free pages as given back to the system, and say which the caller is to give back."""
        runs = []
        for start, length in sorted(self._free_runs.items()):
            stop = start + length
            num_touched = self._is_touched.count(1, start, stop)
            if num_touched:
                runs.append(Extent(start * PAGE_TOKENS, stop * PAGE_TOKENS))
                self.budget.touched_bytes -= num_touched * self.page_bytes
                self._is_touched[start:stop] = bytes(length)
        return runs

    def check(self) -> None:
        """Assert what always holds."""
        free: set[int] = set()
        for start, length in self._free_runs.items():
            assert length > 0
            assert self._free_starts[start + length] == start
            assert start + length not in self._free_runs, "adjacent free runs must be one"
            free.update(range(start, start + length))
        assert len(self._free_runs) == len(self._free_starts)
        assert len(free) == self._num_free
        for page in range(self.num_pages):
            is_idle = not self._used_slots[page] and not self._is_claimed[page]
            assert is_idle == (page in free), page
        assert sum(self._used_slots) == self._num_used_slots

    def _cut_free(self, start: int, length: int) -> None:
        run_length = self._free_runs.pop(start)
        del self._free_starts[start + run_length]
        if run_length > length:
            self._free_runs[start + length] = run_length - length
            self._free_starts[start + run_length] = start + length
        self._num_free -= length
        self.budget.held_bytes += length * self.page_bytes

    def _free_if_idle(self, page: int) -> None:
        if self._used_slots[page] or self._is_claimed[page]:
            return
        start, stop = page, page + 1
        if stop in self._free_runs:
            stop += self._free_runs.pop(stop)
        if start in self._free_starts:
            start = self._free_starts.pop(start)
        self._free_runs[start] = stop - start
        self._free_starts[stop] = start
        self._num_free += 1
        self.budget.held_bytes -= self.page_bytes


def _slots_by_page(extent: Extent) -> Iterator[tuple[int, int]]:
    slot = extent.start
    while slot < extent.stop:
        page = slot // PAGE_TOKENS
        end = min(extent.stop, (page + 1) * PAGE_TOKENS)
        yield page, end - slot
        slot = end
