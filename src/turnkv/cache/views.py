"""Views: which segments a session's queries see, and at what positions."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from turnkv.cache.segments import Segment
from turnkv.config import PAGE_TOKENS
from turnkv.types import SegmentKey, Tier


@dataclass(frozen=True, slots=True, eq=False)
class TileGroup:
    """Keys of one sequence in one tier and with one offset, by the tiles of 16 slots that hold them. N tiles."""

    tier: Tier
    offset: int
    """What was added to the positions at which the keys were computed."""
    pages: NDArray[np.int32]
    """int32 [N]; a page may come twice, then with different slots."""
    masks: NDArray[np.uint16]
    """uint16 [N], bit i set where slot i of the page holds a key of the group."""
    positions: NDArray[np.int32]
    """int32 [N, 16], virtual positions; 0 where there is no key."""

    @staticmethod
    def of(tier: Tier, offset: int, slots: NDArray[np.int32], positions: NDArray[np.int32]) -> "TileGroup":
        """Group keys by their slots, int32 [M], at virtual positions, int32 [M]; at least one. The order stays."""
        pages, lanes = slots // PAGE_TOKENS, slots % PAGE_TOKENS
        is_first = np.diff(pages, prepend=-1) != 0
        starts = np.flatnonzero(is_first)
        tiles = np.cumsum(is_first) - 1
        at = np.zeros((len(starts), PAGE_TOKENS), dtype=np.int32)
        at[tiles, lanes] = positions
        masks = np.bitwise_or.reduceat(np.left_shift(1, lanes).astype(np.uint16), starts)
        return TileGroup(tier, offset, np.ascontiguousarray(pages[starts]), masks, at)

    @property
    def num_keys(self) -> int:
        """Keys in the group."""
        return int(np.bitwise_count(self.masks).sum())


class Entry(NamedTuple):
    """A segment as a view places it: each key counts as lying `offset` further than where it was computed."""

    segment: Segment
    offset: int

    @property
    def position(self) -> int:
        """Virtual position of the first token."""
        return self.segment.position + self.offset


def max_segment_tokens(num_positions: int) -> int:
    """Tokens that one segment may hold, so that a view can be folded into so many positions."""
    return max(1, num_positions // 4)


@dataclass(frozen=True)
class View:
    """An ordered list of (segment, offset), oldest first. Every change makes another view."""

    entries: tuple[Entry, ...] = ()
    next_position: int = field(default=0)
    """Virtual position of the next token to be computed; at least one past the last key, more after a drop."""

    @cached_property
    def num_tokens(self) -> int:
        """Tokens whose KV a query sees."""
        return sum(len(entry.segment) for entry in self.entries)

    @cached_property
    def tiles(self) -> tuple[TileGroup, ...]:
        """The view as kernels read it."""
        found: dict[tuple[Tier, int], tuple[list[NDArray[np.int32]], list[NDArray[np.int32]]]] = {}
        for entry in self.entries:
            for part in entry.segment.parts:
                slots, positions = found.setdefault((part.tier, entry.offset), ([], []))
                slots.append(part.slots)
                positions.append(part.members + np.int32(entry.position))
        return tuple(
            TileGroup.of(tier, offset, np.concatenate(slots), np.concatenate(positions))
            for (tier, offset), (slots, positions) in found.items()
        )

    @cached_property
    def hash(self) -> str:
        """Digest of all that decides what a query at `next_position` sees."""
        digest = hashlib.sha256(str(self.next_position).encode())
        for entry in self.entries:
            digest.update(f"|{entry.segment.key}{entry.offset:+d}".encode())
        return digest.hexdigest()[:32]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments in order."""
        return tuple(entry.segment for entry in self.entries)

    def extended(self, segments: Sequence[Segment], next_position: int) -> "View":
        """The view with segments computed at the end of it."""
        return View(self.entries + tuple(Entry(segment, 0) for segment in segments), next_position)

    def without(self, segments: Iterable[Segment]) -> "View":
        """The view with these segments dropped. All others stay where they are, and so does `next_position`."""
        gone = set(segments)
        return View(tuple(entry for entry in self.entries if entry.segment not in gone), self.next_position)

    def closed_up(self) -> "View":
        """The view with its ranks closed: the same segments at consecutive virtual positions from 0."""
        entries = []
        position = 0
        for entry in self.entries:
            entries.append(Entry(entry.segment, position - entry.segment.position))
            position += len(entry.segment)
        return View(tuple(entries), position)

    def folded(self, num_positions: int) -> "View":
        """The view in at most three quarters of `num_positions`, whatever its length: the middle shares positions.

        The first quarter of the positions keeps the first segments and the third quarter holds the newest, each in
        order; every segment between ends where the newest begin, so that all distances stay as the model knows them
        (the idea of parallel context windows, Ratner et al., arXiv:2212.10947). No segment may be longer than
        `max_segment_tokens(num_positions)`.
        """
        quarter = max_segment_tokens(num_positions)
        first = self._num_within(self.entries, quarter)
        newest = len(self.entries) - self._num_within(self.entries[first:][::-1], quarter)
        entries = []
        position = 0
        for index, (segment, _) in enumerate(self.entries):
            if first <= index < newest:
                position = 2 * quarter - len(segment)
            elif index == newest:
                position = 2 * quarter
            entries.append(Entry(segment, position - segment.position))
            position += len(segment)
        return View(tuple(entries), position)

    @staticmethod
    def _num_within(entries: Sequence[Entry], num_tokens: int) -> int:
        """How many of the first entries fit into so many tokens together."""
        for index, entry in enumerate(entries):
            num_tokens -= len(entry.segment)
            if num_tokens < 0:
                return index
        return len(entries)

    def replaced(self, segments: Mapping[Segment, Segment]) -> "View":
        """The view with segments exchanged for others of the same tokens, at the same offsets."""
        return View(
            tuple(Entry(segments.get(segment, segment), offset) for segment, offset in self.entries),
            self.next_position,
        )

    def placed(self, offsets: Mapping[SegmentKey, int], next_position: int) -> "View":
        """The view with the given offsets, by segment key; others keep theirs."""
        return View(
            tuple(Entry(segment, offsets.get(segment.key, offset)) for segment, offset in self.entries), next_position
        )

    def check(self) -> None:
        """Assert that keys lie before `next_position` and that tiles hold each token once."""
        for entry in self.entries:
            assert 0 <= entry.position <= self.next_position - len(entry.segment)
        assert sum(group.num_keys for group in self.tiles) == self.num_tokens
