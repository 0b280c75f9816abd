"""llama.cpp as a worker: `llama_cpp.py WEIGHTS.gguf`, in its own environment. peer_workers.py says what it is asked."""

import json
import os
import statistics
import sys
import threading
import time
from importlib.metadata import version
from typing import Any

STARTED = time.perf_counter()
NUM_STREAMS = 8


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp prints is no answer
    import xllamacpp  # noqa: PLC0415 (it may print)

    params = xllamacpp.CommonParams()
    params.model.path = sys.argv[1]
    threads = len(os.sched_getaffinity(0))
    params.cpuparams.n_threads = threads
    params.cpuparams_batch.n_threads = threads
    params.n_ctx = 8192 * 2
    params.n_parallel = NUM_STREAMS
    params.kv_unified = True
    params.n_batch = 2048
    params.n_ubatch = int(os.environ.get("UBATCH", "512"))
    params.cache_ram_mib = 0
    params.warmup = True
    if "FLASH" in os.environ:
        params.flash_attn_type = getattr(xllamacpp.llama_flash_attn_type, os.environ["FLASH"])
    server = xllamacpp.Server(params)

    def complete(prompt: list[int], new_tokens: int, slot: int, is_cached: bool) -> dict[str, Any]:
        found: list[Any] = []
        server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": new_tokens,
                "ignore_eos": True,
                "cache_prompt": is_cached,
                "id_slot": slot,
                "temperature": 0.0,
                "samplers": ["temperature"],
                "stream": False,
                "return_tokens": True,
            },
            found.append,
        )
        answer = found[-1]
        answer = json.loads(answer) if isinstance(answer, str) else answer
        if "timings" not in answer:
            raise RuntimeError(str(answer)[:500])
        return dict(answer)

    def per_token_s(timings: dict[str, float]) -> float:
        return timings["predicted_ms"] / 1000 / max(1, timings["predicted_n"] - 1)

    def run(question: dict[str, Any]) -> dict[str, Any]:
        prompt, new_tokens = question["prompt"], question["new_tokens"]
        streams = question.get("streams", 1)
        if not question.get("is_warm"):
            is_cached = bool(question.get("is_cached"))
            started = time.perf_counter()
            answer = complete(prompt, new_tokens, 0, is_cached)
            timings = answer["timings"]
            return {
                "first_token_s": timings["prompt_ms"] / 1000,
                "decode_token_s": per_token_s(timings),
                "all_s": time.perf_counter() - started,
                "tokens": answer.get("tokens"),
            }
        for slot in range(streams):
            complete(prompt, 1, slot, True)
        answers: list[dict[str, Any]] = []
        threads = [
            threading.Thread(target=lambda slot=slot: answers.append(complete(prompt, new_tokens, slot, True)))
            for slot in range(streams)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"first_token_s": None, "decode_token_s": statistics.median(per_token_s(a["timings"]) for a in answers)}

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
