"""The decision which closed turns go: a pure function from a snapshot to drops."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from turnkv.policy.policy import Policy, Window
from turnkv.types import TurnKind

Part = Literal["all", "tools"]


@dataclass(frozen=True, slots=True)
class Size:
    """How much KV: by tokens, and by bytes, since not all tokens are stored alike."""

    tokens: int = 0
    bytes: int = 0

    def __add__(self, other: "Size") -> "Size":
        return Size(self.tokens + other.tokens, self.bytes + other.bytes)

    def __sub__(self, other: "Size") -> "Size":
        return Size(self.tokens - other.tokens, self.bytes - other.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSnapshot:
    """A turn as a policy sees it. Sizes count only what may be dropped and is not dropped yet."""

    index: int
    kind: TurnKind
    is_closed: bool
    is_pinned: bool
    chat: Size
    """What lies outside calls and results."""
    tools: Size
    """Calls and results."""

    @property
    def size(self) -> Size:
        """Both together."""
        return self.chat + self.tools

    @property
    def is_candidate(self) -> bool:
        """Whether a drop may take it."""
        return self.is_closed and not self.is_pinned and self.size.tokens > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A session when a request arrives, before anything of it is computed."""

    turns: Sequence[TurnSnapshot]
    """Oldest first."""
    total: Size
    """What the session will hold when the request ends if nothing is dropped, the reply's room included."""
    max_tokens: int | None
    """Tokens that a session can hold at all, by the model's positions."""
    max_bytes: int
    """Bytes that it can hold at all, by the device's budget."""


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
    over = _over(policy.window, snapshot, sum((turn.size for turn in held), Size()))
    drops: list[Drop] = []
    chat_left = {turn.index: turn.chat for turn in held}
    tools_left = {turn.index: turn.tools for turn in held}
    for drop, is_recent in _in_order(policy, held):
        is_too_large = over.tokens > 0 or over.bytes > 0
        if num_over <= 0 and not is_too_large:
            break
        if is_recent and not is_too_large:
            continue
        index = drop.turn
        freed = tools_left[index] + (chat_left[index] if drop.part == "all" else Size())
        if not freed.tokens:
            continue
        tools_left[index] = Size()
        chat_left[index] = Size() if drop.part == "all" else chat_left[index]
        num_over -= not chat_left[index].tokens
        over -= freed
        drops = [earlier for earlier in drops if earlier.turn != index]
        drops.append(drop if chat_left[index].tokens else Drop(index))
    return tuple(sorted(drops, key=lambda drop: drop.turn))


def _over(window: Window, snapshot: Snapshot, droppable: Size) -> Size:
    """What must go so that every passed limit is back at its low mark."""
    max_bytes = snapshot.max_bytes if window.budget_bytes is None else min(snapshot.max_bytes, window.budget_bytes)
    return Size(
        _excess(window, snapshot.total.tokens, droppable.tokens, snapshot.max_tokens),
        _excess(window, snapshot.total.bytes, droppable.bytes, max_bytes),
    )


def _excess(window: Window, total: int, droppable: int, limit: int | None) -> int:
    if limit is None or total <= limit:
        return 0
    fixed = total - droppable
    return total - (fixed + max(0, limit - fixed) * window.low // window.high)


def _in_order(policy: Policy, held: Sequence[TurnSnapshot]) -> Iterator[tuple[Drop, bool]]:
    """Possible drops, the first to go first, and whether each is of a recent turn."""
    num_old = max(0, len(held) - policy.keep.recent)
    for turns, is_recent in ((held[:num_old], False), (held[num_old:], True)):
        if policy.keep.tool_results == "clear":
            for turn in turns:
                if turn.tools.tokens:
                    yield Drop(turn.index, "tools"), is_recent
            kinds: tuple[TurnKind | None, ...] = (None,)
        else:
            kinds = (TurnKind.CHAT, TurnKind.TOOL)
        for kind in kinds:
            for turn in turns:
                if kind is None or turn.kind is kind:
                    yield Drop(turn.index), is_recent
