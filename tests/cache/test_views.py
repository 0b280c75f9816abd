from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnkv.cache import Entry, Extent, Part, Segment, TileGroup, View, segment_key, settled_key, slots_of
from turnkv.cache.views import max_segment_tokens
from turnkv.types import EXACT, SegmentKey, Tier

INT8, INT4 = Tier("int8", "int8"), Tier("int4", "int4")
TIERS = (EXACT, INT8, Tier("int8", "int4"))


def view_of(lengths: Sequence[int], gaps: Sequence[int] = ()) -> View:
    """A view of segments of these lengths, computed one behind another with gaps before each."""
    view, slot = View(), 0
    for index, length in enumerate(lengths):
        position = view.next_position + (gaps[index] if index < len(gaps) else 0)
        tokens = tuple(range(slot, slot + length))
        key = segment_key(tokens, position, view.hash)
        view = view.extended([Segment.exact(key, tokens, position, (Extent(slot, slot + length),))], position + length)
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


def keys_of(groups: Sequence[TileGroup]) -> list[tuple[Tier, int, int, int]]:
    """(tier, offset, slot, virtual position) of each key, tile by tile."""
    return [
        (group.tier, group.offset, page * 16 + lane, group.positions[tile, lane])
        for group in groups
        for tile, (page, mask) in enumerate(zip(group.pages.tolist(), group.masks.tolist(), strict=True))
        for lane in range(16)
        if mask >> lane & 1
    ]


@given(st.lists(st.tuples(st.integers(0, 79), st.integers(0, 999)), min_size=1, max_size=60, unique_by=lambda t: t[0]))
def test_a_group_names_each_key_once_in_as_few_tiles_as_the_order_allows(keys: list[tuple[int, int]]) -> None:
    slots, positions = (np.array(column, dtype=np.int32) for column in zip(*keys, strict=True))
    group = TileGroup.of(INT8, -4, slots, positions)
    assert (group.tier, group.offset, group.num_keys) == (INT8, -4, len(keys))
    assert [str(a.dtype) for a in (group.pages, group.masks, group.positions)] == ["int32", "uint16", "int32"]
    assert group.positions.shape == (len(group.pages), 16)
    assert all(array.flags["C_CONTIGUOUS"] for array in (group.pages, group.masks, group.positions))
    assert sorted((slot, position) for _, _, slot, position in keys_of([group])) == sorted(keys)
    pages = [slot // 16 for slot, _ in keys]
    assert group.pages.tolist() == [page for i, page in enumerate(pages) if not i or page != pages[i - 1]]
    lanes_left = [(tile, lane) for tile, mask in enumerate(group.masks) for lane in range(16) if not mask >> lane & 1]
    assert not any(group.positions[tile, lane] for tile, lane in lanes_left)


def test_tiles_of_whole_and_partial_pages_are_as_drawn() -> None:
    view = View().extended([Segment.exact(SegmentKey("a"), (0,) * 20, 5, (Extent(14, 32), Extent(64, 66)))], 25)
    (group,) = view.placed({SegmentKey("a"): 2}, 30).tiles
    assert group.pages.tolist() == [0, 1, 4]
    assert group.masks.tolist() == [0xC000, 0xFFFF, 0x0003]
    assert group.positions[0].tolist() == [0] * 14 + [7, 8]
    assert group.positions[1].tolist() == list(range(9, 25))
    assert group.positions[2].tolist() == [25, 26] + [0] * 14


def test_neighbouring_segments_share_a_tile_and_a_drop_clears_its_bits() -> None:
    view = view_of([3, 4, 5])
    (whole,) = view.tiles
    assert (whole.pages.tolist(), whole.masks.tolist()) == ([0], [0x0FFF])
    (rest,) = view.without([view.segments[1]]).tiles
    assert (rest.pages.tolist(), rest.masks.tolist()) == ([0], [0x0F87])
    assert View().tiles == ()


@st.composite
def settled_views(draw: st.DrawFn) -> tuple[View, list[tuple[Tier, int, int, int]]]:
    """A view of segments whose tokens lie in tiers of their own, and its keys in any order."""
    view, expected = View(), []
    free = dict.fromkeys(TIERS, 0)
    for number in range(draw(st.integers(0, 6))):
        tiers = draw(st.lists(st.sampled_from(TIERS), min_size=1, max_size=24))
        position, offset = view.next_position, draw(st.sampled_from([0, 0, 3, 7]))
        parts = []
        for tier in dict.fromkeys(tiers):
            members = [i for i, own in enumerate(tiers) if own == tier]
            cut = draw(st.integers(0, len(members)))
            extents, start = [], free[tier]
            for length in (cut, len(members) - cut):
                if length:
                    start += draw(st.integers(0, 20))
                    extents.append(Extent(start, start + length))
                    start += length
            free[tier] = start
            parts.append(Part(tier, tuple(extents), np.array(members, dtype=np.int32)))
            slots = [slot for extent in extents for slot in range(extent.start, extent.stop)]
            expected += [(tier, offset, slot, position + i + offset) for slot, i in zip(slots, members, strict=True)]
        segment = Segment(SegmentKey(str(number)), (0,) * len(tiers), position, tuple(parts))
        assert segment.tiers == tiers
        assert segment.num_runs == sum(len(part.extents) for part in parts)
        view = View((*view.entries, Entry(segment, offset)), position + len(tiers) + 7)
    return view, expected


@given(settled_views())
def test_a_view_reads_every_key_once_by_tier_and_offset(
    given_view: tuple[View, list[tuple[Tier, int, int, int]]],
) -> None:
    view, expected = given_view
    assert sorted(keys_of(view.tiles)) == sorted(expected)
    assert len({(group.tier, group.offset) for group in view.tiles}) == len(view.tiles)
    assert sum(group.num_keys for group in view.tiles) == view.num_tokens
    view.check()


@given(lengths, gaps, st.data())
def test_replacing_exchanges_segments_where_they_lie(lengths: list[int], gaps: list[int], data: st.DataObject) -> None:
    view = view_of(lengths, gaps)
    view = view.placed({s.key: data.draw(st.integers(0, 9)) for s in view.segments}, view.next_position + 9)
    chosen = [segment for segment in view.segments if data.draw(st.booleans())]
    settled = {
        old: Segment(
            settled_key(old.key, [(len(old), INT4)]),
            old.tokens,
            old.position,
            (Part(INT4, old.parts[0].extents, old.parts[0].members),),
        )
        for old in chosen
    }
    replaced = view.replaced(settled)
    assert replaced.next_position == view.next_position
    assert [entry.segment for entry in replaced.entries] == [settled.get(s, s) for s in view.segments]
    assert [(e.offset, e.position) for e in replaced.entries] == [(e.offset, e.position) for e in view.entries]
    assert (replaced.hash == view.hash) == (not chosen)
    places = [(position, INT4 if view.segments[i] in chosen else EXACT) for i, position in every_place(view)]
    assert sorted((position, tier) for tier, _, _, position in keys_of(replaced.tiles)) == sorted(places)


def every_place(view: View) -> list[tuple[int, int]]:
    """(index of the entry, virtual position) of each token."""
    return [(i, entry.position + n) for i, entry in enumerate(view.entries) for n in range(len(entry.segment))]


def test_slots_of_extents_keep_their_order() -> None:
    assert slots_of([Extent(32, 35), Extent(0, 2)]).tolist() == [32, 33, 34, 0, 1]
    assert slots_of([]).dtype == np.int32
    assert slots_of([]).tolist() == []


@pytest.mark.parametrize("num_members", [0, 2, 4])
def test_a_part_has_a_slot_for_each_member(num_members: int) -> None:
    with pytest.raises(AssertionError):
        Part(INT8, (Extent(0, 3),), np.arange(num_members, dtype=np.int32))


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
        settled_key(segment_key(tokens, position, view_hash), [(len(tokens), EXACT)]),
    }
    assert len(keys) == 5
    assert segment_key(tuple(tokens), position, view_hash) in keys


def test_a_settled_key_depends_on_the_segment_and_on_each_tokens_tier() -> None:
    key, other = segment_key([1, 2, 3], 0, ""), segment_key([1, 2, 4], 0, "")
    mixed = Tier("int8", "int4")
    tiers = [
        [(3, EXACT)],
        [(3, INT8)],
        [(3, mixed)],
        [(3, Tier("int4", "int8"))],
        [(1, INT8), (2, mixed)],
        [(2, INT8), (1, mixed)],
        [(1, mixed), (2, INT8)],
    ]
    keys = [settled_key(of, each) for of in (key, other) for each in tiers]
    assert len({key, other, *keys}) == 2 + len(keys)
    assert settled_key(key, iter(tiers[4])) == keys[4]


def test_an_entry_lies_where_its_segment_was_computed_plus_its_offset() -> None:
    (segment,) = view_of([3], [4]).segments
    assert Entry(segment, -4).position == 0


@pytest.mark.parametrize("offset", [-1, 1])
def test_a_key_outside_the_views_positions_is_a_bug(offset: int) -> None:
    view = view_of([3])
    with pytest.raises(AssertionError):
        replace(view, entries=(view.entries[0]._replace(offset=offset),)).check()
