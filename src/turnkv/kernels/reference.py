"""The reference body: attention written out, in float32 or float64. The judge of all other bodies."""

from collections.abc import Sequence

import torch
from torch import Tensor

from turnkv.kernels.contract import KeyPlan, LayerAttention, SequenceView, register

QUERY_BLOCK = 128
"""Queries whose scores are held at once, so that memory stays bounded for long prompts."""


@register("reference")
def attend(query: Tensor, keys: Tensor, values: Tensor, batch: Sequence[SequenceView], layer: LayerAttention) -> Tensor:
    """Attention by the book; see the contract. Serves every layer, at the price of reading keys as float32."""
    out = query.new_zeros(*query.shape[:2], values.shape[-1])
    for sequence in batch:
        plan = sequence.keys_within(layer.window)
        if not plan.num_keys:
            continue
        for start in range(0, sequence.num_queries, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, sequence.num_queries)
            rows = slice(sequence.first_query + start, sequence.first_query + stop)
            out[rows] = _attend_block(query[rows], keys, values, sequence, plan, layer, start)
    return out


def _attend_block(  # noqa: PLR0913, PLR0917 - the contract's arguments, and where the block lies
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    sequence: SequenceView,
    plan: KeyPlan,
    layer: LayerAttention,
    start: int,
) -> Tensor:
    num_rows, num_heads, dim = query.shape
    num_kv_heads = keys.shape[0]
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = []
    for group in plan.groups:
        turned = query.to(work)
        if group.offset and layer.rotation is not None:
            turned = layer.rotation.rotate(turned, -group.offset)
        # [T, H, D] -> [G, H/G * T, D]: the query heads of a key-value head are so many more queries of it.
        folded = turned.view(num_rows, num_kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, dim)
        scores.append(folded @ keys[:, group.slots].to(work).transpose(1, 2))
    logits = torch.cat(scores, dim=-1).view(num_heads, num_rows, plan.num_keys) * layer.scale
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    logits = logits.masked_fill(_hidden(sequence, plan, start, num_rows), -torch.inf)
    highest = logits.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(work).min)
    if layer.sinks is not None:
        sinks = layer.sinks.to(work).view(-1, 1, 1)
        highest = torch.maximum(highest, sinks)
    weights = torch.exp(logits - highest)
    total = weights.sum(dim=-1, keepdim=True)
    if layer.sinks is not None:
        total = total + torch.exp(sinks - highest)
    weights = (weights / total.clamp_min(torch.finfo(work).tiny)).view(num_kv_heads, -1, plan.num_keys)
    value = torch.cat([values[:, group.slots] for group in plan.groups], dim=1).to(work)
    mixed = (weights @ value).view(num_heads, num_rows, -1)
    return mixed.transpose(0, 1).to(query.dtype)


def _hidden(sequence: SequenceView, plan: KeyPlan, start: int, num_rows: int) -> Tensor:
    """[num_rows, num_keys], bool: keys that a query of the block must not see."""
    rows = torch.arange(start, start + num_rows, device=sequence.device)
    columns = torch.arange(plan.num_keys, device=sequence.device) - (plan.num_keys - sequence.num_queries)
    hidden = columns[None, :] > rows[:, None]
    if plan.hidden is not None:
        hidden = hidden | plan.hidden[start : start + num_rows]
    return hidden
