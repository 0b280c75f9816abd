"""Decoder layers, the output head and the embedding put in place of a model's own, each as one call into the kernels.

Each fused layer is compared at load with the layer that it replaces, on that layer's own input and through the real
attention: what differs, or is of another kind, stays the model's own. Devices other than the CPU keep their modules:
for them this is where compiled graphs belong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from turnkv.engine.hook import current_step
from turnkv.engine.probe import ProbedLayer
from turnkv.engine.structure import mlp_norm, read_layer
from turnkv.kernels.blocks import Block, can_serve
from turnkv.kernels.matrices import Matrix, can_multiply

_TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Relative error of what a layer adds to its input: twice what rounding makes. A part left out makes 0.1 and more."""


@dataclass(slots=True)
class Fusion:
    """What was put in place of a model's own modules."""

    num_layers: int = 0
    """Layers of the model."""
    num_fused: int = 0
    has_fused_mlps: bool = False
    """Whether all fused layers compute their MLP too."""
    has_fused_head: bool = False
    worst_error: float = 0.0
    """Of all layers that were put in place, relative."""

    def __str__(self) -> str:
        parts = f"{self.num_fused} of {self.num_layers} layers"
        if self.num_fused and not self.has_fused_mlps:
            parts += " (attention only)"
        return parts + (", output head" if self.has_fused_head else "")


class FusedLayer(nn.Module):
    """A decoder layer through the kernels. Changes its input in place."""

    def __init__(self, layer: nn.Module, index: int, block: Block, *, has_mlp: bool) -> None:
        super().__init__()
        self.index = index
        self.block = block
        self.norm = None if has_mlp else mlp_norm(layer)
        self.mlp: Any = None if has_mlp else layer.mlp
        self.after = None if has_mlp else getattr(layer, "post_feedforward_layernorm", None)

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> Tensor:
        """hidden_states [1, T, C] → the same, changed."""
        rows = hidden_states[0]
        cos, sin = (rows, rows) if self.block.num_pairs == 0 else (each[0] for each in position_embeddings)
        self.block.run(rows, (cos, sin), current_step().layer_step(self.index))
        if self.norm is None or self.mlp is None:
            return hidden_states
        added = self.mlp(self.norm(hidden_states))
        if isinstance(added, tuple):  # mixtures of experts give their router's scores too
            added = added[0]
        out: Tensor = hidden_states + (added if self.after is None else self.after(added))
        return out


class _Trial(nn.Module):
    """A layer that computes as before, and compares what would replace it."""

    def __init__(self, layer: nn.Module, index: int, probed: ProbedLayer, *, is_int8: bool) -> None:
        super().__init__()
        self.layer, self.index, self.probed, self.is_int8 = layer, index, probed, is_int8
        self.found: nn.Module = layer
        self.error = 0.0

    def forward(self, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        before = hidden_states.clone()
        out: Tensor = self.layer(hidden_states, *arguments, **options)
        parts = read_layer(self.layer, self.probed)
        if parts is not None:
            fused = FusedLayer(self.layer, self.index, Block(parts), has_mlp=parts.mlp is not None)
            ours = fused(before.clone(), *arguments, **options)
            self.error = _error(before.float(), out.float(), ours.float(), torch.finfo(out.dtype).eps)
            if self.error <= _TOLERANCE[out.dtype]:
                self.found = fused
                if self.is_int8:
                    fused.block = Block(parts, is_int8=True)
        return out


def _error(before: Tensor, out: Tensor, ours: Tensor, rounding: float) -> float:
    """How far ours is from what a layer added, relative to that; a last place of the sum is no error."""
    off = (ours - out).abs() - rounding * out.abs()
    return float(off.clamp_min(0).norm() / (out - before).norm().clamp_min(1e-12))


class FusedHead(nn.Module):
    """The output head."""

    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., C] → [..., V]."""
        return self.matrix.product(hidden_states)


class PackedEmbedding(nn.Module):
    """An embedding that shares its weights with the output head, as the head holds them."""

    def __init__(self, matrix: Matrix, dtype: torch.dtype) -> None:
        super().__init__()
        self.matrix, self.dtype = matrix, dtype

    def forward(self, ids: Tensor) -> Tensor:
        """[..., T] → [..., T, C]."""
        return self.matrix.rows(ids).to(self.dtype)


class Fuser:
    """Puts fused modules into a model while it runs once: `with` it, run the model; afterwards they are in place."""

    def __init__(self, model: Any, layers: Sequence[ProbedLayer], dtype: torch.dtype, *, is_int8: bool = False) -> None:
        self._model = model
        self._layers = layers
        self._dtype = dtype
        self._is_int8 = is_int8
        self.fusion = Fusion(num_layers=len(layers))

    def __enter__(self) -> "Fuser":
        modules = self._modules()
        for index, probed in enumerate(self._layers if modules is not None else ()):
            if can_serve(probed.shape, self._dtype):
                modules[index] = _Trial(modules[index], index, probed, is_int8=self._is_int8)  # type: ignore[index]
        return self

    def __exit__(self, *_: object) -> None:
        modules = self._modules()
        fused = []
        for index in range(len(self._layers) if modules is not None else 0):
            trial = modules[index]  # type: ignore[index]
            if isinstance(trial, _Trial):
                modules[index] = trial.found  # type: ignore[index]
                if isinstance(trial.found, FusedLayer):
                    fused.append(trial.found)
                    self.fusion.worst_error = max(self.fusion.worst_error, trial.error)
        self.fusion.num_fused = len(fused)
        self.fusion.has_fused_mlps = all(layer.mlp is None for layer in fused)
        self._fuse_head()

    def _modules(self) -> nn.ModuleList | None:
        modules = getattr(self._model.get_decoder(), "layers", None)
        is_list = isinstance(modules, nn.ModuleList) and len(modules) == len(self._layers)
        return modules if is_list else None

    def _fuse_head(self) -> None:
        head, embedding = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        if type(head) is not nn.Linear or not can_multiply(self._dtype):
            return
        matrix = Matrix.pack(head.weight.detach(), head.bias, is_int8=self._is_int8)
        is_tied = head.weight.data_ptr() == embedding.weight.data_ptr()
        self._model.set_output_embeddings(FusedHead(matrix))
        if is_tied and type(embedding) is nn.Embedding and not self._is_int8:
            self._model.set_input_embeddings(PackedEmbedding(matrix, self._dtype))
        self.fusion.has_fused_head = True
