"""Tiny model files, and where turnkv's cache lies in the test's temporary home."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants

HEADS, KV_HEADS, HIDDEN, INNER, LAYERS = 4, 2, 64, 96, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "Ġ t", "h e", "Ġt he", "1 2"]

GgufMaker = Callable[..., Path]


@pytest.fixture
def cache(home: Path | None) -> Path | None:
    """turnkv's cache, in the test's own home."""
    return None if home is None else home / ".cache" / "turnkv"


@pytest.fixture
def lines() -> list[str]:
    """Collects what is said to the user: pass its `append` as `progress`."""
    return []


@pytest.fixture
def make_gguf(tmp_path: Path) -> GgufMaker:
    """Writes a GGUF file (llama or qwen2) with F32, Q4_1 and Q8_0 tensors and a small byte-level tokenizer."""

    def make(
        path: Path = tmp_path / "tiny.gguf",
        *,
        architecture: str = "llama",
        pre: str = "smollm",
        tied: bool = True,
        extra_tensor: str | None = None,
        metadata: Callable[[GGUFWriter], object] = lambda writer: None,
        broken: bool = False,
    ) -> Path:
        tokens = [*SPECIALS, *_byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
        writer = GGUFWriter(path, architecture)
        _describe(writer, tokens, pre)
        metadata(writer)
        for name, (shape, kind) in _tensors(len(tokens), tied).items():
            values = np.random.default_rng(len(name)).normal(0, 0.3, shape).astype(np.float32)
            if broken and "ffn_down" in name:
                values[0, 0] = np.nan
            _add(writer, name, values, GGMLQuantizationType.F32 if broken else kind)
        if architecture == "qwen2":
            for layer in range(LAYERS):
                for part, rows in (("q", HIDDEN), ("k", HIDDEN // 2), ("v", HIDDEN // 2)):
                    writer.add_tensor(f"blk.{layer}.attn_{part}.bias", np.ones(rows, dtype=np.float32))
        if extra_tensor is not None:
            writer.add_tensor(extra_tensor, np.ones(8, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


@pytest.fixture
def tiny_gguf(make_gguf: GgufMaker) -> Path:
    """The plain tiny model."""
    return make_gguf()


def _add(writer: Any, name: str, values: Any, kind: Any) -> None:
    if kind is GGMLQuantizationType.F32:
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)


def _describe(writer: Any, tokens: list[str], pre: str) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")


def _tensors(vocabulary: int, tied: bool) -> dict[str, tuple[tuple[int, ...], Any]]:
    f32, q4, q8 = GGMLQuantizationType.F32, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0
    head_dim = HIDDEN // HEADS
    found: dict[str, tuple[tuple[int, ...], Any]] = {"token_embd.weight": ((vocabulary, HIDDEN), q8)}
    for layer in range(LAYERS):
        found |= {
            f"blk.{layer}.attn_norm.weight": ((HIDDEN,), f32),
            f"blk.{layer}.attn_q.weight": ((HEADS * head_dim, HIDDEN), q4),
            f"blk.{layer}.attn_k.weight": ((KV_HEADS * head_dim, HIDDEN), q4),
            f"blk.{layer}.attn_v.weight": ((KV_HEADS * head_dim, HIDDEN), q8),
            f"blk.{layer}.attn_output.weight": ((HIDDEN, HEADS * head_dim), q4),
            f"blk.{layer}.ffn_norm.weight": ((HIDDEN,), f32),
            f"blk.{layer}.ffn_gate.weight": ((INNER, HIDDEN), q4),
            f"blk.{layer}.ffn_up.weight": ((INNER, HIDDEN), q4),
            f"blk.{layer}.ffn_down.weight": ((HIDDEN, INNER), q4),
        }
    found["output_norm.weight"] = ((HIDDEN,), f32)
    if not tied:
        found["output.weight"] = ((vocabulary, HIDDEN), f32)
    return found


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(256 - len(printable))]
