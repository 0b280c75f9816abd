"""How fast attention reads KV: decode and prefill, by tier, beside the machine's read bandwidth and torch's attention.

    .venv/bin/python benchmarks/kernels.py [--json OUT] [--quick] [--threads N ...] [--shape H,G,D,LAYERS] [--rounds N]

The bandwidth is that of a plain read loop in C++, measured in the same rounds and by the same threads. Decode goes
through so many layers, and copies of the context in each, that their KV is four times the last-level cache, which is
then no help; a row where memory does not allow that says so. Kinds are measured in rounds, one after the other, and
ratios are medians of ratios within a round, since clocks wander. Two more sections: prefill beside torch's flash,
and the same KV in pages one behind the other and in pages at random.
"""

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from turnkv.cache import KVStorage, LayerShape, TierPlan, TileGroup, native
from turnkv.config import PAGE_TOKENS
from turnkv.evaluate.machine import cpu_name
from turnkv.kernels import BODIES, Batch, LayerAttention, SequenceView, cpu
from turnkv.types import EXACT, Tier

TIERS = {"exact": EXACT, "int8": Tier("int8", "int8"), "int4": Tier("int4", "int4")}
CPU = torch.device("cpu")
CACHES = 4
"""Working set of each kind, in last-level caches."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's attention: query heads, key-value heads, dims, layers. The default is SmolLM2-135M's."""

    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    layers: int = 30

    @property
    def attention(self) -> LayerAttention:
        return LayerAttention(scale=self.dim**-0.5)

    @property
    def layer(self) -> LayerShape:
        return LayerShape(num_heads=self.kv_heads, key_dim=self.dim, value_dim=self.dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one call attends to."""

    shape: Shape
    context: int
    batch: int = 1
    queries: int = 1
    is_scattered: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run measures."""

    rounds: int
    working_bytes: int
    seconds: float
    """Of one kind in one round."""


class TieredCalls:
    """Attention calls in one tier; each reads KV that was not read for `working_bytes` of other KV."""

    def __init__(self, load: Load, tier: Tier, working_bytes: int) -> None:
        shape = load.shape
        pages = -(-load.context // PAGE_TOKENS) * load.batch
        self.bytes = pages * TierPlan.of(tier, [shape.layer], torch.bfloat16).page_bytes
        regions = max(2, -(-working_bytes // self.bytes))
        layers = min(shape.layers, regions)
        copies = -(-regions // layers)
        self.working_bytes = layers * copies * self.bytes
        plans = {each: TierPlan.of(each, [shape.layer] * layers, torch.bfloat16) for each in (EXACT, tier)}
        counts = {EXACT: 64} | {tier: max(64, pages * copies)}
        storage = KVStorage(plans, counts, CPU)
        _fill(storage, tier, counts[tier])
        order = np.arange(pages * copies, dtype=np.int32)
        if load.is_scattered:
            order = np.random.default_rng(0).permutation(order)
        batches = [_batch(load, tier, own.reshape(load.batch, -1)) for own in order.reshape(copies, -1)]
        self._query = torch.randn(load.batch * load.queries, shape.heads, shape.dim).bfloat16()
        self._attention = shape.attention
        self._turns = itertools.cycle([(kv, batch) for batch in batches for kv in storage.layers])

    def __call__(self) -> object:
        kv, batch = next(self._turns)
        return cpu.attend(self._query, kv, batch, self._attention)


def _batch(load: Load, tier: Tier, pages: NDArray[np.int32]) -> Batch:
    views = []
    for index, own in enumerate(pages):
        slots = (own[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS, dtype=np.int32)).reshape(-1)[: load.context]
        group = TileGroup.of(tier, 0, slots, np.arange(load.context, dtype=np.int32))
        views.append(SequenceView((group,), index * load.queries, load.queries, load.context - load.queries))
    return Batch(tuple(views))


def _fill(storage: KVStorage, tier: Tier, pages: int) -> None:
    """Random keys and values in every slot: 64 pages, stored as the tier stores them, and copies of those."""
    slots = np.arange(64 * PAGE_TOKENS, dtype=np.int32)
    for layer, kv in enumerate(storage.layers):
        shape = kv.layouts[EXACT].shape
        key, value = (torch.randn(shape.num_heads, len(slots), shape.key_dim).bfloat16() for _ in range(2))
        storage.write(layer, slots, key, value)
    if tier != EXACT:
        storage.settle(EXACT, slots, tier, slots)
    for kv in storage.layers:
        blocks = kv.arenas[tier]
        for start in range(64, pages, 64):
            count = min(64, pages - start)
            blocks[start : start + count] = blocks[:count]


def torch_decode(load: Load, working_bytes: int) -> Call:
    """Torch's attention over contiguous KV of the same size, heads grouped."""
    shape = load.shape
    each = load.batch * shape.kv_heads * load.context * shape.dim * 4
    one = torch.randn(2, load.batch, shape.kv_heads, load.context, shape.dim).bfloat16()
    kv = [one.clone() for _ in range(max(2, -(-working_bytes // each)))]
    query = torch.randn(load.batch, shape.heads, 1, shape.dim).bfloat16()
    turns = itertools.cycle(kv)

    def call() -> object:
        key, value = next(turns)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return call


def torch_prefill(load: Load) -> Call:
    """Torch's flash kernel as turnkv called it before it had kernels of its own: past, then new tokens, causal."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    shape = load.shape
    query = torch.randn(1, shape.heads, load.queries, shape.dim).bfloat16()
    key, value = (torch.randn(1, shape.kv_heads, load.context, shape.dim).bfloat16() for _ in range(2))
    past = load.context - load.queries

    def call() -> object:
        flash(query, key[:, :, :past], value[:, :, :past], 0.0, False, scale=shape.dim**-0.5)
        return flash(query, key[:, :, past:], value[:, :, past:], 0.0, True, scale=shape.dim**-0.5)

    return call


def read_call(working_bytes: int) -> tuple[Call, int]:
    """A plain read of memory that the caches do not hold, and its bytes."""
    assert native.KERNELS is not None
    read = native.KERNELS.read
    buffer = torch.ones(working_bytes // 8, dtype=torch.int64)
    part = min(working_bytes, 2**26) // 8
    starts = itertools.cycle(range(0, len(buffer) - part + 1, part))
    return (lambda: read(buffer[next(starts) :].data_ptr(), part)), part * 8


def seconds_per_call(call: Call, at_least: float) -> float:
    """Mean time of as many calls as fill `at_least`: all of them count, as in a model's step."""
    count, started = 0, time.perf_counter()
    while (passed := time.perf_counter() - started) < at_least or count < 2:
        call()
        count += 1
    return passed / count


def measured(calls: dict[str, Call], plan: Plan) -> dict[str, list[float]]:
    """Seconds a call, of each kind in each round."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(plan.rounds):
        for name, call in calls.items():
            times[name].append(seconds_per_call(call, plan.seconds))
    return times


def ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


class DecodeKind(TypedDict):
    """One tier's figures."""

    bytes: int
    us: float
    of_bandwidth: float
    faster_than_exact: float
    faster_than_torch: float


def decode(load: Load, plan: Plan) -> dict[str, object]:
    """All tiers, torch and the plain read, call by call."""
    tiers = {name: TieredCalls(load, tier, plan.working_bytes) for name, tier in TIERS.items()}
    read, read_bytes = read_call(max(plan.working_bytes, 2**22))
    times = measured({"read": read, **tiers, "torch": torch_decode(load, plan.working_bytes)}, plan)
    bandwidth = read_bytes / statistics.median(times["read"])
    print(
        f"\ndecode, {load.context:,} tokens x {load.batch}, {torch.get_num_threads()} threads; reads "
        f"{bandwidth / 1e9:.1f} GB/s; torch {statistics.median(times['torch']) * 1e6:,.0f} us",
        flush=True,
    )
    row: dict[str, object] = {
        "context": load.context,
        "batch": load.batch,
        "threads": torch.get_num_threads(),
        "read_bytes_per_s": bandwidth,
        "torch_us": statistics.median(times["torch"]) * 1e6,
    }
    for name, calls in tiers.items():
        kind = DecodeKind(
            bytes=calls.bytes,
            us=statistics.median(times[name]) * 1e6,
            of_bandwidth=calls.bytes / read_bytes * ratio(times["read"], times[name]),
            faster_than_exact=ratio(times["exact"], times[name]),
            faster_than_torch=ratio(times["torch"], times[name]),
        )
        row[name] = kind
        is_cached = calls.working_bytes < plan.working_bytes
        print(
            f"  {name:6} {calls.bytes:12,} bytes {kind['us']:9,.1f} us  {kind['of_bandwidth']:4.0%} of the bandwidth"
            f"{' (cached)' if is_cached else ''}, {kind['faster_than_exact']:.2f} times exact's speed, "
            f"{kind['faster_than_torch']:.1f} times torch's",
            flush=True,
        )
    return row


def prefill(load: Load, plan: Plan) -> dict[str, object]:
    tiers = {name: TieredCalls(load, tier, 1) for name, tier in TIERS.items()}
    times = measured({**tiers, "torch": torch_prefill(load)}, plan)
    faster = {name: ratio(times["torch"], times[name]) for name in tiers}
    said = ", ".join(f"{name} {value:.2f}" for name, value in faster.items())
    print(
        f"prefill, {load.queries:,} of {load.context:,} tokens, {torch.get_num_threads()} threads: torch's flash "
        f"{statistics.median(times['torch']) * 1e3:.1f} ms; times its speed: {said}",
        flush=True,
    )
    return {
        "context": load.context,
        "queries": load.queries,
        "threads": torch.get_num_threads(),
        "torch_ms": statistics.median(times["torch"]) * 1e3,
        "faster_than_torch": faster,
    }


def scattered(load: Load, plan: Plan) -> dict[str, object]:
    """Equal content in pages one behind the other and in pages at random."""
    found: dict[str, object] = {"context": load.context, "threads": torch.get_num_threads()}
    for name, tier in TIERS.items():
        orders: dict[str, Call] = {
            "inline": TieredCalls(load, tier, plan.working_bytes),
            "random": TieredCalls(
                Load(shape=load.shape, context=load.context, is_scattered=True), tier, plan.working_bytes
            ),
        }
        times = measured(orders, plan)
        found[name] = ratio(times["random"], times["inline"])
        print(
            f"pages at random, {load.context:,} tokens, {name}, {torch.get_num_threads()} threads: "
            f"{found[name]:.3f} of the time of pages in order",
            flush=True,
        )
    return found


def cache_bytes() -> int:
    """The last-level cache, as the system tells; 32 MiB where it does not."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[text[-1]])
    return max(sizes, default=2**25)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="small sizes, once: does it run?")
    parser.add_argument("--threads", type=int, nargs="+", help="counts to measure; one and all by default")
    parser.add_argument("--shape", default="9,3,64,30", help="query heads, key-value heads, dims, layers")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    if "cpu" not in BODIES:
        raise SystemExit("the C++ kernels are not built; install a C++ compiler and run: make install")
    heads, kv_heads, dim, layers = map(int, arguments.shape.split(","))
    shape = Shape(heads=heads, kv_heads=kv_heads, dim=dim, layers=layers)
    cached = cache_bytes()
    plan = Plan(arguments.rounds, CACHES * cached, 0.12)
    contexts: tuple[int, ...] = (1024, 8192, 32768)
    prompts: tuple[tuple[int, int], ...] = ((2048, 512), (8192, 512), (8192, 2048), (16384, 2048))
    if arguments.quick:
        plan, contexts, prompts = Plan(1, 2**24, 0.01), (256, 1024), ((512, 64),)
    print(
        f"{cpu_name()}, {os.cpu_count()} CPUs, body {cpu.isas()[-1]}, last-level cache "
        f"{cached / 2**20:.0f} MiB, each kind over {plan.working_bytes / 2**20:,.0f} MiB"
    )
    by_threads: dict[int, dict[str, object]] = {}
    for threads in arguments.threads or sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        loads = [Load(shape=shape, context=context, batch=batch) for context in contexts for batch in (1, 8)]
        rows = [decode(load, plan) for load in loads]
        print()
        fills = [prefill(Load(shape=shape, context=context, queries=queries), plan) for context, queries in prompts]
        pages = scattered(Load(shape=shape, context=contexts[-1]), plan)
        by_threads[threads] = {"threads": threads, "decode": rows, "prefill": fills, "scattered": pages}
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        head = {"machine": cpu_name(), "isa": cpu.isas()[-1], "cache_bytes": cached, "shape": arguments.shape}
        # The last thread count, all by default, is what others cite (benchmarks/claims.py).
        last = by_threads[next(reversed(by_threads))]
        arguments.json.write_text(json.dumps(head | last | {"by_threads": by_threads}, indent=1))


if __name__ == "__main__":
    main()
