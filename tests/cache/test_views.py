from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkv.cache import Entry, Extent, Run, Segment, View, coalesce, runs_of, segment_key
from turnkv.cache.views import max_segment_tokens


def view_of(lengths: Sequence[int], gaps: Sequence[int] = ()) -> View:
    """A view of segments of these lengths, computed one behind another with gaps before each."""
    view, slot = View(), 0
    for index, length in enumerate(lengths):
        position = view.next_position + (gaps[index] if index < len(gaps) else 0)
        tokens = tuple(range(slot, slot + length))
        key = segment_key(tokens, position, view.hash)
        view = view.extended([Segment(key, tokens, position, (Extent(slot, slot + length),))], position + length)
        slot += length
    return view


lengths = st.lists(st.integers(1, 9), max_size=12)
gaps = st.lists(st.integers(0, 5), max_size=12)


@given(lengths, gaps, st.data())
def test_a_drop_leaves_all_others_untouched(lengths: list[int], gaps: list[int], data: st.DataObject) -> None:
    view = view_of(lengths, gaps)
    gone = {segment for segment in view.segments if data.draw(st.booleans())}
    left = view.without(gone)
    kept = [entry for entry in view.entries if entry.segment not in gone]
    assert [id(entry.segment) for entry in left.entries] == [id(entry.segment) for entry in kept]
    assert [entry.offset for entry in left.entries] == [entry.offset for entry in kept]
    assert left.next_position == view.next_position
    assert left.num_tokens == view.num_tokens - sum(map(len, gone))
    left.check()


@given(lengths, gaps)
def test_closed_ranks_lie_at_consecutive_positions_from_zero(lengths: list[int], gaps: list[int]) -> None:
    view = view_of(lengths, gaps)
    closed = view.closed_up()
    assert closed.segments == view.segments
    places = [entry.position + i for entry in closed.entries for i in range(len(entry.segment))]
    assert places == list(range(view.num_tokens))
    assert closed.next_position == view.num_tokens
    assert closed.closed_up() == closed


@given(st.integers(4, 60), gaps, st.data())
def test_a_fold_keeps_every_token_within_three_quarters(
    num_positions: int, gaps: list[int], data: st.DataObject
) -> None:
    quarter = max_segment_tokens(num_positions)
    view = view_of(data.draw(st.lists(st.integers(1, quarter), max_size=14)), gaps)
    folded = view.folded(num_positions)
    folded.check()
    assert folded.segments == view.segments
    assert 4 * folded.next_position <= 3 * num_positions
    assert folded.next_position == max((e.position + len(e.segment) for e in folded.entries), default=0)

    first = [entry for entry in folded.entries if entry.position + len(entry.segment) <= quarter]
    newest = [entry for entry in folded.entries if entry.position >= 2 * quarter]
    middle = folded.entries[len(first) : len(folded.entries) - len(newest)]
    assert (*first, *middle, *newest) == folded.entries
    assert [entry.position for entry in first] == [sum(len(e.segment) for e in first[:i]) for i in range(len(first))]
    assert all(entry.position + len(entry.segment) == 2 * quarter for entry in middle)
    starts = [2 * quarter + sum(len(e.segment) for e in newest[:i]) for i in range(len(newest))]
    assert [entry.position for entry in newest] == starts
    # As much as fits is kept in order: one segment more would be too much for either end.
    for end, rest in ((first, folded.entries[len(first) :]), (newest, middle[::-1])):
        assert not rest or sum(len(entry.segment) for entry in end) + len(rest[0].segment) > quarter


@given(lengths, gaps, st.data())
def test_placing_moves_only_what_is_named(lengths: list[int], gaps: list[int], data: st.DataObject) -> None:
    view = view_of(lengths, gaps)
    offsets = {s.key: data.draw(st.integers(-3, 30)) for s in view.segments if data.draw(st.booleans())}
    placed = view.placed(offsets, 99)
    assert placed.segments == view.segments
    assert [entry.offset for entry in placed.entries] == [offsets.get(s.key, 0) for s in view.segments]
    assert placed.next_position == 99


@pytest.mark.parametrize(
    ("follower", "is_joined"),
    [
        (Run(14, 3, 104, 2), True),
        (Run(15, 3, 104, 2), False),
        (Run(14, 3, 105, 2), False),
        (Run(14, 3, 104, 3), False),
        (Run(7, 3, 97, 2), False),
    ],
    ids=["all continue", "other slots", "a gap in positions", "another offset", "in front"],
)
def test_runs_join_only_where_slot_position_and_offset_continue(follower: Run, is_joined: bool) -> None:
    run = Run(10, 4, 100, 2)
    assert coalesce([run, follower]) == ((Run(10, 7, 100, 2),) if is_joined else (run, follower))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 2), st.integers(0, 9), st.integers(0, 1)), max_size=9))
def test_joining_loses_no_token_and_leaves_nothing_to_join(parts: list[tuple[int, int, int, int]]) -> None:
    def tokens(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
        return [(run.slot + i, run.position + i, run.offset) for run in runs for i in range(run.length)]

    runs = [Run(*part) for part in parts]
    joined = coalesce(runs)
    assert tokens(joined) == tokens(runs)
    assert coalesce(joined) == joined
    seams = sum(
        (b[0] - a[0], b[1] - a[1], b[2] - a[2]) != (1, 1, 0)
        for a, b in zip(tokens(runs), tokens(runs)[1:], strict=False)
    )
    assert len(joined) == (seams + 1 if runs else 0)


def test_a_segment_in_two_extents_is_read_in_order() -> None:
    assert runs_of([(32, 40), (0, 2)], position=5, offset=-1) == [Run(32, 8, 5, -1), Run(0, 2, 13, -1)]


def test_a_view_reads_its_runs_joined_across_segments() -> None:
    view = view_of([3, 4, 5])
    assert view.runs == (Run(0, 12, 0, 0),)
    assert view.without([view.segments[1]]).runs == (Run(0, 3, 0, 0), Run(7, 5, 7, 0))


def test_whatever_a_query_sees_changes_the_hash() -> None:
    view = view_of([2, 3, 4])
    first, *rest = view.entries
    others = [
        View(),
        View(next_position=1),
        view.without([view.segments[1]]),
        view.closed_up().without([view.segments[0]]),
        replace(view, next_position=view.next_position + 1),
        replace(view, entries=(first._replace(offset=1), *rest)),
        replace(view, entries=(first._replace(offset=-1), *rest)),
        replace(view, entries=(rest[0], first, *rest[1:])),
        view_of([3, 2, 4]),
        view_of([2, 3], [0, 0]),
        view_of([2, 3, 4], [0, 1]),
    ]
    hashes = [view.hash, *(other.hash for other in others)]
    assert len(set(hashes)) == len(hashes)
    assert view_of([2, 3, 4]).hash == view.hash


@given(st.lists(st.integers(-2, 300), max_size=4), st.integers(0, 30), st.sampled_from(["", "a", "ab"]))
def test_a_segment_key_depends_on_each_part(tokens: list[int], position: int, view_hash: str) -> None:
    keys = {
        segment_key(tokens, position, view_hash),
        segment_key([*tokens, 0], position, view_hash),
        segment_key(tokens, position + 1, view_hash),
        segment_key(tokens, position, view_hash + "b"),
        segment_key(tokens, position, view_hash, tier="int8"),
    }
    assert len(keys) == 5
    assert segment_key(tuple(tokens), position, view_hash) in keys


def test_an_entry_lies_where_its_segment_was_computed_plus_its_offset() -> None:
    (segment,) = view_of([3], [4]).segments
    assert Entry(segment, -4).position == 0


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_key_outside_the_views_positions_is_a_bug(offset: int) -> None:
    view = view_of([3])
    with pytest.raises(AssertionError):
        replace(view, entries=(view.entries[0]._replace(offset=offset),)).check()
