"""Prefill and decode, paired in one run: turnkv beside transformers and, with `--peers`, vLLM on CPUs and llama.cpp.

    .venv/bin/python benchmarks/engine.py [--peers] [--quick] [--only KIND] [--rounds N] [--json OUT]

Same model, same prompt tokens, greedy, bf16 (llama.cpp: f16, and 4 bits for information). `prefill` is the time to the
first token of a prompt of which nothing is cached; `decode` is a step of all streams, whose prompt is cached and one
and the same. turnkv runs twice, with the prompt's closed turn stored exact and in int8. Clocks wander by a factor of
two here, so all arms run in turn, there and back: each round gives a ratio of sums, in which a steady drift cancels;
what counts is the median over the rounds. Below 1, turnkv is faster. `floor` is how many times longer turnkv's step
takes than reading its weights and KV once, at the bandwidth that a plain read loop has in the same round.

`make peers` installs the peers; each runs in a process of its own (benchmarks/peers), which is idle while others run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

from peer_workers import Worker, start_peers
from turnkv.config import CacheConfig, SamplingParams
from turnkv.engine import Engine, Generation, ModelRunner
from turnkv.engine.fused import FusedHead, FusedLayer
from turnkv.evaluate.machine import cpu_name
from turnkv.kernels import cpu
from turnkv.models import resolve_model
from turnkv.models.loading import load_model
from turnkv.policy import FULL, Policy, Precision

WORDS = "the agent reads a long log and finds the one line that matters before it answers the question again "
OURS = "turnkv"
INT8 = Policy(name="int8", precision=Precision(exact=()))


@dataclass(frozen=True)
class Prompt:
    """A closed turn and a short question, as messages and as tokens."""

    messages: list[dict[str, str]]
    tokens: list[int]


class Arm(Protocol):
    """An engine under test."""

    name: str

    def prefill(self, prompt: Prompt) -> float:
        """Seconds to the first token, nothing cached."""
        ...

    def decode(self, prompt: Prompt, num_streams: int, new_tokens: int) -> float:
        """Seconds of a step of all streams, the prompt cached."""
        ...


class Ours:
    """turnkv under a policy that drops nothing."""

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine

    def prefill(self, prompt: Prompt) -> float:
        self.engine.clear()
        [request] = self._requests(prompt, 1, 1)
        self.engine.submit(request)
        while not request.is_done:
            self.engine.step()
        assert request.ttft_s is not None
        return request.ttft_s

    def decode(self, prompt: Prompt, num_streams: int, new_tokens: int) -> float:
        self.engine.clear()
        self.engine.score([*prompt.messages, {"role": "assistant", "content": "Yes."}])
        self.engine.tidy()
        requests = self._requests(prompt, num_streams, new_tokens)
        for request in requests:
            self.engine.submit(request)
        while not all(request.is_decoding for request in requests):
            self.engine.step()
        steps, started = 0, time.perf_counter()
        while not any(request.is_done for request in requests):
            self.engine.step()
            steps += 1
        seconds = (time.perf_counter() - started) / steps
        while not all(request.is_done for request in requests):
            self.engine.step()
        return seconds

    def bytes_read(self, prompt: Prompt) -> int:
        """Bytes of weights and KV that a step of one stream reads."""
        self.engine.clear()
        self.engine.score([*prompt.messages, {"role": "assistant", "content": "Yes."}])
        self.engine.tidy()
        reply = self.engine.respond(prompt.messages, sampling=SamplingParams(max_new_tokens=1))
        weights = 0
        for module in self.engine.runner.model.modules():
            if isinstance(module, FusedLayer):
                weights += module.block.num_bytes
            elif isinstance(module, FusedHead):
                weights += module.matrix.num_bytes
        return weights + reply.usage.kv_bytes

    def _requests(self, prompt: Prompt, count: int, new_tokens: int) -> list[Generation]:
        sampling = SamplingParams(max_new_tokens=new_tokens)
        requests = [self.engine.generation(prompt.messages, sampling=sampling) for _ in range(count)]
        for request in requests:
            request.stop_ids = frozenset()
        return requests


class Transformers:
    """transformers' own `generate`; one stream."""

    name = "transformers"

    def __init__(self, model: Any) -> None:
        self._model = model

    def prefill(self, prompt: Prompt) -> float:
        return self._times(prompt, 1)[0]

    def decode(self, prompt: Prompt, num_streams: int, new_tokens: int) -> float:
        assert num_streams == 1
        times = self._times(prompt, new_tokens)
        return (times[-1] - times[0]) / (new_tokens - 1)

    def _times(self, prompt: Prompt, new_tokens: int) -> list[float]:
        """When each token came out, seconds from the start."""
        ids = torch.tensor([prompt.tokens])
        clock = _Clock()
        started = time.perf_counter()
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                pad_token_id=0,
                streamer=clock,
            )
        return [at - started for at in clock.times[1:]]  # the streamer is given the prompt first


class _Clock:
    """A streamer for `generate` that notes when each token comes out."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Peer:
    """An engine in a process of its own."""

    def __init__(self, worker: Worker) -> None:
        self.name = worker.name
        self._worker = worker

    def prefill(self, prompt: Prompt) -> float:
        return float(self._worker.ask(prompt=prompt.tokens, new_tokens=1)["first_token_s"])

    def decode(self, prompt: Prompt, num_streams: int, new_tokens: int) -> float:
        answer = self._worker.ask(prompt=prompt.tokens, new_tokens=new_tokens, streams=num_streams, is_warm=True)
        return float(answer["decode_token_s"])


def make_prompt(engine: Engine, num_tokens: int) -> Prompt:
    """A prompt of about so many tokens."""
    num_words = max(1, num_tokens - 50)
    words = (WORDS * (num_words // 18 + 1)).split()[:num_words]
    messages = [
        {"role": "user", "content": " ".join(words)},
        {"role": "assistant", "content": "Understood."},
        {"role": "user", "content": "Go on."},
    ]
    reply = engine.respond(messages, sampling=SamplingParams(max_new_tokens=1))
    records = engine.session(reply.session_id).records
    tokens = [token for record in records[:-1] for token in record.tokens]
    tokens += records[-1].tokens[: records[-1].header_tokens]
    engine.clear()
    return Prompt(messages, tokens)


def calibrate() -> float:
    """Seconds of a fixed piece of arithmetic: says how far to trust what is measured beside it."""
    matrix = torch.ones(512, 512)
    started = time.perf_counter()
    for _ in range(20):
        matrix = matrix @ torch.eye(512)
    return time.perf_counter() - started


def compare(arms: Sequence[Arm], rounds: int, run: Callable[[Arm], float]) -> dict[str, Any]:
    """Median seconds of each arm, the median ratio of turnkv's to each other's, and how far clocks wandered."""
    for arm in arms:
        run(arm)
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    bandwidths, clocks = [], []
    for _ in range(rounds):
        clocks.append(calibrate())
        bandwidths.append(cpu.read_bandwidth(2**28, repeats=3) or float("nan"))
        found: dict[str, float] = dict.fromkeys(seconds, 0.0)
        for arm in [*arms, *reversed(arms)]:
            found[arm.name] += run(arm) / 2
        for name, each in found.items():
            seconds[name].append(each)
    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds[OURS], each, strict=True))
        for name, each in seconds.items()
        if name != OURS
    }
    return {
        "seconds": {name: statistics.median(each) for name, each in seconds.items()},
        "ours_over": ratios,
        "bandwidth": statistics.median(bandwidths),
        "clock_spread": max(clocks) / min(clocks),
    }


def prefill_of(prompt: Prompt) -> Callable[[Arm], float]:
    return lambda arm: arm.prefill(prompt)


def decode_of(prompt: Prompt, num_streams: int, new_tokens: int) -> Callable[[Arm], float]:
    return lambda arm: arm.decode(prompt, num_streams, new_tokens)


def show(what: str, row: dict[str, Any]) -> None:
    seconds = "  ".join(f"{name} {each * 1000:.1f}" for name, each in row["seconds"].items())
    ratios = "  ".join(f"{name} {each:.2f}" for name, each in row["ours_over"].items())
    floor = f"  of floor {row['of_floor']:.2f}" if "of_floor" in row else ""
    print(
        f"{what}\n  ms: {seconds}{floor}\n  turnkv's time over: {ratios}  (clock spread {row['clock_spread']:.2f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="vLLM and llama.cpp too; `make peers` first")
    parser.add_argument("--quick", action="store_true", help="short prompts, two rounds: does it run at all?")
    parser.add_argument("--json", type=Path, help="write the rows and the setting here")
    parser.add_argument("--only", choices=("prefill", "decode"), help="these rows alone; OUT keeps its others")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default=None)
    arguments = parser.parse_args()
    rounds, new_tokens = (2, 4) if arguments.quick else (arguments.rounds, 32)
    folder = resolve_model(arguments.model, progress=print)
    runner, tokenizer = ModelRunner.load(folder.path, dtype="bfloat16")
    cache = CacheConfig(budget_bytes=2**30)
    exact = Ours(OURS, Engine(runner, tokenizer, name=folder.name, policy=FULL, cache=cache))
    int8 = Ours(f"{OURS} int8 KV", exact.engine.with_policy(INT8))
    model, _ = load_model(folder.path, torch.bfloat16)
    own = Transformers(model)
    # llama.cpp's prefill is ten times slower here, and would take most of the time of long prompts.
    workers = start_peers(folder.path, with_llama=arguments.only != "prefill") if arguments.peers else []
    peers: list[Arm] = [Peer(worker) for worker in workers]
    prefilling = [peer for peer in peers if "llama.cpp" not in peer.name]
    has_prefill, has_decode = arguments.only != "decode", arguments.only != "prefill"
    setting = {
        "model": folder.name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "machine": cpu_name(),
        "kernels": cpu.isas()[-1] if cpu.isas() else "reference",
        "date": datetime.now(UTC).date().isoformat(),
        "transformers_attention": model.config._attn_implementation,
        "peers": {worker.name: worker.version for worker in workers},
    }
    print(", ".join(f"{name} {value}" for name, value in setting.items()))
    rows: list[dict[str, Any]] = []
    try:
        for num_tokens in (64, 128) if arguments.quick else (500, 2000, 6000):
            prompt = make_prompt(exact.engine, num_tokens)
            tokens = len(prompt.tokens)
            if has_prefill:
                row = compare([exact, own, *prefilling], rounds, prefill_of(prompt))
                rows.append({"kind": "prefill", "tokens": tokens} | row)
                show(f"prefill, {tokens:,} tokens", row)
            if not has_decode:
                continue
            row = compare([exact, int8, own, *peers], rounds, decode_of(prompt, 1, new_tokens))
            row["of_floor"] = row["seconds"][OURS] * row["bandwidth"] / exact.bytes_read(prompt)
            rows.append({"kind": "decode", "tokens": tokens, "streams": 1} | row)
            show(f"decode, {tokens:,} tokens, one stream", row)
        prompt = make_prompt(exact.engine, 64 if arguments.quick else 1000)
        for streams in () if not has_decode else (2,) if arguments.quick else (4, 8):
            row = compare([exact, int8, *peers], rounds, decode_of(prompt, streams, new_tokens))
            rows.append({"kind": "decode", "tokens": len(prompt.tokens), "streams": streams} | row)
            show(f"decode, {len(prompt.tokens):,} tokens, {streams} streams", row)
    finally:
        for worker in workers:
            worker.stop()
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        if arguments.only is not None and arguments.json.is_file():
            kept = json.loads(arguments.json.read_text("utf-8"))
            setting["peers"] = kept["setting"]["peers"] | setting["peers"]
            rows += [row for row in kept["rows"] if row["kind"] != arguments.only]
        arguments.json.write_text(json.dumps({"setting": setting, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
