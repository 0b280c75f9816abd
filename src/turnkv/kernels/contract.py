"""The contract that every attention body fulfils, and what it is told about a step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from turnkv.cache import LayerKV, TileGroup, native
from turnkv.cache.storage import Slots
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


@dataclass(frozen=True, slots=True, eq=False)
class SequenceView:
    """One sequence of a step: its newest tokens are the queries, and their keys are in the groups with all others.

    A query at virtual position q sees a key at position p if `p <= q` and, in a layer with a window, `p > q - window`.
    So all keys before `first_position` are visible to all queries, and the newest are causal among themselves.
    """

    groups: tuple[TileGroup, ...]
    first_query: int
    """Row of the flattened batch where this sequence's queries begin."""
    num_queries: int
    first_position: int
    """Virtual position of the first query; the others follow it one by one."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The sequences of a step, whose rows partition the flattened batch in order."""

    sequences: tuple[SequenceView, ...]
    prepared: dict[str, Any] = field(default_factory=dict, repr=False)
    """What a body derived from the sequences once for all layers, by the body's name."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerStep:
    """All that one layer's attention needs in a step but for queries, keys and values."""

    kv: LayerKV
    slots: Slots
    """Where the new tokens' keys and values go."""
    batch: Batch
    attention: LayerAttention


class AttentionBody(Protocol):
    """Attention of a whole step's queries over their sequences' keys, for one layer."""

    def __call__(self, query: Tensor, kv: LayerKV, batch: Batch, layer: LayerAttention) -> Tensor:
        """One softmax over all keys that each query sees, whatever their order, tiers, tiles and offsets.

        T query tokens of all sequences, H query heads, G key-value heads (H a multiple of G; query head h reads
        key-value head h // (H / G)), D and E dims of keys and values.
        query: [T, H, D], after the model's own positional rotation. kv: the new tokens' keys and values are written.
        Returns [T, H, E] in the query's dtype; 0 where a query sees no key.
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


def default_body() -> str:
    """The fastest body that is there: the C++ one where it was built."""
    native.say_if_missing()
    return "cpu" if "cpu" in BODIES else "reference"
