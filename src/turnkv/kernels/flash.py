"""The flash body: torch's fused CPU attention, one call a group of keys, merged by log-sum-exp."""

from collections.abc import Sequence

import torch
from torch import Tensor

from turnkv.kernels import reference
from turnkv.kernels.contract import Group, KeyPlan, LayerAttention, SequenceView, register

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine attention over two disjoint key sets into attention over both.

    T query tokens, H query heads, E value dim. out_*: [H, T, E], normalised within its own set, finite.
    lse_*: [H, T], natural log of the sum of exponentials; -inf marks an empty set.
    Where both sets are empty, out is 0 and lse is -inf. Error: below 1e-6 for unit-normal float32 (test_merge.py).
    Source: Milakov & Gimelshein, arXiv:1805.02867.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    floor = lse.clamp_min(torch.finfo(lse.dtype).min)
    share_a = torch.exp(lse_a - floor).unsqueeze(-1)
    share_b = torch.exp(lse_b - floor).unsqueeze(-1)
    return out_a * share_a + out_b * share_b, lse


@register("flash")
def attend(query: Tensor, keys: Tensor, values: Tensor, batch: Sequence[SequenceView], layer: LayerAttention) -> Tensor:
    """Attention by torch's flash kernel; see the contract. What that kernel cannot do, the reference does."""
    if layer.softcap is not None or keys.shape[-1] != values.shape[-1] or query.device.type != "cpu":
        return reference.attend(query, keys, values, batch, layer)
    parts = []
    for sequence in batch:
        own = query[sequence.first_query : sequence.first_query + sequence.num_queries].transpose(0, 1)
        parts.append(_attend_sequence(own, keys, values, sequence.keys_within(layer.window), layer).transpose(0, 1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_sequence(query: Tensor, keys: Tensor, values: Tensor, plan: KeyPlan, layer: LayerAttention) -> Tensor:
    """query: [H, T, D]; returns the same shape."""
    out: Tensor | None = None
    lse: Tensor | None = None
    for group in plan.groups:
        turned = query
        if group.offset and layer.rotation is not None:
            turned = layer.rotation.rotate(query, -group.offset)
        key, value = keys[:, group.slots], values[:, group.slots]
        num_past = group.count - group.num_new
        if group.num_new <= 1 and plan.hidden is None:  # a single newest token sees all: one call is enough
            part_out, part_lse = _fused(turned, key, value, False, layer)
            out, lse = (part_out, part_lse) if out is None or lse is None else _merged(out, lse, part_out, part_lse)
            continue
        for first, stop in ((0, num_past), (num_past, group.count)):
            if first == stop:
                continue
            hidden = _hidden_part(plan, group, first, stop)
            is_new = first >= group.count - group.num_new
            part_out, part_lse = _attend_part(turned, key[:, first:stop], value[:, first:stop], hidden, is_new, layer)
            if out is None or lse is None:
                out, lse = part_out, part_lse
            else:
                out, lse = _merged(out, lse, part_out, part_lse)
    if out is None or lse is None:
        return torch.zeros_like(query)
    if layer.sinks is not None:
        out = out * torch.sigmoid(lse - layer.sinks.to(lse.dtype)[:, None]).unsqueeze(-1)
    return out.to(query.dtype)


def _attend_part(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, is_causal: bool, layer: LayerAttention
) -> tuple[Tensor, Tensor]:
    """Output [H, T, D], normalised, and its log-sum-exp [H, T], float32 (float64 stays)."""
    if hidden is None:
        return _fused(query, key, value, is_causal, layer)
    if is_causal:
        hidden = hidden | torch.ones_like(hidden).triu(1)
    # The fused kernel leaves rows that see nothing undefined.
    is_blind = hidden.all(dim=-1)
    mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden & ~is_blind[:, None], -torch.inf)
    out, lse = _fused(query, key, value, False, layer, mask)
    return out.masked_fill(is_blind[None, :, None], 0.0), lse.masked_fill(is_blind[None, :], -torch.inf)


def _fused(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, layer: LayerAttention, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Torch's kernel, which reads wrong numbers where the last dim is not dense."""
    if not query.stride(-1) == key.stride(-1) == value.stride(-1) == 1:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out, lse = _flash(
        query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), 0.0, is_causal, attn_mask=mask, scale=layer.scale
    )
    return out[0], lse[0]


def _merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return merge_attention(out_a.to(lse_a.dtype), lse_a, out_b.to(lse_b.dtype), lse_b)


def _hidden_part(plan: KeyPlan, group: Group, first: int, stop: int) -> Tensor | None:
    if plan.hidden is None:
        return None
    hidden = plan.hidden[:, group.first + first : group.first + stop]
    return hidden if bool(hidden.any()) else None
