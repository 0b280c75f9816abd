"""Rotation of queries: how a segment is read at another position without touching a key."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["half", "interleaved"]


@dataclass(frozen=True, eq=False)
class Rotation:
    """The plain rotary embedding of one kind of layer (Su et al., arXiv:2104.09864): unit norm, no attention factor.

    A key computed at position p that counts as lying at p + d is met by rotating the query by -d, since
    `q · R(d)k = R(-d)q · k`.
    """

    inverse_frequencies: Tensor
    """[num_dims / 2], float32, radians per position."""
    layout: Layout
    """`half`: dim i pairs with i + num_dims / 2; `interleaved`: 2i with 2i + 1."""
    first_dim: int
    """Where the rotated dims begin inside a head."""
    _angles: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def num_dims(self) -> int:
        """Rotated dims of a head; the others are left as they are."""
        return 2 * len(self.inverse_frequencies)

    def rotate(self, vectors: Tensor, distance: int) -> Tensor:
        """Rotate vectors by a distance in positions, of either sign.

        vectors: [..., D], computed in float32 (float64 stays). Returns the same shape and dtype.
        Error against keys rotated afresh: float32 rounding of the angle (test_rotation.py).
        """
        if distance == 0:
            return vectors
        work = vectors if vectors.dtype == torch.float64 else vectors.float()
        cos, sin = self._cos_sin(distance, work)
        stop = self.first_dim + self.num_dims
        part = work[..., self.first_dim : stop]
        if self.layout == "half":
            first, second = part.chunk(2, dim=-1)
        else:
            first, second = part[..., 0::2], part[..., 1::2]
        turned = (first * cos - second * sin, second * cos + first * sin)
        part = torch.cat(turned, dim=-1) if self.layout == "half" else torch.stack(turned, dim=-1).flatten(-2)
        if self.num_dims != vectors.shape[-1]:
            part = torch.cat((work[..., : self.first_dim], part, work[..., stop:]), dim=-1)
        return part.to(vectors.dtype)

    def angles(self, distance: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of a distance, [num_dims / 2] each, float32, on the frequencies' device."""
        return self._cos_sin(distance, self.inverse_frequencies.float())

    def _cos_sin(self, distance: int, like: Tensor) -> tuple[Tensor, Tensor]:
        key = (distance, like.dtype)
        if key not in self._angles:
            if len(self._angles) > 4096:
                self._angles.clear()
            angles = self.inverse_frequencies.to(device=like.device, dtype=like.dtype) * distance
            self._angles[key] = (angles.cos(), angles.sin())
        return self._angles[key]
