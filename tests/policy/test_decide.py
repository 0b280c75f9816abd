from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from turnkv.policy import FULL, Drop, Keep, Policy, Size, Snapshot, TurnSnapshot, Window, decide
from turnkv.policy.policy import ToolResults
from turnkv.types import TurnKind

CHAT, TOOL = TurnKind.CHAT, TurnKind.TOOL


def turn(
    index: int,
    kind: TurnKind = CHAT,
    *,
    chat: int = 10,
    tools: int = 0,
    is_closed: bool = True,
    is_pinned: bool = False,
    token_bytes: int = 1,
) -> TurnSnapshot:
    return TurnSnapshot(
        index=index,
        kind=kind,
        is_closed=is_closed,
        is_pinned=is_pinned,
        chat=Size(chat, chat * token_bytes),
        tools=Size(tools, tools * token_bytes),
    )


def may_go(turn: TurnSnapshot) -> bool:
    """Written anew, so that the tests do not believe `is_candidate`."""
    return turn.is_closed and not turn.is_pinned and turn.chat.tokens + turn.tools.tokens > 0


def snapshot_of(
    turns: Sequence[TurnSnapshot],
    *,
    fixed: int = 0,
    max_tokens: int | None = None,
    max_bytes: int = 10**9,
    token_bytes: int = 1,
) -> Snapshot:
    """A session that also holds `fixed` tokens which no drop may take: system text, open turn, reply."""
    held = sum((turn.size for turn in turns if may_go(turn)), Size())
    total = held + Size(fixed, fixed * token_bytes)
    return Snapshot(turns=turns, total=total, max_tokens=max_tokens, max_bytes=max_bytes)


def policy_of(
    high: int,
    low: int,
    *,
    recent: int = 0,
    tool_results: ToolResults = "raw",
    budget: int | None = None,
) -> Policy:
    window = Window(high=high, low=low, budget_bytes=budget)
    return Policy(name="test", window=window, keep=Keep(tool_results=tool_results, recent=recent))


@st.composite
def turn_lists(draw: st.DrawFn) -> list[TurnSnapshot]:
    """A conversation: mostly closed turns with tokens left, some pinned, dropped or partly dropped; the last open."""
    turns = []
    for index in range(draw(st.integers(0, 14))):
        kind = draw(st.sampled_from([CHAT, TOOL]))
        turns.append(
            turn(
                index,
                kind,
                chat=draw(st.integers(0, 20)),
                tools=draw(st.integers(0, 60)) if kind is TOOL else 0,
                is_pinned=draw(st.integers(0, 5)) == 0,
                token_bytes=draw(st.integers(1, 3)),
            )
        )
    return [*turns, turn(len(turns), is_closed=False)]


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    high = draw(st.integers(1, 10))
    return policy_of(
        high,
        draw(st.integers(0, high)),
        recent=draw(st.integers(0, 4)),
        tool_results=draw(st.sampled_from(["raw", "clear"])),
        budget=draw(st.none() | st.integers(1, 900)),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    return snapshot_of(
        draw(turn_lists()),
        fixed=draw(st.integers(10, 100)),
        max_tokens=draw(st.none() | st.integers(1, 400)),
        max_bytes=draw(st.integers(1, 900)),
        token_bytes=draw(st.integers(1, 3)),
    )


def limits_of(policy: Policy, snapshot: Snapshot) -> list[tuple[int, Callable[[Size], int]]]:
    """What a session may hold before some goes, each with what it counts."""
    assert policy.window is not None
    limits: list[tuple[int, Callable[[Size], int]]] = [(snapshot.max_bytes, lambda size: size.bytes)]
    if policy.window.budget_bytes is not None:
        limits.append((policy.window.budget_bytes, lambda size: size.bytes))
    if snapshot.max_tokens is not None:
        limits.append((snapshot.max_tokens, lambda size: size.tokens))
    return limits


def freed_by(drops: Sequence[Drop], snapshot: Snapshot) -> Size:
    turns = {turn.index: turn for turn in snapshot.turns}
    return sum((turns[drop.turn].tools if drop.part == "tools" else turns[drop.turn].size for drop in drops), Size())


def candidates(snapshot: Snapshot) -> list[TurnSnapshot]:
    return [turn for turn in snapshot.turns if may_go(turn)]


def is_over_limit(policy: Policy, snapshot: Snapshot) -> bool:
    return any(count(snapshot.total) > limit for limit, count in limits_of(policy, snapshot))


def wholly_gone(drops: Sequence[Drop]) -> set[int]:
    return {drop.turn for drop in drops if drop.part == "all"}


@given(policies(), snapshots())
def test_equal_input_gives_equal_output(policy: Policy, snapshot: Snapshot) -> None:
    turns = list(snapshot.turns)
    drops = decide(policy, snapshot)
    assert decide(policy, snapshot) == drops
    assert list(snapshot.turns) == turns
    assert [drop.turn for drop in drops] == sorted({drop.turn for drop in drops})


@given(policies(), snapshots())
def test_only_closed_turns_with_tokens_and_no_pin_go(policy: Policy, snapshot: Snapshot) -> None:
    allowed = {turn.index: turn for turn in candidates(snapshot)}
    for drop in decide(policy, snapshot):
        assert drop.turn in allowed
        # A partial drop takes something and leaves something.
        assert drop.part == "all" or (allowed[drop.turn].tools.tokens > 0 and allowed[drop.turn].chat.tokens > 0)


@given(policies(), snapshots())
def test_nothing_goes_below_the_high_marks(policy: Policy, snapshot: Snapshot) -> None:
    assert policy.window is not None
    if len(candidates(snapshot)) <= policy.window.high and not is_over_limit(policy, snapshot):
        assert decide(policy, snapshot) == ()


@given(policies(), snapshots())
def test_too_many_turns_leave_no_more_than_the_low_mark(policy: Policy, snapshot: Snapshot) -> None:
    assert policy.window is not None
    held = candidates(snapshot)
    if len(held) > policy.window.high:
        left = [turn for turn in held if turn.index not in wholly_gone(decide(policy, snapshot))]
        assert len(left) <= max(policy.window.low, policy.keep.recent)


@given(policies(), snapshots())
def test_a_drop_by_count_spares_the_recent_and_stops_at_the_low_mark(policy: Policy, snapshot: Snapshot) -> None:
    assert policy.window is not None
    held = candidates(snapshot)
    if len(held) > policy.window.high and not is_over_limit(policy, snapshot):
        drops = decide(policy, snapshot)
        recent = held[len(held) - policy.keep.recent :] if policy.keep.recent else []
        assert {turn.index for turn in recent}.isdisjoint(drop.turn for drop in drops)
        left = len(held) - len(wholly_gone(drops))
        assert left == max(policy.window.low, min(policy.keep.recent, len(held)))


@settings(max_examples=300)
@given(policies(), snapshots())
def test_too_many_tokens_leave_no_more_than_the_low_mark(policy: Policy, snapshot: Snapshot) -> None:
    assert policy.window is not None
    drops = decide(policy, snapshot)
    droppable = sum((turn.size for turn in candidates(snapshot)), Size())
    for limit, count in limits_of(policy, snapshot):
        if count(snapshot.total) > limit:
            fixed = count(snapshot.total - droppable)
            target = fixed + max(0, limit - fixed) * policy.window.low // policy.window.high
            left = count(snapshot.total - freed_by(drops, snapshot))
            assert left <= target or wholly_gone(drops) == {turn.index for turn in candidates(snapshot)}


@given(policies(), snapshots())
def test_raw_results_outlive_old_chat(policy: Policy, snapshot: Snapshot) -> None:
    if policy.keep.tool_results != "raw":
        return
    held = candidates(snapshot)
    gone = wholly_gone(decide(policy, snapshot))
    old = held[: max(0, len(held) - policy.keep.recent)]
    if any(turn.index in gone for turn in old if turn.kind is TOOL):
        assert all(turn.index in gone for turn in old if turn.kind is CHAT)
    for kind in (CHAT, TOOL):
        of_kind = [turn.index in gone for turn in old if turn.kind is kind]
        assert of_kind == sorted(of_kind, reverse=True), "the oldest of a kind go first"


@given(policies(), snapshots())
def test_cleared_results_go_before_any_chat(policy: Policy, snapshot: Snapshot) -> None:
    if policy.keep.tool_results != "clear":
        return
    held = candidates(snapshot)
    drops = {drop.turn: drop.part for drop in decide(policy, snapshot)}
    num_old = max(0, len(held) - policy.keep.recent)
    for group in (held[:num_old], held[num_old:]):
        if any(drops.get(turn.index) == "all" and turn.chat.tokens for turn in group):
            assert all(turn.index in drops for turn in group if turn.tools.tokens)


@given(policies(), snapshots())
def test_the_recent_go_last(policy: Policy, snapshot: Snapshot) -> None:
    held = candidates(snapshot)
    num_old = max(0, len(held) - policy.keep.recent)
    drops = decide(policy, snapshot)
    if {turn.index for turn in held[num_old:]} & {drop.turn for drop in drops}:
        assert wholly_gone(drops) >= {turn.index for turn in held[:num_old]}


@given(snapshots())
@example(snapshot_of([turn(0), turn(1, is_closed=False)], max_tokens=1))
def test_without_a_window_nothing_ever_goes(snapshot: Snapshot) -> None:
    assert decide(FULL, snapshot) == ()


def test_a_turn_too_many_brings_the_count_down_to_the_low_mark() -> None:
    turns = [turn(i) for i in range(5)]
    assert decide(policy_of(5, 2), snapshot_of(turns)) == ()
    assert decide(policy_of(4, 2), snapshot_of(turns)) == (Drop(0), Drop(1), Drop(2))


def test_tokens_may_reach_the_limit_but_not_pass_it() -> None:
    snapshot = snapshot_of([turn(i, token_bytes=3) for i in range(10)], max_tokens=100, token_bytes=3)
    assert decide(policy_of(20, 10), snapshot) == ()
    assert decide(policy_of(20, 10, budget=300), snapshot) == ()
    assert len(decide(policy_of(20, 10, budget=299), snapshot)) == 6


def test_an_open_turn_stays_however_little_room_there_is() -> None:
    turns = [turn(0), turn(1, is_pinned=True), turn(2, is_closed=False)]
    assert decide(policy_of(1, 0), snapshot_of(turns, fixed=20, max_tokens=1)) == (Drop(0),)


def test_pinned_and_emptied_turns_do_not_count() -> None:
    turns = [turn(0, is_pinned=True), turn(1, chat=0), *(turn(i) for i in (2, 3, 4))]
    assert decide(policy_of(3, 1), snapshot_of(turns)) == ()
    assert decide(policy_of(2, 1), snapshot_of(turns)) == (Drop(2), Drop(3))


def test_raw_drops_chat_around_results() -> None:
    turns = [turn(0, TOOL, tools=50), turn(1), turn(2, TOOL, tools=50), turn(3), turn(4)]
    assert decide(policy_of(4, 2), snapshot_of(turns)) == (Drop(1), Drop(3), Drop(4))
    assert decide(policy_of(4, 2, recent=2), snapshot_of(turns)) == (Drop(0), Drop(1), Drop(2))


def test_clearing_stops_as_soon_as_results_alone_made_room() -> None:
    turns = [turn(0, TOOL, tools=50), turn(1), turn(2, TOOL, tools=50), turn(3, TOOL, tools=50)]
    policy = policy_of(10, 10, tool_results="clear")
    assert decide(policy, snapshot_of(turns, max_tokens=100)) == (Drop(0, "tools"), Drop(2, "tools"))
    assert decide(policy, snapshot_of(turns, max_tokens=35)) == (Drop(0), Drop(2, "tools"), Drop(3, "tools"))


def test_a_turn_of_nothing_but_results_is_dropped_whole() -> None:
    turns = [turn(0, TOOL, chat=0, tools=50), turn(1)]
    assert decide(policy_of(9, 9, tool_results="clear"), snapshot_of(turns, max_tokens=30)) == (Drop(0),)


def test_the_narrower_of_budget_and_positions_counts() -> None:
    turns = [turn(i, token_bytes=4) for i in range(10)]
    snapshot = snapshot_of(turns, fixed=20, max_tokens=110, token_bytes=4)
    assert len(decide(policy_of(20, 20), snapshot)) == 1
    assert len(decide(policy_of(20, 20, budget=4 * 79), snapshot)) == 5
    assert len(decide(policy_of(20, 20, budget=4 * 200), snapshot)) == 1
    assert len(decide(policy_of(20, 10, budget=4 * 80), snapshot)) == 7


def test_what_cannot_be_dropped_may_fill_the_budget_alone() -> None:
    snapshot = snapshot_of([turn(0), turn(1)], fixed=500, max_tokens=100)
    assert decide(policy_of(5, 5, recent=2), snapshot) == (Drop(0), Drop(1))


@pytest.mark.parametrize("recent", [0, 2])
def test_a_session_without_turns_drops_nothing(recent: int) -> None:
    assert decide(policy_of(1, 0, recent=recent), snapshot_of([], fixed=50, max_tokens=1)) == ()
