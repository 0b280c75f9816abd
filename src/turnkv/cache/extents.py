"""Extents: slots handed to one writer, in as few contiguous runs as the pool allows."""

from collections import deque

from turnkv.cache.pages import Extent, PagePool
from turnkv.config import PAGE_TOKENS


class Writer:
    """The right to fill slots one after another: one session's place to append.

    Room is reserved before anything is computed and all at once, so that a request never runs out midway, and
    a message whose length is known lies in one run where the pool has one. What was not filled is given back
    by `trim`, except the rest of the last page, where the session's next message continues.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._room: deque[Extent] = deque()

    @property
    def room_tokens(self) -> int:
        """Slots reserved and not yet filled."""
        return sum(len(extent) for extent in self._room)

    @property
    def pages(self) -> set[int]:
        """Pages with slots reserved and not yet filled."""
        return {page for extent in self._room for page in extent.pages}

    def num_pages_needed(self, num_tokens: int) -> int:
        """Pages that `reserve(num_tokens)` would claim."""
        return -(-max(0, num_tokens - self.room_tokens) // PAGE_TOKENS)

    def reserve(self, num_tokens: int) -> None:
        """See to it that at least `num_tokens` slots are free to fill, or change nothing.

        Raises:
            OutOfPagesError: the pool has fewer free pages. Nothing has changed.
        """
        missing = self.num_pages_needed(num_tokens)
        if missing:
            self._room.extend(self._pool.claim(missing))

    def fill(self, num_tokens: int) -> list[Extent]:
        """Take the next `num_tokens` slots; the caller owns them and releases them to the pool."""
        assert num_tokens <= self.room_tokens, "reserve comes first"
        taken: list[Extent] = []
        while num_tokens:
            extent = self._room.popleft()
            cut = min(extent.stop, extent.start + num_tokens)
            part = Extent(extent.start, cut)
            self._pool.use(part)
            num_tokens -= len(part)
            if cut < extent.stop:
                self._room.appendleft(Extent(cut, extent.stop))
            self._unclaim_filled(part)
            if taken and taken[-1].stop == part.start:
                part = Extent(taken.pop().start, part.stop)
            taken.append(part)
        return taken

    def trim(self) -> None:
        """Give back all reserved pages that nothing has been written to; keep the rest of the open page."""
        kept: deque[Extent] = deque()
        for extent in self._room:
            first_whole = -(-extent.start // PAGE_TOKENS)
            if extent.start % PAGE_TOKENS:
                kept.append(Extent(extent.start, first_whole * PAGE_TOKENS))
            for page in range(first_whole, extent.stop // PAGE_TOKENS):
                self._pool.unclaim(page)
        self._room = kept

    def close(self) -> None:
        """Give back everything not filled."""
        self.trim()
        for extent in self._room:
            self._pool.unclaim(extent.start // PAGE_TOKENS)
        self._room.clear()

    def _unclaim_filled(self, part: Extent) -> None:
        """A page whose last slot is filled needs no claim: its tokens hold it."""
        for page in range(part.start // PAGE_TOKENS, part.stop // PAGE_TOKENS):
            self._pool.unclaim(page)
