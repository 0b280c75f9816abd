"""A dry run: the whole account of an engine (turns, drops, tokens, bytes) without a model's weights or arithmetic."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from turnkv.cache import DryStorage, KVStorage, LayerShape, TierPlan
from turnkv.engine.runner import DTYPES, Chunk, ModelRunner
from turnkv.engine.traits import refuse_unsupported
from turnkv.errors import ModelFilesError
from turnkv.models.loading import quiet_transformers
from turnkv.types import Tier


class DryRunner(ModelRunner):
    """Stands where a model would: knows its sizes and computes nothing. All its logits are zero."""

    is_dry = True

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        """Take the sizes from a model's configuration."""
        text = config.get_text_config()
        refuse_unsupported(text)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self._shapes: tuple[LayerShape, ...] = (
            LayerShape(num_heads=heads, key_dim=dim, value_dim=dim),
        ) * text.num_hidden_layers
        self._logits = torch.zeros(1, text.vocab_size)
        self.model = None
        self.dtype = dtype
        self.device = torch.device("cpu")
        self.layers = ()
        self.max_positions = getattr(text, "max_position_embeddings", None)

    @staticmethod
    def load(
        folder: Path, *, dtype: str = "bfloat16", attention: str = "auto", weights: str = "exact"
    ) -> tuple["DryRunner", Any]:
        """Read a model folder's configuration and tokenizer.

        Raises:
            ModelFilesError: the files are missing or damaged.
            UnsupportedModelError: the model is of a kind that is refused.
        """
        try:
            with quiet_transformers():
                config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
                tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ModelFilesError(
                f"{folder} could not be read: {str(error).splitlines()[0]}; check its files"
            ) from error
        return DryRunner(config, DTYPES[dtype]), tokenizer

    @property
    def shapes(self) -> tuple[LayerShape, ...]:
        """Shape of each layer's KV, as the configuration says."""
        return self._shapes

    def new_storage(self, plans: Mapping[Tier, TierPlan], num_pages: Mapping[Tier, int]) -> KVStorage:
        """No memory at all."""
        return DryStorage()

    def run(self, storage: KVStorage, chunks: Sequence[Chunk]) -> list[Tensor]:
        """Zeros, in the shape of a forward pass's logits."""
        return [
            self._logits.expand({"none": 0, "last": 1, "all": len(chunk.tokens)}[chunk.keep], -1) for chunk in chunks
        ]
