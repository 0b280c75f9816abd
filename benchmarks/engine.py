"""Prefill and decode, paired in one run: turnkv's engine against transformers' own `generate`.

    .venv/bin/python benchmarks/engine.py [--quick] [--json OUT]

Same weights, same prompt tokens, bf16, one stream. Clocks wander by a factor of two here, so the two run as A B B A:
each round gives one ratio of sums, in which a steady drift cancels, with a calibration loop beside it; what counts is
the median over the rounds. Below 1, turnkv is faster.
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
    rounds: int
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


def measure(engine: Engine, model: Any, num_tokens: int, rounds: int, new_tokens: int) -> Row:
    _, prompt = time_ours(engine, num_tokens, 2)
    time_theirs(model, prompt, 2)
    ours, theirs, calibration = [], [], []
    prefill_ratios, decode_ratios = [], []
    for _ in range(rounds):
        calibration.append(calibrate())
        for is_ours in (True, False, False, True):
            if is_ours:
                ours.append(time_ours(engine, num_tokens, new_tokens)[0])
            else:
                theirs.append(time_theirs(model, prompt, new_tokens))
        mine, peers = ours[-2:], theirs[-2:]
        prefill_ratios.append(sum(one.first_token_s for one in mine) / sum(one.first_token_s for one in peers))
        decode_ratios.append(sum(one.decode_token_s for one in mine) / sum(one.decode_token_s for one in peers))
    return Row(
        prompt_tokens=len(prompt),
        prefill_ratio=statistics.median(prefill_ratios),
        decode_ratio=statistics.median(decode_ratios),
        prefill_tokens_per_s=len(prompt) / statistics.median(one.first_token_s for one in ours),
        decode_tokens_per_s=1 / statistics.median(one.decode_token_s for one in ours),
        rounds=rounds,
        calibration_spread=max(calibration) / min(calibration),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short prompts, two rounds: does it run at all?")
    parser.add_argument("--json", type=Path, help="write the rows and the setting here")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--model", default=None)
    arguments = parser.parse_args()
    rounds, new_tokens = (2, 4) if arguments.quick else (arguments.rounds, 32)
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
    print("prompt   prefill ours/theirs   decode ours/theirs   prefill tok/s   decode tok/s   rounds   clock spread")
    rows = []
    for num_tokens in (64, 128) if arguments.quick else (512, 2048):
        row = measure(engine, model, num_tokens, rounds, new_tokens)
        rows.append(row)
        print(
            f"{row.prompt_tokens:6}   {row.prefill_ratio:19.2f}   {row.decode_ratio:18.2f}   "
            f"{row.prefill_tokens_per_s:13.0f}   {row.decode_tokens_per_s:12.1f}   {row.rounds:6}   "
            f"{row.calibration_spread:12.2f}",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"setting": setting, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
