"""Views: which segments a session's queries see, and at what positions."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from turnkv.cache.segments import Segment
from turnkv.types import SegmentKey


class Run(NamedTuple):
    """Adjacent slots at adjacent virtual positions, with one offset."""

    slot: int
    length: int
    position: int
    """Virtual position of the first key: where it was computed, plus the offset."""
    offset: int
    """What was added to the position at which the keys were computed."""


class Entry(NamedTuple):
    """A segment as a view places it: each key counts as lying `offset` further than where it was computed."""

    segment: Segment
    offset: int

    @property
    def position(self) -> int:
        """Virtual position of the first token."""
        return self.segment.position + self.offset


def runs_of(extents: Iterable[tuple[int, int]], position: int, offset: int = 0) -> list[Run]:
    """Place extents `(start, stop)` one after another from a virtual position on."""
    runs = []
    for start, stop in extents:
        runs.append(Run(start, stop - start, position, offset))
        position += stop - start
    return runs


def coalesce(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Join runs that continue each other in memory, in position and with the same offset."""
    joined: list[Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.slot + last.length == run.slot
            and last.position + last.length == run.position
            and last.offset == run.offset
        ):
            joined[-1] = last._replace(length=last.length + run.length)
        else:
            joined.append(run)
    return tuple(joined)


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
    def runs(self) -> tuple[Run, ...]:
        """The view as kernels read it."""
        return coalesce(
            run
            for entry in self.entries
            for run in runs_of(
                ((extent.start, extent.stop) for extent in entry.segment.extents), entry.position, entry.offset
            )
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

    def placed(self, offsets: Mapping[SegmentKey, int], next_position: int) -> "View":
        """The view with the given offsets, by segment key; others keep theirs."""
        return View(
            tuple(Entry(segment, offsets.get(segment.key, offset)) for segment, offset in self.entries), next_position
        )

    def check(self) -> None:
        """Assert that keys lie before `next_position` and that runs hold each token once."""
        for entry in self.entries:
            assert 0 <= entry.position <= self.next_position - len(entry.segment)
        assert sum(run.length for run in self.runs) == self.num_tokens
