"""The decision which closed turns go: a pure function from a snapshot to drops."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from turnkv.policy.policy import Policy, Window
from turnkv.types import TurnKind

Part = Literal["all", "tools"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSnapshot:
    """A turn as a policy sees it. Tokens count only what may be dropped and is not dropped yet."""

    index: int
    kind: TurnKind
    is_closed: bool
    is_pinned: bool
    chat_tokens: int
    """Droppable tokens outside calls and results."""
    tool_tokens: int
    """Droppable tokens of calls and results."""

    @property
    def tokens(self) -> int:
        """All its droppable tokens."""
        return self.chat_tokens + self.tool_tokens

    @property
    def is_candidate(self) -> bool:
        """Whether a drop may take it."""
        return self.is_closed and not self.is_pinned and self.tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A session when a request arrives, before anything of it is computed."""

    turns: Sequence[TurnSnapshot]
    """Oldest first."""
    total_tokens: int
    """Tokens that the session will hold when the request ends if nothing is dropped, the reply's room included."""
    max_tokens: int | None
    """Tokens that a session can hold at all, by the model's positions and the device's budget."""
    token_bytes: int
    """KV bytes of one token."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Take a turn's tokens out of the view: all that may go, or only its calls and results."""

    turn: int
    part: Part = "all"


def decide(policy: Policy, snapshot: Snapshot) -> tuple[Drop, ...]:
    """Say which turns go now. Equal input gives equal output; pinned and open turns never go.

    Nothing goes until a high mark is passed (turns, bytes, or what a session can hold at all); then turns go, in
    the policy's order, until every mark that was passed is back at its low.
    """
    if policy.window is None:
        return ()
    held = [turn for turn in snapshot.turns if turn.is_candidate]
    num_over = len(held) - policy.window.low if len(held) > policy.window.high else 0
    tokens_over = _tokens_over(policy.window, snapshot, sum(turn.tokens for turn in held))
    drops: list[Drop] = []
    chat_left = {turn.index: turn.chat_tokens for turn in held}
    tool_left = {turn.index: turn.tool_tokens for turn in held}
    for drop, is_recent in _in_order(policy, held):
        if num_over <= 0 and tokens_over <= 0:
            break
        if is_recent and tokens_over <= 0:
            continue
        index = drop.turn
        freed = tool_left[index] + (chat_left[index] if drop.part == "all" else 0)
        if not freed:
            continue
        tool_left[index] = 0
        chat_left[index] = 0 if drop.part == "all" else chat_left[index]
        num_over -= chat_left[index] == 0
        tokens_over -= freed
        drops = [earlier for earlier in drops if earlier.turn != index]
        drops.append(drop if chat_left[index] else Drop(index))
    return tuple(sorted(drops, key=lambda drop: drop.turn))


def _tokens_over(window: Window, snapshot: Snapshot, droppable: int) -> int:
    """Tokens that must go so that every passed limit is back at its low mark."""
    limits = [] if snapshot.max_tokens is None else [snapshot.max_tokens]
    if window.budget_bytes is not None:
        limits.append(window.budget_bytes // snapshot.token_bytes)
    if not limits or snapshot.total_tokens <= min(limits):
        return 0
    fixed = snapshot.total_tokens - droppable
    room = max(0, min(limits) - fixed)
    return snapshot.total_tokens - (fixed + room * window.low // window.high)


def _in_order(policy: Policy, held: Sequence[TurnSnapshot]) -> Iterator[tuple[Drop, bool]]:
    """Possible drops, the first to go first, and whether each is of a recent turn."""
    num_old = max(0, len(held) - policy.keep.recent)
    for turns, is_recent in ((held[:num_old], False), (held[num_old:], True)):
        if policy.keep.tool_results == "clear":
            for turn in turns:
                if turn.tool_tokens:
                    yield Drop(turn.index, "tools"), is_recent
            kinds: tuple[TurnKind | None, ...] = (None,)
        else:
            kinds = (TurnKind.CHAT, TurnKind.TOOL)
        for kind in kinds:
            for turn in turns:
                if kind is None or turn.kind is kind:
                    yield Drop(turn.index), is_recent
