"""The contract that every attention body fulfils, and what it is told about a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from turnkv.cache.storage import SlotRange, slot_range
from turnkv.cache.views import Run
from turnkv.kernels.rotation import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What one layer's attention computes, apart from the keys and values themselves."""

    scale: float
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)` (Gemma 2)."""
    window: int | None = None
    """A query at virtual position q sees keys in `(q - window, q]`; None sees all."""
    sinks: Tensor | None = None
    """[H], a logit per query head that takes part in the softmax and adds nothing to the output (GPT-OSS)."""
    rotation: Rotation | None = None
    """How keys of this layer move to other positions; None where they carry no position."""


@dataclass(frozen=True, slots=True)
class Group:
    """Keys of one sequence that share an offset."""

    offset: int
    slots: SlotRange
    first: int
    """Where the group's keys begin in the sequence's own order of keys."""
    count: int
    num_new: int
    """How many of the group's last keys are the sequence's newest tokens: causal among themselves."""


@dataclass(frozen=True)
class SequenceView:
    """One sequence of a step: its newest tokens are the queries, and its keys are runs that end with theirs.

    Every key but the newest is visible to all queries; the newest are causal among themselves.
    """

    runs: tuple[Run, ...]
    first_query: int
    """Row of the flattened batch where this sequence's queries begin."""
    num_queries: int
    device: torch.device
    _plans: dict[int | None, "KeyPlan"] = field(default_factory=dict, repr=False, compare=False)

    @property
    def query_positions(self) -> range:
        """Virtual positions of the queries: they are the sequence's last."""
        last = self.runs[-1]
        stop = last.position + last.length
        return range(stop - self.num_queries, stop)

    def keys_within(self, window: int | None) -> "KeyPlan":
        """The keys that any of the queries sees in a layer with this window, computed once a step."""
        if window not in self._plans:
            self._plans[window] = KeyPlan.of(self, window)
        return self._plans[window]


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """Keys to read for one sequence and one window, grouped by offset."""

    groups: tuple[Group, ...]
    num_keys: int
    hidden: Tensor | None
    """[num_queries, num_keys], bool, true where the window hides a key; None where it hides none."""

    @staticmethod
    def of(sequence: SequenceView, window: int | None) -> "KeyPlan":
        """Plan what the sequence's queries read in a layer with this window."""
        if not sequence.runs:
            return KeyPlan((), 0, None)
        queries = sequence.query_positions
        runs: Sequence[Run] = sequence.runs
        if window is not None:
            runs = [seen for run in runs if (seen := _clipped(run, queries.start - window + 1)) is not None]
        by_offset: dict[int, list[Run]] = {}
        for run in runs:
            by_offset.setdefault(run.offset, []).append(run)
        # The newest tokens have offset 0 and come last, so that causality is a matter of order.
        ordered = sorted(by_offset.items(), key=lambda group: group[0] == 0)
        groups, first = [], 0
        for offset, members in ordered:
            count = sum(run.length for run in members)
            slots = slot_range([(run.slot, run.length) for run in members], sequence.device)
            num_new = min(sequence.num_queries, count) if offset == 0 else 0
            groups.append(Group(offset, slots, first, count, num_new))
            first += count
        hidden = None
        if window is not None and len(queries) > 1:
            positions = torch.tensor(
                [p for _, runs in ordered for run in runs for p in range(run.position, run.position + run.length)]
            )
            at = torch.arange(queries.start, queries.stop)
            hidden = (positions[None, :] <= at[:, None] - window).to(sequence.device)
            if not bool(hidden.any()):
                hidden = None
        return KeyPlan(tuple(groups), first, hidden)


def _clipped(run: Run, first_position: int) -> Run | None:
    """The part of a run at or after a virtual position."""
    cut = max(0, first_position - run.position)
    if cut >= run.length:
        return None
    return Run(run.slot + cut, run.length - cut, run.position + cut, run.offset)


class AttentionBody(Protocol):
    """Attention of a whole step's queries over their sequences' keys, for one layer."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, batch: Sequence[SequenceView], layer: LayerAttention
    ) -> Tensor:
        """One softmax over all keys that each query sees, whatever their order, runs and offsets.

        T query tokens of all sequences, H query heads, G key-value heads (H a multiple of G; query head h reads
        key-value head h // (H / G)), S slots, D and E dims of keys and values.
        query: [T, H, D], after the model's own positional rotation. keys: [G, S, D]; values: [G, S, E], new tokens
        written. Returns [T, H, E] in the query's dtype; 0 where a query sees no key.
        """
        ...


BODIES: dict[str, AttentionBody] = {}
"""Bodies by name. `reference` is the judge of all others."""


def register(name: str) -> Callable[[AttentionBody], AttentionBody]:
    """Add a body to the registry."""

    def add(body: AttentionBody) -> AttentionBody:
        BODIES[name] = body
        return body

    return add
