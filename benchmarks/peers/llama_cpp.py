"""llama.cpp as a worker: `llama_cpp.py WEIGHTS.gguf`, in its own environment. peer_workers.py says what it is asked."""

import json
import os
import sys
import time
import urllib.request
from importlib.metadata import version
from typing import Any

STARTED = time.perf_counter()
NUM_STREAMS = 8


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp prints is no answer
    threads = len(os.sched_getaffinity(0))
    import xllamacpp  # noqa: PLC0415 (it may print)

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_ctx = 8192 * 2
    params.n_parallel = NUM_STREAMS
    params.kv_unified = True
    params.n_batch = 2048
    params.cache_ram_mib = 0
    params.warmup = True
    server = xllamacpp.Server(params)

    def complete(prompt: list[int], new_tokens: int, streams: int, is_cached: bool) -> dict[str, Any]:
        """The first of `streams` completions, which begin to decode in the same step and share the prompt's KV."""
        question = {
            "prompt": prompt,
            "n_predict": new_tokens,
            "n_cmpl": streams,
            "ignore_eos": True,
            "cache_prompt": is_cached,
            "temperature": 0.0,
            "samplers": ["temperature"],
            "return_tokens": True,
        }
        request = urllib.request.Request(
            f"{server.listening_address}/completion",
            data=json.dumps(question).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as response:
            answer: Any = json.load(response)
        return dict(answer[0] if isinstance(answer, list) else answer)

    def run(question: dict[str, Any]) -> dict[str, Any]:
        prompt, new_tokens = question["prompt"], question["new_tokens"]
        is_warm = question.get("is_warm", False)
        if is_warm:
            complete(prompt, 1, 1, True)
        started = time.perf_counter()
        is_cached = is_warm or bool(question.get("is_cached"))
        answer = complete(prompt, new_tokens, question.get("streams", 1), is_cached)
        timings = answer["timings"]
        return {
            "first_token_s": None if is_warm else timings["prompt_ms"] / 1000,
            "decode_token_s": timings["predicted_ms"] / 1000 / max(1, timings["predicted_n"] - 1),
            "all_s": time.perf_counter() - started,
            "tokens": answer["tokens"],
        }

    ready = {
        "ready": True,
        "name": "llama.cpp f16" if "f16" in sys.argv[1] else "llama.cpp 4 bits",
        "version": version("xllamacpp"),
        "start_s": time.perf_counter() - STARTED,
    }
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = run(json.loads(line))
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
