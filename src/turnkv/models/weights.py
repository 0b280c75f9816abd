"""Weights of a llama GGUF file as a bf16 safetensors file, tensor by tensor, without torch."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import dequantize
from numpy.typing import NDArray

from turnkv.errors import ModelFilesError

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PATTERN = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")
_CHUNK_ELEMENTS = 1 << 22
"""Elements dequantised at a time: the working set stays in tens of MB however large the tensor."""


def hugging_face_name(name: str) -> str | None:
    """Translate a GGUF tensor name of the llama architecture; None for a tensor that Llama models have not."""
    match = _PATTERN.fullmatch(name)
    if match is None or match["part"] not in _NAMES:
        return None
    prefix = "" if match["layer"] is None else f"model.layers.{match['layer']}."
    return f"{prefix}{_NAMES[match['part']]}.{match['kind']}"


def write_weights(path: Path, tensors: list[Any], *, heads: int, kv_heads: int) -> None:
    """Write GGUF tensors (those `gguf.GGUFReader` yields) under their Hugging Face names, rounded to bf16.

    Error: half a bf16 unit in the last place of the dequantised weight (test_conversion.py).

    Raises:
        ModelFilesError: a weight is not finite, or of a type that gguf cannot dequantise. The file is half-written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + 2 * int(tensor.n_elements)
        name = hugging_face_name(tensor.name)
        assert name is not None, tensor.name
        shape = [int(size) for size in reversed(tensor.shape)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            for chunk in _float_rows(tensor, _row_order(tensor, heads, kv_heads)):
                file.write(round_to_bf16(chunk).tobytes())


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round finite float32 to bf16, ties to even; the result holds the bit patterns."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")


def _row_order(tensor: Any, heads: int, kv_heads: int) -> NDArray[np.intp] | None:
    """Undo llama.cpp's row order of the query and key projections.

    It rotates neighbours (2i, 2i+1), Hugging Face rotates halves (i, i + D/2). Rows are quantised one by one, so
    whole quantised rows can be moved.
    """
    count = heads if ".attn_q." in tensor.name else kv_heads if ".attn_k." in tensor.name else None
    if count is None:
        return None
    rows = int(tensor.shape[-1])
    return np.arange(rows, dtype=np.intp).reshape(count, rows // count // 2, 2).swapaxes(1, 2).reshape(-1)


def _float_rows(tensor: Any, order: NDArray[np.intp] | None) -> Iterator[NDArray[np.float32]]:
    data = tensor.data
    rows = data.shape[0]
    step = max(1, _CHUNK_ELEMENTS * rows // int(tensor.n_elements))
    for start in range(0, rows, step):
        packed = data[start : start + step] if order is None else data[order[start : start + step]]
        try:
            values: NDArray[np.float32] = np.ascontiguousarray(dequantize(packed, tensor.tensor_type), dtype=np.float32)
        except NotImplementedError as error:
            raise ModelFilesError(
                f"{tensor.name} is stored as {tensor.tensor_type.name}, which the gguf package cannot read; "
                "use another quantisation of the model"
            ) from error
        if not np.isfinite(values).all():
            raise ModelFilesError(
                f"{tensor.name} holds values that are not finite; the file is damaged: fetch it again"
            )
        yield values
