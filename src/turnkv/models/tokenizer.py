"""The tokenizer of a GGUF file as `tokenizer.json` and `tokenizer_config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_CONTROL, _USER_DEFINED = 3, 4

_DIGITS_ONE_BY_ONE = frozenset({"smollm", "starcoder", "refact", "codeshell"})
"""Pre-tokenizers that llama.cpp splits by `\\p{N}` and then by GPT-2's pattern (llama-vocab.cpp).

transformers 5.24 does not know them and falls back to GPT-2's pattern alone. It differs before numbers: of "  12" it
makes Ġ Ġ 1 2, where the model was trained on ĠĠ 1 2. llama.cpp is right; the model's own tokenizer.json begins with
Digits(individual_digits=True).
"""


def can_build(metadata: Mapping[str, Any]) -> bool:
    """Whether `write_tokenizer` knows this file's kind of tokenizer."""
    return metadata.get("tokenizer.ggml.model") == "gpt2" and metadata.get("tokenizer.ggml.pre") in _DIGITS_ONE_BY_ONE


def write_tokenizer(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Write both tokenizer files for a file that `can_build` accepts."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=False):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    # Not `tokenizer.save`: it hides a full disk behind an exception without errno.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {
        # This class takes tokenizer.json as it is; GPT2Tokenizer would put its own splitting in its place.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
        **special_tokens(metadata),
    }
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that the file names, under the names that transformers uses."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: metadata["tokenizer.ggml.tokens"][index] for name, index in ids.items() if index is not None}
