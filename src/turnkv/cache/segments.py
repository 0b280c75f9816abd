"""Segments: the immutable KV of one message's span, shared by counting owners."""

import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from turnkv.cache.pages import Extent, PagePool
from turnkv.types import EXACT, SegmentKey, Tier


@dataclass(frozen=True, eq=False)
class Part:
    """Those tokens of a segment that are stored in one tier, and where."""

    tier: Tier
    extents: tuple[Extent, ...]
    members: NDArray[np.int32]
    """Which of the segment's tokens, ascending, int32 [N]."""
    slots: NDArray[np.int32] = field(init=False, repr=False)
    """Slot of each member, int32 [N]."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "slots", slots_of(self.extents))
        assert len(self.slots) == len(self.members) > 0

    def __len__(self) -> int:
        return len(self.members)


@dataclass(slots=True, eq=False)
class Segment:
    """KV of consecutive tokens, computed once at consecutive positions. It never changes.

    As computed it is exact; one that was settled may hold each token in a tier of its own.
    """

    key: SegmentKey
    tokens: tuple[int, ...]
    position: int
    """Position at which the first token was computed."""
    parts: tuple[Part, ...]
    owners: int = field(default=1, repr=False)

    @staticmethod
    def exact(key: SegmentKey, tokens: tuple[int, ...], position: int, extents: tuple[Extent, ...]) -> "Segment":
        """A segment as it is computed."""
        return Segment(key, tokens, position, (Part(EXACT, extents, np.arange(len(tokens), dtype=np.int32)),))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def tiers(self) -> list[Tier]:
        """The tier of each token."""
        found = [EXACT] * len(self.tokens)
        for part in self.parts:
            for member in part.members.tolist():
                found[member] = part.tier
        return found

    @property
    def num_runs(self) -> int:
        """Contiguous runs of slots that it lies in."""
        return sum(len(part.extents) for part in self.parts)


def slots_of(extents: Iterable[Extent]) -> NDArray[np.int32]:
    """All slots of extents in order, int32 [N]."""
    runs = [np.arange(extent.start, extent.stop, dtype=np.int32) for extent in extents]
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int32)


def segment_key(tokens: Sequence[int], position: int, view_hash: str) -> SegmentKey:
    """Name an exact segment by content, position and the view that computed it."""
    digest = hashlib.sha256(f"exact|{position}|{view_hash}|".encode())
    digest.update(array("q", tokens).tobytes())
    return SegmentKey(digest.hexdigest()[:32])


def settled_key(key: SegmentKey, tiers: Iterable[tuple[int, Tier]]) -> SegmentKey:
    """Name what a segment settles to: `(count, tier)` for runs of its tokens in order."""
    digest = hashlib.sha256(key.encode())
    for count, tier in tiers:
        digest.update(f"|{count}{tier.keys}/{tier.values}".encode())
    return SegmentKey(digest.hexdigest()[:32])


class SegmentStore:
    """All live segments. The bytes in use are the sum over them, each counted once however many views hold it."""

    def __init__(self, pools: Mapping[Tier, PagePool]) -> None:
        self._pools = pools
        self._live: set[Segment] = set()
        self._by_key: dict[SegmentKey, Segment] = {}

    @property
    def num_live_tokens(self) -> int:
        """Tokens held by live segments."""
        return sum(len(segment) for segment in self._live)

    @property
    def num_runs(self) -> int:
        """Runs of slots of all live segments; equal to the number of their parts where each lies in one run."""
        return sum(segment.num_runs for segment in self._live)

    @property
    def num_parts(self) -> int:
        """Parts of all live segments."""
        return sum(len(segment.parts) for segment in self._live)

    def __len__(self) -> int:
        return len(self._live)

    def create(self, segment: Segment) -> Segment:
        """Take over a segment and the slots of its parts, with one owner."""
        assert sum(len(part) for part in segment.parts) == len(segment.tokens) > 0
        assert segment.owners == 1
        self._live.add(segment)
        self._by_key[segment.key] = segment
        return segment

    def find(self, key: SegmentKey) -> Segment | None:
        """A live segment of this key, with one more owner; None if there is none."""
        segment = self._by_key.get(key)
        if segment is not None:
            self.hold([segment])
        return segment

    def hold(self, segments: Iterable[Segment]) -> None:
        """Add an owner to each."""
        for segment in segments:
            assert segment.owners > 0, "a released segment cannot come back"
            segment.owners += 1

    def release(self, segments: Iterable[Segment]) -> None:
        """Remove an owner from each; slots that no segment needs go back to their pools."""
        for segment in segments:
            assert segment.owners > 0, segment
            segment.owners -= 1
            if not segment.owners:
                self._live.remove(segment)
                if self._by_key.get(segment.key) is segment:
                    del self._by_key[segment.key]
                for part in segment.parts:
                    for extent in part.extents:
                        self._pools[part.tier].release(extent)

    def check(self) -> None:
        """Assert that no slot is in two segments, and that every segment is owned and has each token once."""
        slots: set[tuple[Tier, int]] = set()
        for segment in self._live:
            assert segment.owners > 0
            members = sorted(member for part in segment.parts for member in part.members.tolist())
            assert members == list(range(len(segment.tokens)))
            for part in segment.parts:
                own = {(part.tier, slot) for slot in part.slots.tolist()}
                assert len(own) == len(part)
                assert slots.isdisjoint(own)
                slots |= own
