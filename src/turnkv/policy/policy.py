"""A policy: the sections of its file, as frozen settings."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from turnkv.errors import InvalidConfigError
from turnkv.policy.precision import Precision, check_patterns

ToolResults = Literal["raw", "clear"]
Overflow = Literal["fold", "refuse"]
Ranks = Literal["gapped", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """`[window]`: how many closed turns a session holds."""

    high: int = 12
    """When more closed turns than this are held, some are dropped."""

    low: int = 8
    """A drop leaves at most this many closed turns, so that drops come in batches."""

    budget_bytes: int | None = None
    """KV bytes of one session at which turns are dropped as well, down to `low / high` of what may be dropped."""

    overflow: Overflow = "fold"
    """Where system text and open turn alone outrun the model's positions: `fold` lets older tokens share positions,
    `refuse` ends with an error."""

    ranks: Ranks = "gapped"
    """What becomes of the positions of turns that went: they stay empty until positions run out, or the others close
    up at once. Either way no key is touched."""

    def __post_init__(self) -> None:
        if self.ranks not in ("gapped", "closed"):
            raise InvalidConfigError("window.ranks", self.ranks, "is no known way", remedy='give "gapped" or "closed"')
        if self.overflow not in ("fold", "refuse"):
            raise InvalidConfigError(
                "window.overflow", self.overflow, "is no known way", remedy='give "fold" or "refuse"'
            )
        if self.high < 1:
            raise InvalidConfigError("window.high", self.high, "must be at least 1", remedy="give a number of turns")
        if not 0 <= self.low <= self.high:
            raise InvalidConfigError(
                "window.low", self.low, f"must lie between 0 and high = {self.high}", remedy="lower it, or raise high"
            )
        if self.budget_bytes is not None and self.budget_bytes <= 0:
            raise InvalidConfigError(
                "window.budget", self.budget_bytes, "must be positive", remedy='give a size such as "2GiB"'
            )


@dataclass(frozen=True, kw_only=True)
class Keep:
    """`[keep]`: what a drop spares."""

    pinned: tuple[str, ...] = ()
    """Regular expressions; a turn with a message that one of them matches is never dropped."""

    tool_results: ToolResults = "raw"
    """`raw`: tool turns outlive chat turns; `clear`: calls and results go first, and the chat around them stays."""

    recent: int = 2
    """The newest closed turns are dropped last, whatever their kind."""

    def __post_init__(self) -> None:
        if self.tool_results not in ("raw", "clear"):
            raise InvalidConfigError(
                "keep.tool_results", self.tool_results, "is no known way", remedy='give "raw" or "clear"'
            )
        if self.recent < 0:
            raise InvalidConfigError("keep.recent", self.recent, "must not be negative", remedy="give 0 or more turns")
        check_patterns("keep.pinned", self.pinned)

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(pattern) for pattern in self.pinned)

    def is_pinned(self, text: str) -> bool:
        """Whether a message with this text pins its turn."""
        return any(pattern.search(text) for pattern in self._patterns)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What becomes of closed turns. Without `[window]` nothing is ever dropped: that is the policy `full`."""

    name: str
    window: Window | None = None
    keep: Keep = field(default_factory=Keep)
    precision: Precision | None = None
    """None stores every turn as it was computed."""

    def describe(self) -> str:
        """One line for tables and reports."""
        said = []
        if self.window is None:
            said.append("keeps every turn")
        else:
            budget = f", at most {self.window.budget_bytes:,} bytes" if self.window.budget_bytes else ""
            said.append(
                f"over {self.window.high} closed turns down to {self.window.low}{budget}, "
                f"tool results {self.keep.tool_results}"
            )
        if self.precision is not None:
            said.append(self.precision.describe())
        return f"{self.name}: {'; '.join(said)}"


FULL = Policy(name="full")
"""Keeps every turn."""
