"""int8: symmetric, one scale a token and head."""

import torch
from torch import Tensor

from turnkv.cache.formats.format import Format, register

_LEVELS = 127


class Int8(Format):
    """`code = round(x / scale)` with `scale = max |x| / 127` in fp16: 0.516 of bf16 where D = 64."""

    name = "int8"

    def code_dtype(self, dtype: torch.dtype) -> torch.dtype:  # noqa: D102 - the base class says it
        return torch.int8

    def num_scales(self, num_dims: int) -> int:  # noqa: D102
        return 1

    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        work = vectors.float()
        scales = (work.abs().amax(dim=-1, keepdim=True) / _LEVELS).clamp_max(torch.finfo(torch.float16).max).half()
        step = scales.float()
        codes = torch.where(step > 0, work / step.where(step > 0, 1.0), 0.0).round().clamp(-_LEVELS, _LEVELS)
        return codes.to(torch.int8), scales

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:  # noqa: D102
        return codes.float() * scales.float()

    def error_bound(self, vectors: Tensor) -> Tensor:
        """Half a step in each dim, or what is left beyond 127 steps: a little by rounding, all where the scale is 0."""
        _, scales = self.quantise(vectors)
        each = torch.maximum(0.5 * scales.float(), vectors.float().abs() - _LEVELS * scales.float())
        bound: Tensor = torch.linalg.vector_norm(each, dim=-1)
        return bound


register(Int8())
