"""The reference body: attention written out, in float32 or float64. The judge of all other bodies."""

import torch
from torch import Tensor

from turnkv.cache import LayerKV, TileGroup
from turnkv.config import PAGE_TOKENS
from turnkv.kernels.contract import Batch, LayerAttention, SequenceView, register

QUERY_BLOCK = 128
"""Queries whose scores are held at once, so that memory stays bounded for long prompts."""


@register("reference")
def attend(query: Tensor, kv: LayerKV, batch: Batch, layer: LayerAttention) -> Tensor:
    """Attention by the book; see the contract. Serves every layer and tier, at the price of reading keys as floats."""
    value_dim = next(iter(kv.layouts.values())).shape.value_dim
    work = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = query.new_zeros(*query.shape[:2], value_dim)
    for sequence in batch.sequences:
        if not sequence.groups:
            continue
        keys = [_read(kv, group, work, query.device) for group in sequence.groups]
        for start in range(0, sequence.num_queries, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, sequence.num_queries)
            rows = slice(sequence.first_query + start, sequence.first_query + stop)
            out[rows] = _attend_block(query[rows].to(work), keys, sequence, layer, start).to(query.dtype)
    return out


class _Keys:
    """A group's keys [G, K, D], values [G, K, E] and virtual positions [K]."""

    def __init__(self, offset: int, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        self.offset, self.keys, self.values, self.positions = offset, keys, values, positions


def _read(kv: LayerKV, group: TileGroup, work: torch.dtype, device: torch.device) -> _Keys:
    keys, values = kv.read(group.tier, torch.from_numpy(group.pages).to(device, torch.int64))
    masks = torch.from_numpy(group.masks).to(device, torch.int32)
    is_held = (masks[:, None] >> torch.arange(PAGE_TOKENS, device=device) & 1).bool().flatten()
    positions = torch.from_numpy(group.positions).to(device).flatten()
    return _Keys(group.offset, keys[:, is_held].to(work), values[:, is_held].to(work), positions[is_held])


def _attend_block(
    query: Tensor, groups: list[_Keys], sequence: SequenceView, layer: LayerAttention, start: int
) -> Tensor:
    """[T, H, D] → [T, H, E], in the dtype of the work."""
    num_rows, num_heads, dim = query.shape
    num_kv_heads = groups[0].keys.shape[0]
    work = query.dtype
    scores = []
    for group in groups:
        turned = query
        if group.offset and layer.rotation is not None:
            turned = layer.rotation.rotate(turned, -group.offset)
        # [T, H, D] -> [G, H/G * T, D]: the query heads of a key-value head are so many more queries of it.
        folded = turned.view(num_rows, num_kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(num_kv_heads, -1, dim)
        scores.append(folded @ group.keys.transpose(1, 2))
    logits = torch.cat(scores, dim=-1).view(num_heads, num_rows, -1) * layer.scale
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    positions = torch.cat([group.positions for group in groups])
    logits = logits.masked_fill(_hidden(positions, sequence.first_position + start, num_rows, layer.window), -torch.inf)
    highest = logits.amax(dim=-1, keepdim=True).clamp_min(torch.finfo(work).min)
    if layer.sinks is not None:
        sinks = layer.sinks.to(work).view(-1, 1, 1)
        highest = torch.maximum(highest, sinks)
    weights = torch.exp(logits - highest)
    total = weights.sum(dim=-1, keepdim=True)
    if layer.sinks is not None:
        total = total + torch.exp(sinks - highest)
    weights = (weights / total.clamp_min(torch.finfo(work).tiny)).view(num_kv_heads, -1, len(positions))
    value = torch.cat([group.values for group in groups], dim=1)
    return (weights @ value).view(num_heads, num_rows, -1).transpose(0, 1)


def _hidden(positions: Tensor, first: int, num_rows: int, window: int | None) -> Tensor:
    """[num_rows, num_keys], bool: keys that a query of the block must not see."""
    at = torch.arange(first, first + num_rows, device=positions.device)[:, None]
    hidden = positions[None, :] > at
    return hidden if window is None else hidden | (positions[None, :] <= at - window)
