"""A model folder becomes a model and a tokenizer in memory, without the network and without noise."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from turnkv.errors import ModelFilesError, UnsupportedModelError


def load_model(
    folder: Path, dtype: torch.dtype, *, attn_implementation: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a folder's model (evaluation mode, no gradients) and tokenizer.

    `attn_implementation` is a name registered with transformers; None leaves the choice to it.

    Raises:
        ModelFilesError: the files are missing, damaged, or need code that transformers has not.
        UnsupportedModelError: the model does not look `attn_implementation` up where it is registered.
    """
    if not (folder / "config.json").is_file():
        raise ModelFilesError(f"{folder} holds no config.json, so it is no model folder; give one that does")
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            model, report = AutoModelForCausalLM.from_pretrained(
                str(folder),
                dtype=dtype,
                attn_implementation=attn_implementation,
                local_files_only=True,
                output_loading_info=True,
            )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, struct.error) as error:
        if attn_implementation is not None and error.args == (attn_implementation,):
            raise UnsupportedModelError(
                f"{folder.name}: its attention does not go through transformers' interface; choose another model"
            ) from error
        what = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelFilesError(
            f"{folder} could not be loaded: {what[0]}; check that it holds config.json, safetensors weights and a "
            "tokenizer that this version of transformers knows"
        ) from error
    # transformers fills what is missing with random numbers, and says so only in its log.
    if missing := sorted(report["missing_keys"]):
        raise ModelFilesError(
            f"{folder} lacks {len(missing)} of the model's weights ({missing[0]}, …); fetch or convert it again"
        )
    model.requires_grad_(False)
    return model.eval(), tokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' progress bars and advice for a while; real errors are still logged."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
