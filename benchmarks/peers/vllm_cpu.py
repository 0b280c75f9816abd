"""vLLM's CPU build as a worker: `vllm_cpu.py FOLDER`, in its own environment. peer_workers.py says what it is asked.

The engine runs in this process, so that its steps can be timed, and compiles, which takes minutes at the first start.
"""

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

STARTED = time.perf_counter()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM, SamplingParams  # noqa: PLC0415 (it prints)

    llm = LLM(
        model=sys.argv[1],
        dtype="bfloat16",
        max_model_len=8192,
        max_num_seqs=8,
        enable_prefix_caching=True,
    )
    engine = llm.llm_engine
    number = 0

    def begin(prompt: list[int], new_tokens: int) -> str:
        nonlocal number
        number += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, min_tokens=new_tokens, ignore_eos=True)
        sampling.detokenize = False
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        return str(number)

    def run(question: dict[str, Any]) -> dict[str, Any]:
        prompt, new_tokens = question["prompt"], question["new_tokens"]
        streams = question.get("streams", 1)
        is_warm = question.get("is_warm", False)
        if is_warm:
            begin(prompt, 1)
            while engine.has_unfinished_requests():
                engine.step()
        elif not question.get("is_cached"):
            engine.reset_prefix_cache()
        started = time.perf_counter()
        counts = {begin(prompt, new_tokens): 0 for _ in range(streams)}
        tokens: list[int] = []
        first: float | None = None
        end: float | None = None
        steps, now = 0, started
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                tokens = list(output.outputs[0].token_ids)
                counts[output.request_id] = len(tokens)
            if first is None:
                first = now if all(counts.values()) else None
            elif end is None:  # only steps in which all streams decode
                steps += 1
                end = now if max(counts.values()) == new_tokens else None
        assert first is not None
        decode_s = (end - first) / steps if end is not None else None
        return {"first_token_s": first - started, "decode_token_s": decode_s, "all_s": now - started, "tokens": tokens}

    ready = {
        "ready": True,
        "name": "vLLM",
        "version": version("vllm-cpu"),
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
