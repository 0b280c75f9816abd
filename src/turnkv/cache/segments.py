"""Segments: the immutable KV of one message's span, shared by counting owners."""

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from turnkv.cache.pages import Extent, PagePool
from turnkv.types import SegmentKey


@dataclass(slots=True, eq=False)
class Segment:
    """KV of consecutive tokens, computed once at consecutive positions. It never changes."""

    key: SegmentKey
    tokens: tuple[int, ...]
    position: int
    """Position at which the first token was computed."""
    extents: tuple[Extent, ...]
    owners: int = field(default=1, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)


def segment_key(tokens: Sequence[int], position: int, view_hash: str, tier: str = "exact") -> SegmentKey:
    """Name a segment by content, position, tier and the view that computed it."""
    digest = hashlib.sha256(f"{tier}|{position}|{view_hash}|".encode())
    digest.update(array("q", tokens).tobytes())
    return SegmentKey(digest.hexdigest()[:32])


class SegmentStore:
    """All live segments. The bytes in use are the sum over them, each counted once however many views hold it."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._live: set[Segment] = set()

    @property
    def num_live_tokens(self) -> int:
        """Tokens held by live segments."""
        return sum(len(segment) for segment in self._live)

    @property
    def num_runs(self) -> int:
        """Extents of all live segments; equal to the number of segments where each lies in one run."""
        return sum(len(segment.extents) for segment in self._live)

    def __len__(self) -> int:
        return len(self._live)

    def create(self, segment: Segment) -> Segment:
        """Take over a segment and the slots of its extents, with one owner."""
        assert sum(len(extent) for extent in segment.extents) == len(segment.tokens) > 0
        assert segment.owners == 1
        self._live.add(segment)
        return segment

    def hold(self, segments: Iterable[Segment]) -> None:
        """Add an owner to each."""
        for segment in segments:
            assert segment.owners > 0, "a released segment cannot come back"
            segment.owners += 1

    def release(self, segments: Iterable[Segment]) -> None:
        """Remove an owner from each; slots that no segment needs go back to the pool."""
        for segment in segments:
            assert segment.owners > 0, segment
            segment.owners -= 1
            if not segment.owners:
                self._live.remove(segment)
                for extent in segment.extents:
                    self._pool.release(extent)

    def check(self) -> None:
        """Assert that no slot is in two segments and that every segment is owned."""
        slots: set[int] = set()
        for segment in self._live:
            assert segment.owners > 0
            assert sum(len(extent) for extent in segment.extents) == len(segment.tokens)
            for extent in segment.extents:
                own = range(extent.start, extent.stop)
                assert slots.isdisjoint(own)
                slots.update(own)
