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
    out = torch.empty_like(query)
    for sequence in batch:
        rows = slice(sequence.first_query, sequence.first_query + sequence.num_queries)
        plan = sequence.keys_within(layer.window)
        out[rows] = _attend_sequence(query[rows].transpose(0, 1), keys, values, plan, layer).transpose(0, 1)
    return out


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
        if group.num_new == 1 and plan.hidden is None:
            num_past = group.count
        for first, stop in ((0, num_past), (num_past, group.count)):
            if first == stop:
                continue
            hidden = _hidden_part(plan, group, first, stop)
            is_new = first >= group.count - group.num_new
            part_out, part_lse = _attend_part(turned, key[:, first:stop], value[:, first:stop], hidden, is_new, layer)
            if out is None or lse is None:
                out, lse = part_out, part_lse
            else:
                out, lse = merge_attention(out.to(lse.dtype), lse, part_out.to(lse.dtype), part_lse)
    if out is None or lse is None:
        return torch.zeros_like(query)
    if layer.sinks is not None:
        out = out * torch.sigmoid(lse - layer.sinks.to(lse.dtype)[:, None]).unsqueeze(-1)
    return out.to(query.dtype)


def _attend_part(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, is_causal: bool, layer: LayerAttention
) -> tuple[Tensor, Tensor]:
    """One fused call: normalised output [H, T, D] and its log-sum-exp [H, T], float32 (float64 stays)."""
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    if hidden is None:
        out, lse = _flash(query[None], key[None], value[None], 0.0, is_causal, scale=layer.scale)
        return out[0], lse[0]
    if is_causal:
        hidden = hidden | torch.ones_like(hidden).triu(1)
    # The fused kernel leaves rows that see nothing undefined.
    is_blind = hidden.all(dim=-1)
    mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill(hidden & ~is_blind[:, None], -torch.inf)
    out, lse = _flash(query[None], key[None], value[None], 0.0, False, attn_mask=mask, scale=layer.scale)
    out = out[0].masked_fill(is_blind[None, :, None], 0.0)
    return out, lse[0].masked_fill(is_blind[None, :], -torch.inf)


def _hidden_part(plan: KeyPlan, group: Group, first: int, stop: int) -> Tensor | None:
    if plan.hidden is None:
        return None
    hidden = plan.hidden[:, group.first + first : group.first + stop]
    return hidden if bool(hidden.any()) else None
