"""GGUF files of other architectures and tokenizers than ours, converted by transformers' own readers."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from turnkv.errors import ModelFilesError
from turnkv.models.loading import quiet_transformers


def knows_splitting(pre: str) -> bool:
    """Whether transformers splits text as this pre-tokenizer does; for others it falls back to GPT-2's unasked."""
    return pre == "gpt-2" or pre in GGUF_PRE_TOKENIZER_SPLITS


def convert_model(gguf: Path, folder: Path) -> None:
    """Write the model as bf16 safetensors with its configuration."""
    with _converting(gguf):
        model, report = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
            output_loading_info=True,
        )
        # transformers fills what is missing with random numbers.
        if missing := sorted(report["missing_keys"]):
            raise ModelFilesError(f"{len(missing)} of the model's weights are missing, {missing[0]} for one")
        config = AutoConfig.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
        # A model read from GGUF refuses to be saved, even with plain weights: they move into one that was not.
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        plain.load_state_dict(model.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = model.generation_config
        plain.save_pretrained(folder)


def convert_tokenizer(gguf: Path, folder: Path) -> None:
    """Write the tokenizer's files."""
    with _converting(gguf):
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name, local_files_only=True)
        tokenizer.save_pretrained(folder)


@contextmanager
def _converting(gguf: Path) -> Iterator[None]:
    try:
        with quiet_transformers():
            yield
    # The readers, and the Rust writers below them, raise whatever they meet.
    except Exception as error:
        if os.strerror(errno.ENOSPC) in str(error):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        what = str(error).strip().splitlines() or [repr(error)]
        raise ModelFilesError(
            f"{gguf}: transformers could not read it ({what[0]}); "
            "mend that, or use the model's safetensors folder or hub name instead"
        ) from error
