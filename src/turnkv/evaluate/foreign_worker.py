"""Other libraries' caches, in an environment of their own: `python foreign_worker.py NAME FOLDER DTYPE`.

A script that imports nothing of turnkv's: kvpress needs another version of transformers. It is asked by lines of JSON
and answers by lines: `{"hold": tokens}` prefills and compresses, `{"score": tokens, "num_scored": n, "to": FILE}`
writes the logits [n, V] float32 that predict the last n tokens. What is held stays as it is.
"""

import copy
import json
import os
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache


class Worker:
    """A model and the cache of one prefix."""

    def __init__(self, name: str, folder: str, dtype: str) -> None:
        library, _, method = name.partition(":")
        self._method, _, kept = method.partition("@")
        self._press = _press(self._method, float(kept)) if library == "kvpress" else None
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
        self._model.eval()
        self._cache: Any = None
        self._num_held = 0

    def hold(self, tokens: list[int]) -> int:
        """Prefill and compress; gives the bytes of KV that are kept."""
        self._cache = self._empty()
        self._num_held = len(tokens)
        ids = torch.tensor([tokens])
        if self._press is None:
            self._model.model(input_ids=ids, past_key_values=self._cache)
        else:
            with self._press(self._model):
                self._model.model(input_ids=ids, past_key_values=self._cache)
        return _bytes(self._cache)

    def score(self, tokens: list[int], num_scored: int) -> torch.Tensor:
        """Logits that predict the last tokens, at the positions that they have behind the whole prefix."""
        cache = copy.deepcopy(self._cache)
        positions = torch.arange(self._num_held, self._num_held + len(tokens))[None]
        found = self._model(
            input_ids=torch.tensor([tokens]),
            past_key_values=cache,
            position_ids=positions,
            logits_to_keep=num_scored + 1,
        )
        logits: torch.Tensor = found.logits[0, :-1].float()
        return logits

    def _empty(self) -> Any:
        if self._method == "quanto-int4":
            return QuantizedCache("quanto", self._model.config, nbits=4)
        return DynamicCache()


def _press(method: str, kept: float) -> Any:
    import kvpress  # noqa: PLC0415 (only some names need it)

    kinds = {
        "streaming_llm": kvpress.StreamingLLMPress,
        "snapkv": kvpress.SnapKVPress,
        "expected_attention": kvpress.ExpectedAttentionPress,
        "keydiff": kvpress.KeyDiffPress,
    }
    return kinds[method](compression_ratio=1 - kept)


def _bytes(cache: Any) -> int:
    """Of all tensors that the cache's layers hold: keys, values, codes, scales and what is left exact."""
    return sum(_tensor_bytes(value) for layer in cache.layers for value in vars(layer).values())


def _tensor_bytes(value: Any) -> int:
    if hasattr(value, "_data") and hasattr(value, "_scale"):  # quanto's, which packs several codes in a byte
        parts = (value._data, value._scale, getattr(value, "_shift", None))
        return sum(_tensor_bytes(getattr(part, "_data", part)) for part in parts if part is not None)
    return value.nbytes if isinstance(value, torch.Tensor) else 0


@torch.inference_mode()
def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    worker = Worker(*sys.argv[1:4])
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        if "hold" in asked:
            answer = {"kv_bytes": worker.hold(asked["hold"])}
        else:
            logits = worker.score(asked["score"], asked["num_scored"])
            logits.numpy().tofile(asked["to"])
            answer = {"rows": len(logits)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
