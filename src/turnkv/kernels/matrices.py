"""Matrices of weights as the C++ products take them (csrc/block.h): panels of 16 outputs, packed once at load."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from turnkv.cache import native
from turnkv.kernels import cpu

PANEL, DEPTH = 16, 32
_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}

Address = tuple[int, int, int, int, int, int]
"""Panels, format, outputs and inputs (both rounded up), scales, bias; addresses, 0 where there are none."""

NO_MATRIX: Address = (0, 0, 0, 0, 0, 0)


def can_multiply(dtype: torch.dtype) -> bool:
    """Whether there are kernels for rows of this dtype."""
    return native.KERNELS is not None and dtype in native.DTYPES


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear layer's weights [N, K] and bias [N], packed; N rounded up to 16 and K to 32 with zeros."""

    panels: Tensor
    """Of 16 bits and 8: [N / 16, K / 2, 16, 2], so that pairs of inputs lie side by side; of 32: [N / 16, K, 16, 1]."""
    num_outputs: int
    num_inputs: int
    """As they were, not rounded."""
    scales: Tensor | None
    """float32 [N], of int8 weights: weight = code * scale."""
    bias: Tensor | None
    """float32 [N]."""

    @staticmethod
    def pack(weight: Tensor, bias: Tensor | None = None, *, is_int8: bool = False) -> "Matrix":
        """Copy weights [N, K] into panels; `is_int8` rounds them to 8 bits, with a scale an output."""
        num_outputs, num_inputs = weight.shape
        scales = None
        if is_int8:
            steps = weight.float().abs().amax(dim=1) / 127
            weight = (weight.float() / steps.clamp_min(1e-30)[:, None]).round().to(torch.int8)
            scales = _padded(steps, PANEL)
        rows, columns = -num_outputs % PANEL, -num_inputs % DEPTH
        if rows or columns:
            weight = torch.nn.functional.pad(weight, (0, columns, 0, rows))
        each = 1 if weight.dtype == torch.float32 else 2
        panels = weight.view(weight.shape[0] // PANEL, PANEL, -1, each).transpose(1, 2).contiguous()
        bias = None if bias is None else _padded(bias.float(), PANEL)
        return Matrix(panels, num_outputs, num_inputs, scales, bias)

    @staticmethod
    def pack_in_turns(first: Tensor, second: Tensor, *, is_int8: bool = False) -> "Matrix":
        """Two matrices [N, K] as one, in turns of 16 outputs: of the first, of the second, and so on."""
        rows = -first.shape[0] % PANEL
        padded = (torch.nn.functional.pad(part, (0, 0, 0, rows)) for part in (first, second))
        halves = [part.view(-1, PANEL, part.shape[1]) for part in padded]
        return Matrix.pack(torch.stack(halves, dim=1).flatten(0, 2), is_int8=is_int8)

    @property
    def address(self) -> Address:
        """As the kernels take it. Valid as long as the matrix lives."""
        return (
            self.panels.data_ptr(),
            _FORMATS[self.panels.dtype],
            self.panels.shape[0] * PANEL,
            self.panels.shape[1] * self.panels.shape[3],
            0 if self.scales is None else self.scales.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        return sum(part.nbytes for part in (self.panels, self.scales, self.bias) if part is not None)

    def rows(self, indices: Tensor) -> Tensor:
        """Weights of some outputs [..., K], as an embedding gives them."""
        found = self.panels[indices // PANEL, :, indices % PANEL].flatten(-2)[..., : self.num_inputs]
        return found if self.scales is None else found * self.scales[indices, None]

    def product(self, rows: Tensor) -> Tensor:
        """[..., K] times the weights, and the bias: [..., N], in the rows' dtype."""
        flat = rows.reshape(-1, rows.shape[-1])
        assert native.KERNELS is not None
        out = rows.new_empty(flat.shape[0], self.num_outputs)
        native.KERNELS.product(
            self.address,
            native.DTYPES[rows.dtype],
            (flat.data_ptr(), flat.stride(0), self.num_inputs),
            flat.shape[0],
            (out.data_ptr(), out.stride(0), self.num_outputs),
            cpu.chosen_isa(),
        )
        return out.view(*rows.shape[:-1], self.num_outputs)


def stacked(weights: Sequence[Tensor], biases: Sequence[Tensor | None], *, is_int8: bool = False) -> Matrix:
    """Several linear layers of the same inputs as one, their outputs one after the other."""
    whole = torch.cat(list(weights))
    if all(bias is None for bias in biases):
        return Matrix.pack(whole, is_int8=is_int8)
    filled = [
        weight.new_zeros(weight.shape[0]) if bias is None else bias
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return Matrix.pack(whole, torch.cat(filled), is_int8=is_int8)


def _padded(values: Tensor, to: int) -> Tensor:
    return torch.nn.functional.pad(values.float(), (0, -len(values) % to)).contiguous()
