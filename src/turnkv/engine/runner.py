"""The model runner: one forward pass over the newest tokens of several sequences, flattened and without padding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from turnkv.cache import KVStorage, LayerShape, TierPlan, TileGroup
from turnkv.cache.storage import Slots
from turnkv.config import PAGE_TOKENS
from turnkv.engine.fused import Fuser, Fusion
from turnkv.engine.hook import ATTENTION_NAME, step_in_progress
from turnkv.engine.probe import ProbedLayer, probe_layers
from turnkv.engine.traits import refuse_unsupported
from turnkv.errors import InvalidConfigError, UnsupportedModelError
from turnkv.kernels import BODIES, AttentionBody, Batch, LayerStep, SequenceView, default_body
from turnkv.models.loading import load_model, quiet_transformers
from turnkv.types import EXACT, Tier

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


WEIGHTS = ("exact", "int8")


@dataclass(frozen=True, slots=True)
class Chunk:
    """The newest tokens of one sequence, to be computed in one step."""

    tokens: Sequence[int]
    position: int
    """Virtual position of the first."""
    groups: tuple[TileGroup, ...]
    """All keys that the chunk's tokens may see, their own included."""
    slots: Slots
    """Where the chunk's own keys go."""
    keep: Literal["none", "last", "all"]
    """Which tokens' logits are wanted."""


class ModelRunner:
    """A Hugging Face causal model whose attention reads a view. Holds no KV itself."""

    is_dry = False
    """Whether nothing is computed, so that times and likelihoods mean nothing."""

    def __init__(self, model: Any, *, attention: str = "auto", weights: str = "exact", is_fused: bool = True) -> None:
        """Take a model loaded with `attn_implementation="turnkv"`, probe it, and put fused layers in place of its own.

        `attention`: a body's name, or `auto`; only with the C++ body layers are fused, in the model itself.
        `weights`: `exact` as they are, or `int8`, rounded to 8 bits in what is fused.
        `is_fused`: False leaves the model its own layers.

        Raises:
            UnsupportedModelError: the model cannot be served faithfully.
            InvalidConfigError: int8 weights are wanted where no layer can be fused.
        """
        config = model.config.get_text_config()
        refuse_unsupported(config)
        if getattr(model, "_is_stateful", False):
            raise UnsupportedModelError(f"model type {config.model_type!r} keeps a state beside its KV; choose another")
        self.model = model
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self.device: torch.device = model.get_input_embeddings().weight.device
        self.num_tokens: int = model.get_input_embeddings().weight.shape[0]
        with torch.inference_mode():
            self.layers: tuple[ProbedLayer, ...] = probe_layers(model, config.num_hidden_layers)
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self.body: AttentionBody = _body(attention)
        self.fusion = self._fuse(is_int8=_is_int8(weights)) if is_fused else Fusion(num_layers=len(self.layers))
        if weights == "int8" and not self.fusion.num_fused:
            raise InvalidConfigError(
                "weights", weights, "needs layers that the C++ kernels take, and there are none", remedy="give exact"
            )

    @staticmethod
    def load(
        folder: Path, *, dtype: str = "bfloat16", attention: str = "auto", weights: str = "exact"
    ) -> tuple["ModelRunner", Any]:
        """Read a model folder; gives the runner and the tokenizer.

        Raises:
            ModelFilesError: the files are missing or damaged.
            UnsupportedModelError: the model is of a kind that is refused.
        """
        if dtype not in DTYPES:
            raise InvalidConfigError("dtype", dtype, "is no number format", remedy=f"give one of {', '.join(DTYPES)}")
        _body(attention)
        _is_int8(weights)
        if (folder / "config.json").is_file():
            with quiet_transformers():
                try:
                    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
                except (OSError, ValueError, KeyError):
                    config = None  # load_model says what is wrong with the files
            if config is not None:
                refuse_unsupported(config.get_text_config())
        model, tokenizer = load_model(folder, DTYPES[dtype], attn_implementation=ATTENTION_NAME)
        return ModelRunner(model, attention=attention, weights=weights), tokenizer

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Shape of each layer's KV."""
        return tuple(layer.shape for layer in self.layers)

    @property
    def can_shift(self) -> bool:
        """Whether keys can be read at other positions, in all layers."""
        return all(layer.can_shift for layer in self.layers)

    def new_storage(self, plans: Mapping[Tier, TierPlan], num_pages: Mapping[Tier, int]) -> KVStorage:
        """Memory for the KV of this model."""
        return KVStorage(plans, num_pages, self.device)

    @torch.inference_mode()
    def run(self, storage: KVStorage, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Compute the chunks in one forward pass; their KV is in `storage` afterwards.

        Returns:
            For each chunk the kept logits, [0, V], [1, V] or [len(tokens), V] in the model's dtype.
        """
        step = _Step(self, storage, chunks)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        positions = [chunk.position + i for chunk in chunks for i in range(len(chunk.tokens))]
        kept: list[int] = []
        counts, row = [], 0
        for chunk in chunks:
            stop = row + len(chunk.tokens)
            rows = {"none": range(0), "last": range(stop - 1, stop), "all": range(row, stop)}[chunk.keep]
            kept.extend(rows)
            counts.append(len(rows))
            row = stop
        with step_in_progress(step):
            out = self.model(
                input_ids=torch.tensor([tokens], device=self.device),
                position_ids=torch.tensor([positions], device=self.device),
                use_cache=False,
                logits_to_keep=torch.tensor(kept, dtype=torch.int64, device=self.device),
            )
        return list(out.logits[0].split(counts))

    def _fuse(self, *, is_int8: bool) -> Fusion:
        """Replace layers by fused ones, each compared with its own on two sequences of random tokens."""
        fuser = Fuser(self.model, self.layers, self.dtype, is_int8=is_int8)
        if self.body is not BODIES.get("cpu") or self.device.type != "cpu":
            return fuser.fusion
        storage = self.new_storage({EXACT: TierPlan.of(EXACT, self.shapes, self.dtype)}, {EXACT: 4})
        numbers = torch.Generator().manual_seed(0)
        chunks = []
        for first_page, count in ((0, 37), (3, 5)):
            tokens = torch.randint(self.num_tokens, (count,), generator=numbers).tolist()
            slots = np.arange(first_page * PAGE_TOKENS, first_page * PAGE_TOKENS + count, dtype=np.int32)
            group = TileGroup.of(EXACT, 0, slots, np.arange(3, 3 + count, dtype=np.int32))
            chunks.append(Chunk(tokens, 3, (group,), slots, "none"))
        with fuser:
            self.run(storage, chunks)
        return fuser.fusion


class _Step:
    """One forward pass: writes each layer's new keys and values, then attends over everything visible."""

    def __init__(self, runner: ModelRunner, storage: KVStorage, chunks: Sequence[Chunk]) -> None:
        self._layers = runner.layers
        self._body = runner.body
        self._storage = storage
        sequences = []
        first = 0
        for chunk in chunks:
            count = len(chunk.tokens)
            assert count == len(chunk.slots) > 0
            sequences.append(SequenceView(chunk.groups, first, count, chunk.position))
            first += count
        self._batch = Batch(tuple(sequences))
        self._slots = np.concatenate([chunk.slots for chunk in chunks])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        self._storage.write(layer, self._slots, key, value)
        attention = self._layers[layer].attention
        return self._body(query.transpose(0, 1), self._storage.layers[layer], self._batch, attention)

    def layer_step(self, layer: int) -> LayerStep:
        return LayerStep(self._storage.layers[layer], self._slots, self._batch, self._layers[layer].attention)


def _is_int8(weights: str) -> bool:
    if weights not in WEIGHTS:
        raise InvalidConfigError("weights", weights, "is no form of weights", remedy=f"give {' or '.join(WEIGHTS)}")
    return weights == "int8"


def _body(name: str) -> AttentionBody:
    chosen = default_body() if name == "auto" else name
    if chosen not in BODIES:
        raise InvalidConfigError(
            "attention", name, "is no attention body", remedy=f"give auto or one of {', '.join(sorted(BODIES))}"
        )
    return BODIES[chosen]
