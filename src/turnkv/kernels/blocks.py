"""A decoder layer as one C++ call: its parts, read off a model by whoever knows models, packed once."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from turnkv.cache import LayerShape, native
from turnkv.kernels import cpu
from turnkv.kernels.contract import LayerStep
from turnkv.kernels.matrices import NO_MATRIX, Matrix, can_multiply, stacked

Activation = Literal["silu", "gelu_tanh"]
_ACTIVATIONS: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm: x / sqrt(mean(x²) + epsilon) * weight."""

    weight: Tensor
    """float32 [C]."""
    epsilon: float


@dataclass(frozen=True, slots=True)
class Linear:
    """Weights [N, K] and bias [N]."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMLP:
    """down(act(gate(x)) * up(x)), between its norms."""

    before: Norm
    after: Norm | None
    gate: Tensor
    up: Tensor
    down: Tensor
    activation: Activation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """A decoder layer: x += after(out(attention(before(x)))), then x += mlp(x), where that is of this kind."""

    num_heads: int
    shape: LayerShape
    num_pairs: int
    """Rotated dims of a head, in two halves from the first on: 0 where keys carry no position."""
    before: Norm
    after: Norm | None
    query: Linear
    key: Linear
    value: Linear
    out: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    mlp: GatedMLP | None
    """None where the layer's second half is another's."""


class Block:
    """A decoder layer's weights, packed, and its computation."""

    def __init__(self, parts: LayerParts, *, is_int8: bool = False) -> None:
        dtype = parts.query.weight.dtype
        projections = (parts.query, parts.key, parts.value)
        matrices: list[Matrix | None] = [
            stacked([each.weight for each in projections], [each.bias for each in projections], is_int8=is_int8),
            Matrix.pack(parts.out.weight, parts.out.bias, is_int8=is_int8),
            None,
            None,
        ]
        mlp = parts.mlp
        if mlp is not None:
            matrices[2:] = [
                Matrix.pack_in_turns(mlp.gate, mlp.up, is_int8=is_int8),
                Matrix.pack(mlp.down, is_int8=is_int8),
            ]
        norms = [
            parts.before,
            parts.after,
            None if mlp is None else mlp.before,
            None if mlp is None else mlp.after,
            parts.query_norm,
            parts.key_norm,
        ]
        self.num_heads = parts.num_heads
        self.num_pairs = parts.num_pairs
        self._kept = (matrices, norms)
        assert native.KERNELS is not None
        self._native = native.KERNELS.Block(
            native.DTYPES[dtype],
            parts.query.weight.shape[1],
            (parts.num_heads, parts.shape.num_heads, parts.shape.key_dim, parts.shape.value_dim),
            parts.num_pairs,
            0 if mlp is None else _ACTIVATIONS[mlp.activation],
            [(0, 0.0) if norm is None else (norm.weight.data_ptr(), norm.epsilon) for norm in norms],
            [NO_MATRIX if matrix is None else matrix.address for matrix in matrices],
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of weights that a step reads."""
        return sum(matrix.num_bytes for matrix in self._kept[0] if matrix is not None)

    def run(self, rows: Tensor, angles: tuple[Tensor, Tensor], step: LayerStep) -> None:
        """Compute a step in place; its keys and values are written before its attention reads them.

        rows: [T, C], the residual stream. angles: cosines and sines of the tokens' positions, [T, at least num_pairs]
        each, in the same dtype.
        """
        cpu.run_block(self._native, self.num_heads, rows, angles, step)


def can_serve(shape: LayerShape, dtype: torch.dtype) -> bool:
    """Whether the kernels take layers of this shape and dtype."""
    return (
        can_multiply(dtype) and max(shape.key_dim, shape.value_dim) <= 512 and shape.key_dim * dtype.itemsize % 4 == 0
    )
