"""The body for CPUs, in C++ (csrc/attend.cpp): reads every tier as it lies, at the speed of memory."""

import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from turnkv.cache import LayerKV, native
from turnkv.kernels import reference
from turnkv.kernels.contract import Batch, LayerAttention, LayerStep, register
from turnkv.kernels.rotation import Rotation
from turnkv.types import EXACT, Tier

_ISAS: list[str] = [] if native.KERNELS is None else list(native.KERNELS.isas())
_chosen = len(_ISAS) - 1


def isas() -> list[str]:
    """Instruction sets that the body was compiled for and that this machine has, the fastest last."""
    return list(_ISAS)


def use_isa(name: str | None) -> None:
    """Run on this instruction set from now on, or on the fastest again."""
    global _chosen  # noqa: PLW0603 (one choice for the process)
    _chosen = len(_ISAS) - 1 if name is None else _ISAS.index(name)


def read_bandwidth(num_bytes: int, repeats: int = 5) -> float | None:
    """Bytes a second at which all threads together read memory, the median of several tries; None without kernels."""
    if native.KERNELS is None:
        return None
    words = torch.zeros(num_bytes // 8, dtype=torch.int64)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        native.KERNELS.read(words.data_ptr(), words.numel())
        times.append(time.perf_counter() - started)
    return words.nbytes / statistics.median(times)


def chosen_isa() -> int:
    """Index of the instruction set in use."""
    return _chosen


@dataclass(frozen=True, slots=True)
class _Layer:
    """What does not change from step to step in one layer."""

    native_layer: object
    value_dim: int
    kept: tuple[object, ...]
    """What the native layer points to, and what its key in `LayerKV.prepared` is the id of."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What does not change from layer to layer in one step."""

    native_batch: object
    offsets: tuple[int, ...]
    angles: dict[int, tuple[list[tuple[int, int, int]], tuple[object, ...]]]
    """By the id of the rotation: (offset, cosines, sines) of all offsets, and what keeps them alive."""


def attend(query: Tensor, kv: LayerKV, batch: Batch, layer: LayerAttention) -> Tensor:
    """Attention by the C++ kernels; see the contract. What they do not know, the reference computes."""
    num_rows, num_heads, _ = query.shape
    prepared = _layer(num_heads, query.dtype, kv, layer) if query.device.type == "cpu" else None
    if prepared is None:
        return reference.attend(query, kv, batch, layer)
    step = _step(kv, batch)
    if query.stride(2) != 1:
        query = query.contiguous()
    out = query.new_empty((num_rows, num_heads, prepared.value_dim))
    assert native.KERNELS is not None
    native.KERNELS.attend(
        prepared.native_layer,
        step.native_batch,
        _angles(step, layer.rotation),
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        out.data_ptr(),
        _chosen,
    )
    return out


def run_block(block: object, num_heads: int, rows: Tensor, angles: tuple[Tensor, Tensor], step: LayerStep) -> None:
    """One step through a native block, its attention included, in place; see `Block.run` for the shapes."""
    kv = step.kv
    layer = _layer(num_heads, rows.dtype, kv, step.attention)
    assert layer is not None
    assert rows.is_contiguous()
    cos, sin = (each if each.stride(-1) == 1 else each.contiguous() for each in angles)
    assert cos.stride(0) == sin.stride(0)
    batch = _step(kv, step.batch)
    assert native.KERNELS is not None
    native.KERNELS.block(
        block,
        layer.native_layer,
        batch.native_batch,
        _angles(batch, step.attention.rotation),
        native.exact_arena(kv.arenas[EXACT], kv.layouts[EXACT]),
        step.slots,
        rows.data_ptr(),
        (cos.data_ptr(), sin.data_ptr(), cos.stride(0)),
        _chosen,
    )


def _layer(num_heads: int, dtype: torch.dtype, kv: LayerKV, layer: LayerAttention) -> _Layer | None:
    key = ("cpu", num_heads, dtype, id(layer))
    if key not in kv.prepared:
        kv.prepared[key] = _prepare_layer(num_heads, dtype, kv, layer)
    prepared: _Layer | None = kv.prepared[key]
    return prepared


def _step(kv: LayerKV, batch: Batch) -> _Step:
    if "cpu" not in batch.prepared:
        batch.prepared["cpu"] = _prepare_step(tuple(kv.layouts), batch)
    step: _Step = batch.prepared["cpu"]
    return step


def _angles(step: _Step, rotation: Rotation | None) -> list[tuple[int, int, int]]:
    if not step.offsets or rotation is None:
        return []
    if id(rotation) not in step.angles:
        kept = [rotation.angles(offset) for offset in step.offsets]
        addresses = [
            (offset, cos.data_ptr(), sin.data_ptr()) for offset, (cos, sin) in zip(step.offsets, kept, strict=True)
        ]
        step.angles[id(rotation)] = (addresses, (rotation, kept))
    return step.angles[id(rotation)][0]


def _prepare_step(tiers: tuple[Tier, ...], batch: Batch) -> _Step:
    assert native.KERNELS is not None
    places = {tier: index for index, tier in enumerate(tiers)}
    sequences = [
        (
            sequence.first_query,
            sequence.num_queries,
            sequence.first_position,
            [(places[g.tier], g.offset, g.pages, g.masks, g.positions) for g in sequence.groups],
        )
        for sequence in batch.sequences
    ]
    offsets = {group.offset for sequence in batch.sequences for group in sequence.groups} - {0}
    return _Step(native.KERNELS.Batch(sequences), tuple(sorted(offsets)), {})


def _prepare_layer(num_heads: int, dtype: torch.dtype, kv: LayerKV, layer: LayerAttention) -> _Layer | None:
    """None where the kernels do not know the layer's memory or the queries' dtype."""
    if native.KERNELS is None or dtype not in native.DTYPES:
        return None
    if not all(
        native.can_serve(kv.arenas[tier], layout) and layout.dtype == dtype for tier, layout in kv.layouts.items()
    ):
        return None
    shape = next(iter(kv.layouts.values())).shape
    sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
    rotation = layer.rotation
    made = native.KERNELS.Layer(
        [native.arena(kv.arenas[tier], layout) for tier, layout in kv.layouts.items()],
        native.DTYPES[dtype],
        (num_heads, shape.num_heads, shape.key_dim, shape.value_dim),
        layer.scale,
        layer.softcap or 0.0,
        layer.window or 0,
        0 if sinks is None else sinks.data_ptr(),
        rotation is not None and rotation.layout == "interleaved",
        0 if rotation is None else rotation.first_dim,
        0 if rotation is None else len(rotation.inverse_frequencies),
    )
    return _Layer(made, shape.value_dim, (sinks, layer))


if native.KERNELS is not None:
    register("cpu")(attend)
