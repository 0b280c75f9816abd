"""What a number format is: how vectors become codes and scales, how those are read, and how far off that is."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Format(ABC):
    """A way to store vectors: keys or values, one token and head at a time.

    N vectors of D dims. Arithmetic is float32, each operation rounded once, so that C++ kernels give the same bits.
    """

    name: str

    @abstractmethod
    def code_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What codes are held in, for vectors of a dtype."""

    def code_bits(self, dtype: torch.dtype) -> int:
        """Bits that a code takes in memory."""
        return 8 * self.code_dtype(dtype).itemsize

    def num_scales(self, num_dims: int) -> int:
        """Scales of a vector, fp16 each."""
        return 0

    @abstractmethod
    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """[..., D] → codes [..., D], and scales [..., num_scales(D)], fp16."""

    @abstractmethod
    def read(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Codes and scales → vectors [..., D], float32 (the exact format: its own dtype)."""

    @abstractmethod
    def error_bound(self, vectors: Tensor) -> Tensor:
        """[..., D] → [...], float32: largest Euclidean norm of `read(quantise(v)) - v`, rounding of scales included."""


FORMATS: dict[str, Format] = {}
"""Formats by name, `exact` among them."""


def register(form: Format) -> Format:
    """Add a format to the registry."""
    FORMATS[form.name] = form
    return form
