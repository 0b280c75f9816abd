"""fp8: e4m3, no scale, clamped at ±448. On CPUs it saves no more than int8; it is there for GPUs and interchange."""

import torch
from torch import Tensor

from turnkv.cache.formats.format import Format, register

_HIGHEST = 448.0


class Fp8(Format):
    """Half of bf16: 3 bits of mantissa, so a relative error of up to 1/16 (Micikevicius et al., arXiv:2209.05433)."""

    name = "fp8"

    def code_dtype(self, dtype: torch.dtype) -> torch.dtype:  # noqa: D102 - the base class says it
        return torch.uint8

    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        codes = vectors.float().clamp(-_HIGHEST, _HIGHEST).to(torch.float8_e4m3fn).view(torch.uint8)
        return codes, vectors.new_empty((*vectors.shape[:-1], 0), dtype=torch.float16)

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:  # noqa: D102
        return codes.contiguous().view(torch.float8_e4m3fn).float()

    def error_bound(self, vectors: Tensor) -> Tensor:
        """1/16 of each element, half the smallest subnormal, and whatever lies beyond ±448."""
        size = vectors.float().abs()
        each = (size.clamp_max(_HIGHEST) / 16).clamp_min(2.0**-10) + (size - _HIGHEST).clamp_min(0)
        bound: Tensor = torch.linalg.vector_norm(each, dim=-1)
        return bound


register(Fp8())
