"""int4: sixteen levels, groups of 32 dims, each group turned by a Hadamard transform first."""

import torch
from torch import Tensor

from turnkv.cache.formats.format import Format, register

_BLOCK = 32
_LOWEST, _HIGHEST = -8, 7


def blocks(num_dims: int) -> list[int]:
    """Sizes of the blocks that `num_dims` dims fall into: powers of two, 32 where they fit (80: 32, 32, 16)."""
    sizes = []
    while num_dims:
        sizes.append(min(_BLOCK, 1 << (num_dims.bit_length() - 1)))
        num_dims -= sizes[-1]
    return sizes


def _blocks_of(vectors: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = torch.split(vectors, blocks(vectors.shape[-1]), dim=-1)
    return parts


def hadamard(vectors: Tensor) -> Tensor:
    """The normalised Walsh-Hadamard transform of each block of the last dim; its own inverse. Float32 (64 stays).

    It spreads a block's outliers over all its dims, so that sixteen levels lose less (QuaRot, arXiv:2404.00456).
    """
    done = []
    for part in _blocks_of(vectors):
        size = part.shape[-1]
        turned, stride = part, 1
        while stride < size:
            pairs = torch.unflatten(turned, -1, (size // (2 * stride), 2, stride))
            first, second = pairs.unbind(-2)
            turned = torch.stack((first + second, first - second), dim=-2).flatten(-3)
            stride *= 2
        done.append(turned * turned.new_tensor(size**-0.5))
    return torch.cat(done, dim=-1)


class Int4(Format):
    """`code = round(y / scale)` in [-8, 7]; `y` is the transformed group, `scale` takes its largest element to -8.

    A signed fp16 scale a group uses all sixteen levels: 0.281 of bf16 where D is a multiple of 32.
    """

    name = "int4"

    def code_dtype(self, dtype: torch.dtype) -> torch.dtype:  # noqa: D102 - the base class says it
        return torch.uint8

    def code_bits(self, dtype: torch.dtype) -> int:  # noqa: D102
        return 4

    def num_scales(self, num_dims: int) -> int:  # noqa: D102
        return len(blocks(num_dims))

    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        codes, scales = [], []
        for part in _blocks_of(hadamard(vectors.float())):
            largest = part.gather(-1, part.abs().argmax(dim=-1, keepdim=True))
            limit = torch.finfo(torch.float16).max
            scale = (largest / _LOWEST).clamp(-limit, limit).half()
            step = scale.float()
            code = torch.where(step != 0, part / step.where(step != 0, 1.0), 0.0).round().clamp(_LOWEST, _HIGHEST)
            codes.append((code - _LOWEST).to(torch.uint8))
            scales.append(scale)
        return torch.cat(codes, dim=-1), torch.cat(scales, dim=-1)

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:  # noqa: D102
        sizes = torch.tensor(blocks(codes.shape[-1]), device=codes.device)
        steps = scales.float().repeat_interleave(sizes, dim=-1, output_size=codes.shape[-1])
        return hadamard((codes.float() + _LOWEST) * steps)

    def error_bound(self, vectors: Tensor) -> Tensor:
        """Half a step in each transformed dim, or what lies beyond the levels: up to a step opposite the largest."""
        _, scales = self.quantise(vectors)
        bounds = []
        for part, scale in zip(_blocks_of(hadamard(vectors.float())), scales.float().unbind(-1), strict=True):
            step = scale[..., None]
            ends = torch.stack((_LOWEST * step, _HIGHEST * step))
            beyond = torch.maximum(part - ends.amax(dim=0), ends.amin(dim=0) - part)
            bounds.append(torch.maximum(0.5 * step.abs(), beyond))
        bound: Tensor = torch.linalg.vector_norm(torch.cat(bounds, dim=-1), dim=-1)
        return bound


register(Int4())
