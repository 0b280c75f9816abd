"""The body for CPUs, in C++ (csrc/attend_body.cpp): reads every tier as it lies, at the speed of memory."""

from torch import Tensor

from turnkv.cache import LayerKV, native
from turnkv.kernels import reference
from turnkv.kernels.contract import Batch, LayerAttention, register

_ISA: list[str] = []


def isas() -> list[str]:
    """Instruction sets that the body was compiled for and that this machine has, the fastest last."""
    return [] if native.KERNELS is None else list(native.KERNELS.isas())


def use_isa(name: str | None) -> None:
    """Run on this instruction set from now on, or on the fastest again."""
    assert name is None or name in isas(), name
    _ISA[:] = [] if name is None else [name]


def attend(query: Tensor, kv: LayerKV, batch: Batch, layer: LayerAttention) -> Tensor:
    """Attention by the C++ kernels; see the contract. What they do not know, the reference computes."""
    if query.dtype not in native.DTYPES or not all(
        native.can_serve(kv.arenas[tier], layout) and layout.dtype == query.dtype for tier, layout in kv.layouts.items()
    ):
        return reference.attend(query, kv, batch, layer)
    assert native.KERNELS is not None
    if query.stride(-1) != 1:
        query = query.contiguous()
    tiers = {tier: index for index, tier in enumerate(kv.layouts)}
    if "cpu" not in batch.prepared:
        batch.prepared["cpu"] = (
            native.KERNELS.Batch(
                [
                    (
                        sequence.first_query,
                        sequence.num_queries,
                        sequence.first_position,
                        [(tiers[g.tier], g.offset, g.pages, g.masks, g.positions) for g in sequence.groups],
                    )
                    for sequence in batch.sequences
                ]
            ),
            sorted({group.offset for sequence in batch.sequences for group in sequence.groups} - {0}),
        )
    prepared, offsets = batch.prepared["cpu"]
    angles = [] if layer.rotation is None else [layer.rotation.angles(offset) for offset in offsets]
    shape = next(iter(kv.layouts.values())).shape
    out = query.new_empty(*query.shape[:2], shape.value_dim)
    native.KERNELS.attend(
        _layer(query.shape[1], kv, layer),
        prepared,
        [
            (offset, cos.data_ptr(), sin.data_ptr())
            for offset, (cos, sin) in zip(offsets if angles else (), angles, strict=True)
        ],
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        out.data_ptr(),
        (isas().index(_ISA[0]) if _ISA else len(isas()) - 1),
    )
    return out


def _layer(num_heads: int, kv: LayerKV, layer: LayerAttention) -> object:
    """What does not change from call to call."""
    key = (num_heads, id(layer))
    if key not in kv.prepared:
        assert native.KERNELS is not None
        shape = next(iter(kv.layouts.values())).shape
        dtype = next(iter(kv.layouts.values())).dtype
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
        kv.prepared[key] = (made, sinks, layer)
    return kv.prepared[key][0]


if native.KERNELS is not None:
    register("cpu")(attend)
