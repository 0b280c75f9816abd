"""`[precision]`: how the KV of closed turns is stored."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from turnkv.errors import InvalidConfigError
from turnkv.types import EXACT, Role, SpanClass, Tier

Form = Literal["exact", "rest", "old"]
"""What a policy makes of a message: as computed, settled, or settled again when it has grown old."""

_INT8 = Tier("int8", "int8")
_CLASSES = tuple(str(each) for each in SpanClass) + tuple(f"role:{role}" for role in Role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Old:
    """`old`: turns that have been closed for long are stored in another tier."""

    after: int
    """A turn is old when more than this many closed turns came after it. System text is older than all turns."""

    store: Tier

    def __post_init__(self) -> None:
        if self.after < 0:
            raise InvalidConfigError("precision.old.after", self.after, "must not be negative", remedy="give 0 or more")
        _check("precision.old.store", self.store)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Which tokens of a closed turn stay exact, and what becomes of the others."""

    exact: tuple[str, ...] = ("tool_call", "number", "code")
    """Span classes whose tokens stay exact, or `role:tool` and the like for all that a role says."""

    rest: Tier = _INT8
    """How all other tokens are stored from the request on after the one at which their turn closed."""

    old: Old | None = None
    """How those other tokens are stored when their turn is old."""

    exact_layers: tuple[int, ...] = ()
    """Layers of the model that keep all tokens exact, counted from 0."""

    patterns: Mapping[SpanClass, tuple[str, ...]] = field(default_factory=dict)
    """Regular expressions whose matches are of a class, beside those that turnkv finds itself."""

    def __post_init__(self) -> None:
        for index, name in enumerate(self.exact):
            if name not in _CLASSES:
                raise InvalidConfigError(
                    f"precision.exact[{index}]", name, "is no class", remedy=f"give some of {', '.join(_CLASSES)}"
                )
        for layer in self.exact_layers:
            if layer < 0:
                raise InvalidConfigError(
                    "precision.exact_layers", layer, "must not be negative", remedy="count layers from 0"
                )
        _check("precision.rest", self.rest)
        for span_class, patterns in self.patterns.items():
            check_patterns(f"precision.patterns.{span_class}", patterns)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """All tiers that may come to hold tokens, `EXACT` first."""
        found = [EXACT, self.rest] + ([] if self.old is None else [self.old.store])
        return tuple(dict.fromkeys(found))

    def form(self, num_later_turns: int) -> Form:
        """What becomes of a closed turn after which so many other turns closed."""
        return "old" if self.old is not None and num_later_turns > self.old.after else "rest"

    def tier(self, form: Form, role: Role, span_class: SpanClass) -> Tier:
        """How a token is stored."""
        if form == "exact" or span_class in self.exact or f"role:{role}" in self.exact:
            return EXACT
        return self.old.store if form == "old" and self.old is not None else self.rest

    def describe(self) -> str:
        """A few words for tables and reports."""
        spared = ", ".join(self.exact) or "nothing"
        old = "" if self.old is None else f", {self.old.store} after {self.old.after} turns"
        return f"closed turns in {self.rest}{old}, {spared} exact"


def check_patterns(name: str, patterns: Sequence[str]) -> None:
    """Refuse what is no regular expression."""
    for index, pattern in enumerate(patterns):
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidConfigError(
                f"{name}[{index}]", pattern, str(error), remedy="give a Python regular expression"
            ) from None


def _check(name: str, tier: Tier) -> None:
    for form in tier:
        if form not in _format_names():
            raise InvalidConfigError(
                name, form, "is no number format", remedy=f"give one of {', '.join(_format_names())}"
            )


@cache
def _format_names() -> tuple[str, ...]:
    """Names of all formats: each is a file named after it. Looked up without importing them, and torch with them."""
    folder = Path(__file__).parent.parent / "cache" / "formats"
    names = {path.stem for path in folder.glob("*.py")} - {"__init__", "format"}
    return tuple(sorted(names))
