"""A GGUF file becomes a folder that transformers loads: weights, configuration, tokenizer."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from gguf import GGUFReader

from turnkv.errors import ModelFilesError
from turnkv.models.store import Workshop
from turnkv.models.tokenizer import can_build, write_tokenizer
from turnkv.models.weights import hugging_face_name, write_weights

_OTHER_FILES_BYTES = 16_000_000
"""Room for the tokenizer and the configuration, which are small."""


def convert_gguf(gguf: Path, workshop: Workshop) -> None:
    """Convert a GGUF file into the workshop's folder, in bf16.

    The llama architecture is converted here, within seconds; others by transformers' own reader.

    Raises:
        ModelFilesError: the file is damaged, or holds what cannot be converted faithfully.
    """
    metadata, tensors = _read(gguf)
    _refuse_unfaithful(gguf, metadata, tensors)
    workshop.reserve(2 * sum(int(tensor.n_elements) for tensor in tensors) + _OTHER_FILES_BYTES)
    workshop.say(f"converting {gguf.name} to safetensors (bf16)")
    if metadata["general.architecture"] != "llama":
        _foreign().convert_model(gguf, workshop.folder)
        _write_tokenizer(gguf, workshop.folder, metadata)
        return
    config = _llama_config(gguf, metadata, tensors)
    try:
        write_weights(
            workshop.folder / "model.safetensors",
            tensors,
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
        )
    except ValueError as error:  # a view or a row order that the tensor's size does not allow
        raise _damaged(gguf, error) from error
    _write_json(workshop.folder / "config.json", config)
    _write_json(workshop.folder / "generation_config.json", _generation_config(metadata))
    _write_tokenizer(gguf, workshop.folder, metadata)


def _write_tokenizer(gguf: Path, folder: Path, metadata: Mapping[str, Any]) -> None:
    if can_build(metadata):
        write_tokenizer(folder, metadata)
    else:
        _foreign().convert_tokenizer(gguf, folder)


def _foreign() -> ModuleType:
    """Import what needs torch and transformers only where a file needs it."""
    return import_module("turnkv.models.foreign")


def _read(gguf: Path) -> tuple[dict[str, Any], list[Any]]:
    try:
        reader = GGUFReader(gguf)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        metadata["general.architecture"]
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise _damaged(gguf, error) from error
    return metadata, list(reader.tensors)


def _refuse_unfaithful(gguf: Path, metadata: Mapping[str, Any], tensors: list[Any]) -> None:
    """Refuse what would load without an error and answer wrongly."""
    if metadata.get("tokenizer.ggml.model") == "gpt2" and not can_build(metadata):
        pre = metadata.get("tokenizer.ggml.pre", "missing")
        if not _foreign().knows_splitting(pre):
            raise ModelFilesError(
                f"{gguf}: its tokenizer splits text in a way that neither turnkv nor transformers knows ({pre!r}); "
                "use the model's safetensors folder or hub name instead"
            )
    if metadata["general.architecture"] == "llama":
        unknown = [tensor.name for tensor in tensors if hugging_face_name(tensor.name) is None]
        scaling = metadata.get("llama.rope.scaling.type", "none")
        if scaling != "none":
            unknown.append(f"rope scaling {scaling!r}")
        if unknown:
            raise ModelFilesError(
                f"{gguf}: holds what a plain Llama model has not ({', '.join(unknown[:3])}); "
                "use the model's safetensors folder or hub name instead"
            )


def _llama_config(gguf: Path, metadata: Mapping[str, Any], tensors: list[Any]) -> dict[str, Any]:
    names = {tensor.name for tensor in tensors}
    try:
        value = {key.removeprefix("llama."): item for key, item in metadata.items() if key.startswith("llama.")}
        heads, hidden = value["attention.head_count"], value["embedding_length"]
        head_dim = value.get("attention.key_length", value.get("rope.dimension_count", hidden // heads))
        if value.get("rope.dimension_count", head_dim) != head_dim:
            raise ModelFilesError(f"{gguf}: rotates a part of each head, which Llama models do not; use another file")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
            "hidden_size": hidden,
            "intermediate_size": value["feed_forward_length"],
            "num_hidden_layers": value["block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": value.get("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "attention_bias": "blk.0.attn_q.bias" in names,
            "mlp_bias": "blk.0.ffn_gate.bias" in names,
            "max_position_embeddings": value["context_length"],
            # GGUF stores float32: the shortest decimal that means the same gives back the 1e-05 that was written.
            "rms_norm_eps": float(str(np.float32(value["attention.layer_norm_rms_epsilon"]))),
            "rope_parameters": {"rope_type": "default", "rope_theta": value.get("rope.freq_base", 10000.0)},
            "tie_word_embeddings": "output.weight" not in names,
            "dtype": "bfloat16",
            **_token_ids(metadata),
        }
    except KeyError as error:
        raise _damaged(gguf, error) from error


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids; every token that ends a turn or a message ends a reply."""
    ids: dict[str, Any] = _token_ids(metadata)
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    ends = sorted({metadata[key] for key in keys if key in metadata})
    if len(ends) > 1:
        ids["eos_token_id"] = ends
    return ids


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: index for name, index in found.items() if index is not None}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _damaged(gguf: Path, error: Exception) -> ModelFilesError:
    what = f"{type(error).__name__}: {error}"
    return ModelFilesError(f"{gguf} is not a readable GGUF file ({what}); it may be cut off: fetch it again")
