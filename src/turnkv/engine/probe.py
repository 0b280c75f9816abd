"""The probe at load: what each attention layer of a model does, seen rather than believed."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turnkv.cache import LayerShape
from turnkv.engine.hook import step_in_progress
from turnkv.errors import UnsupportedModelError
from turnkv.kernels import LayerAttention, LayerStep, Rotation
from turnkv.kernels.rotation import Layout

_POSITIONS = (3, 8)
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 4e-2, torch.float16: 1e-2}
"""Relative error up to which a rotation explains a layer; the wrong ones are off by 0.3 and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedLayer:
    """An attention layer as the probe saw it."""

    shape: LayerShape
    attention: LayerAttention
    can_shift: bool
    """Whether its keys can be read at other positions: its rotation was recognised, or it has none."""


class _Recorder:
    """A step that answers zeros, so that what a layer receives does not depend on positions before it."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor, Tensor, dict[str, Any]]] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        assert layer not in self.seen, "a layer attends once a forward pass"
        self.seen[layer] = (query[:, 0].clone(), key[:, 0].clone(), value[:, 0].clone(), options)
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])

    def layer_step(self, layer: int) -> LayerStep:
        raise AssertionError("models are probed before anything in them is replaced")


def probe_layers(model: Any, num_layers: int) -> tuple[ProbedLayer, ...]:
    """Run one token at two positions and read off each layer's shape, options and rotation.

    Raises:
        UnsupportedModelError: some layer never reached the hook, so its attention would not be ours.
    """
    records = []
    for position in _POSITIONS:
        recorder = _Recorder()
        with step_in_progress(recorder):
            device = model.get_input_embeddings().weight.device
            token = min(5, model.get_input_embeddings().weight.shape[0] - 1)
            ids = torch.tensor([[token]], device=device)
            model(input_ids=ids, position_ids=torch.full_like(ids, position), use_cache=False)
        records.append(recorder.seen)
    missing = sorted(set(range(num_layers)) - set(records[0]))
    if missing:
        raise UnsupportedModelError(
            f"model type {model.config.model_type!r}: layers {missing} do not use transformers' attention interface; "
            "choose a model all of whose layers attend through it"
        )
    frequencies = _frequencies(model)
    return tuple(_probed(records[0][layer], records[1][layer], frequencies) for layer in range(num_layers))


def _frequencies(model: Any) -> list[Tensor]:
    """All rotary frequencies that the model holds, as float32."""
    found: list[Tensor] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and not any(torch.equal(buffer.float(), other) for other in found):
            found.append(buffer.detach().float().clone())
    return found


def _probed(near: tuple[Any, ...], far: tuple[Any, ...], frequencies: list[Tensor]) -> ProbedLayer:
    _, key, value, options = near
    sinks = options.get("s_aux")
    is_known, rotation = _rotation(near, far, frequencies)
    return ProbedLayer(
        shape=LayerShape(num_heads=key.shape[0], key_dim=key.shape[-1], value_dim=value.shape[-1]),
        attention=LayerAttention(
            scale=float(options["scaling"]) if options.get("scaling") is not None else key.shape[-1] ** -0.5,
            softcap=options.get("softcap"),
            window=options.get("sliding_window"),
            sinks=None if sinks is None else sinks.detach(),
            rotation=rotation,
        ),
        can_shift=is_known,
    )


def _rotation(near: tuple[Any, ...], far: tuple[Any, ...], frequencies: list[Tensor]) -> tuple[bool, Rotation | None]:
    """Whether the layer's way with positions is recognised, and its rotation if it has one."""
    tolerance = _TOLERANCE[near[1].dtype]
    distance = _POSITIONS[1] - _POSITIONS[0]
    best_error, best = _misfit(None, near, far, distance), None
    dim = near[1].shape[-1]
    for frequency in frequencies:
        num_dims = 2 * len(frequency)
        if num_dims > dim:
            continue
        layouts: tuple[Layout, ...] = ("half", "interleaved")
        for layout in layouts:
            for first_dim in {0, dim - num_dims}:
                candidate = Rotation(frequency, layout, first_dim)
                error = _misfit(candidate, near, far, distance)
                if error < best_error:
                    best_error, best = error, candidate
    return (best_error <= tolerance, best if best_error <= tolerance else None)


def _misfit(rotation: Rotation | None, near: tuple[Any, ...], far: tuple[Any, ...], distance: int) -> float:
    """How far the rotation is from taking queries and keys at the near position to those at the far one."""
    worst = 0.0
    for here, there in zip(near[:2], far[:2], strict=True):
        turned = here.float() if rotation is None else rotation.rotate(here.float(), distance)
        scale = there.float().norm().clamp_min(1e-12)
        worst = max(worst, float((turned - there.float()).norm() / scale))
    return worst
