"""What a decoder layer of a Hugging Face model is made of, read off its modules: `None` where it is of another kind.

Names say only where to look; what a module computes is tried out. And whoever uses the parts compares the result with
the layer itself, so that a layer with something more than these parts is found out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from turnkv.engine.probe import ProbedLayer
from turnkv.kernels.blocks import Activation, GatedMLP, LayerParts, Linear, Norm

_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def read_layer(layer: nn.Module, probed: ProbedLayer) -> LayerParts | None:
    """The parts of a decoder layer: RMS norms, projections without or with bias, rotation in halves, a gated MLP."""
    attention = getattr(layer, "self_attn", None)
    before = _norm(getattr(layer, "input_layernorm", None))
    if attention is None or before is None:
        return None
    projections = _projections(attention, probed)
    out = _linear(getattr(attention, "o_proj", None))
    head_norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    query_norm, key_norm = (_norm(module) for module in head_norms)
    rotation = probed.attention.rotation
    if projections is None or out is None or not probed.can_shift:
        return None
    if rotation is not None and (rotation.layout != "half" or rotation.first_dim):
        return None
    for module, norm in zip(head_norms, (query_norm, key_norm), strict=True):
        if (module is None) != (norm is None) or (norm is not None and len(norm.weight) != probed.shape.key_dim):
            return None
    has_four_norms = hasattr(layer, "pre_feedforward_layernorm")
    after = _norm(getattr(layer, "post_attention_layernorm", None))
    if after is None:
        return None
    return LayerParts(
        num_heads=projections[0].weight.shape[0] // probed.shape.key_dim,
        shape=probed.shape,
        num_pairs=0 if rotation is None else len(rotation.inverse_frequencies),
        before=before,
        after=after if has_four_norms else None,
        query=projections[0],
        key=projections[1],
        value=projections[2],
        out=out,
        query_norm=query_norm,
        key_norm=key_norm,
        mlp=_mlp(layer, has_four_norms=has_four_norms),
    )


def mlp_norm(layer: nn.Module) -> nn.Module:
    """The norm before the second half of a layer."""
    found: nn.Module = getattr(layer, "pre_feedforward_layernorm", None) or layer.post_attention_layernorm  # type: ignore[assignment]
    return found


def _projections(attention: nn.Module, probed: ProbedLayer) -> tuple[Linear, Linear, Linear] | None:
    names = ("q_proj", "k_proj", "v_proj")
    shape = probed.shape
    if all(hasattr(attention, name) for name in names):
        query, key, value = (_linear(getattr(attention, name)) for name in names)
    else:
        whole = _linear(getattr(attention, "qkv_proj", None))
        if whole is None:
            return None
        sizes = [shape.num_heads * shape.key_dim, shape.num_heads * shape.value_dim]
        sizes.insert(0, whole.weight.shape[0] - sum(sizes))
        weights = torch.split(whole.weight, sizes)
        biases = (None, None, None) if whole.bias is None else torch.split(whole.bias, sizes)
        query, key, value = (Linear(weight, bias) for weight, bias in zip(weights, biases, strict=True))
    if query is None or key is None or value is None:
        return None
    if key.weight.shape[0] != shape.num_heads * shape.key_dim or query.weight.shape[0] % key.weight.shape[0]:
        return None
    return query, key, value


def _mlp(layer: nn.Module, *, has_four_norms: bool) -> GatedMLP | None:
    mlp = getattr(layer, "mlp", None)
    before = _norm(mlp_norm(layer))
    after = _norm(getattr(layer, "post_feedforward_layernorm", None))
    activation = _activation(getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None))
    down = _linear(getattr(mlp, "down_proj", None))
    if before is None or activation is None or down is None or (after is None) == has_four_norms:
        return None
    if hasattr(mlp, "gate_up_proj"):
        whole = _linear(mlp.gate_up_proj)  # type: ignore[union-attr]
        halves = () if whole is None or whole.bias is not None else whole.weight.chunk(2)
    else:
        parts = [_linear(getattr(mlp, name, None)) for name in ("gate_proj", "up_proj")]
        halves = tuple(part.weight for part in parts if part is not None and part.bias is None)
    if len(halves) != 2 or down.bias is not None:
        return None
    return GatedMLP(before=before, after=after, gate=halves[0], up=halves[1], down=down.weight, activation=activation)


def _linear(module: Any) -> Linear | None:
    if type(module) is not nn.Linear:
        return None
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _norm(module: Any) -> Norm | None:
    """An RMS norm, by weight or by 1 + weight, whichever the module is seen to do."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(epsilon, float):
        return None
    sample = _sample(len(weight)).to(weight.dtype)
    seen = module(sample).float()
    plain = sample.float() * torch.rsqrt(sample.float().square().mean() + epsilon)
    for candidate in (weight.detach().float(), 1 + weight.detach().float()):
        if _is_near(plain * candidate, seen, weight.dtype):
            return Norm(candidate.contiguous(), epsilon)
    return None


def _activation(module: Any) -> Activation | None:
    if module is None:
        return None
    sample = 4 * _sample(256)
    candidates: dict[Activation, Callable[[Tensor], Tensor]] = {
        "silu": nn.functional.silu,
        "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    }
    seen = module(sample)
    return next((name for name, each in candidates.items() if _is_near(each(sample), seen, torch.float32)), None)


def _sample(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def _is_near(ours: Tensor, seen: Tensor, dtype: torch.dtype) -> bool:
    return float((ours - seen).norm()) <= _TOLERANCE.get(dtype, 1e-5) * max(float(seen.norm()), 1e-12)
