"""The oracle for edited views: one Hugging Face forward over a session's whole text, with keys hidden or re-rotated.

It shares nothing with the kernels: who sees what is read off the journal token by token, keys are rotated (never
queries) with the model's own rotary embedding, and attention is written out over the full square of tokens.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from turnkv.cache.formats import FORMATS
from turnkv.engine.journal import Drop, Event, Extend, Fork, Settle, Shift
from turnkv.types import EXACT, Tier


@dataclass
class Account:
    """What a journal says of every computed token, in order of computing."""

    tokens: list[int]
    positions: list[int]
    visible: Tensor
    """[T, T], bool: key j is in the view of query i."""
    offsets: Tensor
    """[T, T], int: how far key j is moved for query i."""
    places: list[tuple[int, int]]
    """(record, index within it)."""
    chains: list[tuple[Tier, ...]]
    """Ways of storing a token: the tiers that it went through, one after the other. The first is none at all."""
    stored: Tensor
    """[T, T], int: in which of the ways query i sees key j."""


def account_of(journal: Sequence[Event]) -> Account:
    """Walk the journal: each token sees what is in the view when it is computed."""
    tokens: list[int] = []
    positions: list[int] = []
    rows: list[tuple[dict[int, int], dict[int, int]]] = []
    chains: list[tuple[Tier, ...]] = [()]
    chain: dict[int, int] = {}
    members: dict[str, list[int]] = {}
    records: dict[str, int] = {}
    offsets: dict[str, int] = {}
    lengths: dict[int, int] = {}
    places: list[tuple[int, int]] = []
    for event in journal:
        if isinstance(event, Extend):
            seen = {token: offsets[key] for key in offsets for token in members[key]}
            position = event.position
            for (record, part), key in zip(event.parts, event.keys, strict=True):
                members[key] = []
                records[key] = record
                offsets[key] = 0
                for token in part:
                    seen = seen | {len(tokens): 0}
                    rows.append((seen, dict(chain)))
                    members[key].append(len(tokens))
                    tokens.append(token)
                    places.append((record, lengths.setdefault(record, 0)))
                    lengths[record] += 1
                    positions.append(position)
                    position += 1
        elif isinstance(event, Drop):
            for key in event.keys:
                del offsets[key]
        elif isinstance(event, Settle):
            members[event.into], records[event.into] = members[event.key], records[event.key]
            offsets[event.into] = offsets.pop(event.key)
            tiers = [Tier(key, value) for count, key, value in event.tiers for _ in range(count)]
            for token, tier in zip(members[event.into], tiers, strict=True):
                before = chains[chain.get(token, 0)]
                if tier != (before[-1] if before else EXACT):
                    after = (*before, tier)
                    chains += [] if after in chains else [after]
                    chain[token] = chains.index(after)
        elif isinstance(event, Shift):
            offsets.update(dict(event.offsets))
        elif isinstance(event, Fork):
            for key in [key for key, record in records.items() if record >= event.num_records and key in offsets]:
                del offsets[key]
    count = len(tokens)
    visible = torch.zeros(count, count, dtype=torch.bool)
    moved = torch.zeros(count, count, dtype=torch.int64)
    stored = torch.zeros(count, count, dtype=torch.int64)
    for row, (seen, ways) in enumerate(rows):
        for token, offset in seen.items():
            visible[row, token] = True
            moved[row, token] = offset
            stored[row, token] = ways.get(token, 0)
    return Account(tokens, positions, visible, moved, places, chains, stored)


def _through(vectors: Tensor, formats: Sequence[str]) -> Tensor:
    """Vectors as they are read after having been stored in one format after the other."""
    for name in formats:
        vectors = FORMATS[name].read(*FORMATS[name].quantise(vectors)).to(vectors.dtype)
    return vectors


class _Oracle:
    def __init__(self) -> None:
        self.account: Account | None = None
        self.model: Any = None

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        assert self.account is not None
        groups = query.shape[1] // key.shape[1]
        key, value = (x[0].repeat_interleave(groups, 0) for x in (key, value))
        query = query[0]
        positions = torch.tensor(self.account.positions)
        virtual = positions[None, :] + self.account.offsets
        distance = positions[:, None] - virtual
        visible = self.account.visible.clone()
        if options.get("sliding_window") is not None:
            visible &= distance < options["sliding_window"]
        scores = query.new_zeros(query.shape[0], query.shape[1], key.shape[1])
        for way, chain in enumerate(self.account.chains):
            read = _through(key, [tier.keys for tier in chain])
            for offset in set(self.account.offsets[self.account.stored == way].tolist()):
                turned = self._rotated(module, read, offset) if offset else read
                is_so = (self.account.stored == way) & (self.account.offsets == offset)
                scores = torch.where(is_so, torch.einsum("htd,hsd->hts", query, turned), scores)
        scores = scores * options["scaling"]
        if options.get("softcap") is not None:
            scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
        scores = scores.masked_fill(~visible, -torch.inf)
        if options.get("s_aux") is not None:
            scores = torch.cat([scores, options["s_aux"].view(-1, 1, 1).expand(-1, scores.shape[1], 1)], -1)
        weights = torch.softmax(scores, -1)[..., : key.shape[1]]
        out = torch.zeros_like(query).transpose(0, 1)
        for way, chain in enumerate(self.account.chains):
            read = _through(value, [tier.values for tier in chain])
            out = out + torch.einsum("hts,hse->the", weights * (self.account.stored == way), read)
        return out[None], None

    def _rotated(self, module: Any, key: Tensor, distance: int) -> Tensor:
        """Keys moved by a distance, with the model's own rotary embedding less its attention factor."""
        config = self.model.config
        if getattr(module, "use_rope", True) in (0, False):
            return key
        rotary = self.model.model.rotary_emb
        at = torch.tensor([[distance]])
        if config.model_type == "gemma3_text":
            cos, sin = rotary(key[None], at, config.layer_types[module.layer_idx])
        else:
            cos, sin = rotary(key[None], at)
        norm = (cos[0, 0, 0] ** 2 + sin[0, 0, 0] ** 2).sqrt()
        turn = sys.modules[type(self.model).__module__].apply_rotary_pos_emb
        return turn(key[None], key[None], cos / norm, sin / norm)[1][0]  # type: ignore[no-any-return]


_ORACLE = _Oracle()
AttentionInterface.register("masked_oracle", _ORACLE)


def oracle_logits(model: Any, journal: Sequence[Event]) -> tuple[Account, Tensor]:
    """Logits [T, V] of every computed token, from one forward of a model loaded with `masked_oracle`."""
    account = account_of(journal)
    _ORACLE.account, _ORACLE.model = account, model
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor([account.tokens]),
            position_ids=torch.tensor([account.positions]),
            use_cache=False,
        )
    return account, out.logits[0]
