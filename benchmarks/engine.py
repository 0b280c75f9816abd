"""Prefill and decode, paired in one run: turnkv's engine against transformers' own `generate`.

    .venv/bin/python benchmarks/engine.py [--quick] [--json OUT]

Same weights, same prompt tokens, bf16, one stream. The two run in turns (A B A B …), each pair beside a calibration
loop, since clocks wander; what counts is the median of the pairs' ratios. Below 1, turnkv is faster.
"""

import argparse
import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from turnkv.config import CacheConfig, SamplingParams
from turnkv.engine import Engine, ModelRunner
from turnkv.engine.request import Generation
from turnkv.models import resolve_model
from turnkv.models.loading import load_model

WORDS = "the agent reads a long log and finds the one line that matters before it answers the question again "


@dataclass(frozen=True)
class Timing:
    first_token_s: float
    decode_token_s: float


@dataclass(frozen=True)
class Row:
    prompt_tokens: int
    prefill_ratio: float
    decode_ratio: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    pairs: int
    calibration_spread: float


class _Clock:
    """A streamer for `generate` that notes when each token comes out."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generation(engine: Engine, num_tokens: int, new_tokens: int) -> Generation:
    """A request whose prompt has about so many tokens and whose reply does not end early."""
    num_words = max(1, num_tokens - 40)
    words = (WORDS * (num_words // 18 + 1)).split()[:num_words]
    request = engine.generation(
        [{"role": "user", "content": " ".join(words)}], sampling=SamplingParams(max_new_tokens=new_tokens)
    )
    request.stop_ids = frozenset()
    return request


def time_ours(engine: Engine, num_tokens: int, new_tokens: int) -> tuple[Timing, list[int]]:
    request = generation(engine, num_tokens, new_tokens)
    request.started_s = start = time.perf_counter()
    engine.submit(request)
    while not request.is_done:
        engine.step()
    stop = time.perf_counter()
    assert request.session is not None
    assert request.ttft_s is not None
    records = request.session.records
    prompt = [token for record in records[:-1] for token in record.tokens]
    prompt += records[-1].tokens[: records[-1].header_tokens]
    engine.close_session(request.session.id)
    return Timing(request.ttft_s, (stop - start - request.ttft_s) / (new_tokens - 1)), prompt


def time_theirs(model: Any, prompt: list[int], new_tokens: int) -> Timing:
    ids = torch.tensor([prompt])
    clock = _Clock()
    start = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
            streamer=clock,
        )
    _, first, *_, last = clock.times  # the streamer is given the prompt first
    return Timing(first - start, (last - first) / (new_tokens - 1))


def calibrate() -> float:
    """Seconds of a fixed piece of arithmetic: says how far to trust the pair beside it."""
    matrix = torch.ones(512, 512)
    start = time.perf_counter()
    for _ in range(20):
        matrix = matrix @ torch.eye(512)
    return time.perf_counter() - start


def measure(engine: Engine, model: Any, num_tokens: int, pairs: int, new_tokens: int) -> Row:
    _, prompt = time_ours(engine, num_tokens, 2)
    time_theirs(model, prompt, 2)
    ours, theirs, calibration = [], [], []
    for pair in range(pairs):
        calibration.append(calibrate())
        for is_ours in (True, False) if pair % 2 else (False, True):
            if is_ours:
                ours.append(time_ours(engine, num_tokens, new_tokens)[0])
            else:
                theirs.append(time_theirs(model, prompt, new_tokens))
    ratios = [
        (a.first_token_s / b.first_token_s, a.decode_token_s / b.decode_token_s)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return Row(
        prompt_tokens=len(prompt),
        prefill_ratio=statistics.median(ratio[0] for ratio in ratios),
        decode_ratio=statistics.median(ratio[1] for ratio in ratios),
        prefill_tokens_per_s=len(prompt) / statistics.median(one.first_token_s for one in ours),
        decode_tokens_per_s=1 / statistics.median(one.decode_token_s for one in ours),
        pairs=pairs,
        calibration_spread=max(calibration) / min(calibration),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short prompts, two pairs: does it run at all?")
    parser.add_argument("--json", type=Path, help="write the rows and the setting here")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--model", default=None)
    arguments = parser.parse_args()
    pairs, new_tokens = (2, 4) if arguments.quick else (arguments.pairs, 32)
    folder = resolve_model(arguments.model, progress=print)
    runner, tokenizer = ModelRunner.load(folder.path, dtype="bfloat16")
    engine = Engine(runner, tokenizer, name=folder.name, cache=CacheConfig(budget_bytes=2**29))
    model, _ = load_model(folder.path, torch.bfloat16)
    setting = {
        "model": folder.name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "peer_attention": model.config._attn_implementation,
    }
    print(", ".join(f"{name} {value}" for name, value in setting.items()))
    print("prompt   prefill ours/theirs   decode ours/theirs   prefill tok/s   decode tok/s   pairs   clock spread")
    rows = []
    for num_tokens in (64, 128) if arguments.quick else (512, 2048):
        row = measure(engine, model, num_tokens, pairs, new_tokens)
        rows.append(row)
        print(
            f"{row.prompt_tokens:6}   {row.prefill_ratio:19.2f}   {row.decode_ratio:18.2f}   "
            f"{row.prefill_tokens_per_s:13.0f}   {row.decode_tokens_per_s:12.1f}   {row.pairs:5}   "
            f"{row.calibration_spread:12.2f}",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"setting": setting, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
