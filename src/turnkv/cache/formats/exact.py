"""exact: the model's own numbers, bit for bit."""

import torch
from torch import Tensor

from turnkv.cache.formats.format import Format, register


class Exact(Format):
    """No change at all."""

    name = "exact"

    def code_dtype(self, dtype: torch.dtype) -> torch.dtype:  # noqa: D102 - the base class says it
        return dtype

    def quantise(self, vectors: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        return vectors, vectors.new_empty((*vectors.shape[:-1], 0), dtype=torch.float16)

    def read(self, codes: Tensor, scales: Tensor) -> Tensor:  # noqa: D102
        return codes

    def error_bound(self, vectors: Tensor) -> Tensor:  # noqa: D102
        return torch.zeros(vectors.shape[:-1])


register(Exact())
