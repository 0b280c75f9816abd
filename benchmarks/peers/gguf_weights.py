"""Write a Hugging Face folder of a Llama model as a GGUF file with f16 weights, for llama.cpp.

    .venv/bin/python benchmarks/peers/gguf_weights.py FOLDER OUT.gguf

Norms stay f32. The tokenizer comes along so that llama.cpp loads the file; the benchmarks give it token ids.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors import safe_open

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def gguf_name(name: str) -> str:
    """What GGUF calls a tensor of the folder."""
    if name in NAMES:
        return NAMES[name]
    _, _, layer, kind = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[kind]}"


def in_pairs(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of q or k `[H x D, hidden]`: RoPE turns halves of a head there, neighbouring pairs in GGUF."""
    rows, hidden = weight.shape
    halves = weight.view(num_heads, 2, rows // num_heads // 2, hidden)
    return halves.transpose(1, 2).reshape(rows, hidden)


def add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The sizes of the model.

    Raises:
        ValueError: the model is no plain Llama.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default":
        raise ValueError("only Llama models with unscaled RoPE are written")
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """The byte-level BPE of `tokenizer.json`, with unused ids filled up."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = [f"[unused{token}]" for token in range(config["vocab_size"])]
    types = [int(gguf.TokenType.UNUSED)] * len(tokens)
    for text, token in tokenizer["model"]["vocab"].items():
        tokens[token], types[token] = text, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def add_weights(writer: gguf.GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """The tensors: matrices in f16, norms in f32, q and k reordered."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as weights:
            for name in sorted(weights.keys()):
                if name == "lm_head.weight" and config["tie_word_embeddings"]:
                    continue
                weight = weights.get_tensor(name)
                for kind, num_heads in heads.items():
                    if kind in name:
                        weight = in_pairs(weight, num_heads)
                dtype = torch.float16 if weight.ndim == 2 else torch.float32
                writer.add_tensor(gguf_name(name), weight.to(dtype).contiguous().numpy())


def write(folder: Path, out: Path) -> None:
    """Write `out` whole or not at all."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    unfinished = out.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    writer.add_name(folder.name)
    add_settings(writer, config)
    add_tokenizer(writer, folder, config)
    add_weights(writer, folder, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(unfinished, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.out)


if __name__ == "__main__":
    main()
