"""How fast attention reads KV: decode and prefill, by tier, beside the machine's read bandwidth and torch's attention.

    .venv/bin/python benchmarks/kernels.py [--json OUT] [--quick] [--threads N]

The bandwidth is that of a plain sum over a buffer, measured in the same run and by the same threads. Decode attention
runs over all layers in turn, each with KV of its own, so that the working set is larger than the caches wherever memory
allows; a figure whose working set fits into the last-level cache is marked with `c`. Kinds are measured in rounds, one
after another, and medians are of ratios within a round. Two more sections: prefill beside torch's flash kernel, and
pages in order beside pages scattered at random.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from turnkv.cache import KVStorage, LayerShape, TierPlan, TileGroup
from turnkv.config import PAGE_TOKENS
from turnkv.kernels import BODIES, Batch, LayerAttention, SequenceView, cpu
from turnkv.types import EXACT, Tier

HEADS, KV_HEADS, DIM, LAYERS = 9, 3, 64, 30
"""Of the default model, SmolLM2-135M."""
TIERS = {"exact": EXACT, "int8": Tier("int8", "int8"), "int4": Tier("int4", "int4")}
SHAPE = LayerShape(num_heads=KV_HEADS, key_dim=DIM, value_dim=DIM)
ATTENTION = LayerAttention(scale=DIM**-0.5)
CPU = torch.device("cpu")


def seconds(run: Callable[[], object], *, at_least: float = 0.15) -> float:
    """Time of one call, from as many as fill `at_least`, less one to warm up."""
    run()
    times: list[float] = []
    while sum(times) < at_least or len(times) < 3:
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def bandwidth(num_bytes: int) -> float:
    """Bytes a second that a sum over a buffer reads."""
    buffer = torch.ones(num_bytes // 8, dtype=torch.int64)
    return num_bytes / seconds(buffer.sum)


def cache_bytes() -> int:
    """The last-level cache, as the system tells; 0 where it does not."""
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes)


@dataclass
class Case:
    """KV of one tier in all layers, filled once, and the queries of one step."""

    storage: KVStorage
    batch: Batch
    query: Tensor
    num_bytes: int

    @staticmethod
    def of(tier: Tier, context: int, batch: int, *, queries: int = 1, is_scattered: bool = False) -> "Case":
        pages = -(-context // PAGE_TOKENS) * batch
        plans = {EXACT: TierPlan.of(EXACT, [SHAPE] * LAYERS, torch.bfloat16)}
        plans[tier] = TierPlan.of(tier, [SHAPE] * LAYERS, torch.bfloat16)
        storage = KVStorage(plans, {EXACT: pages if tier == EXACT else 64} | {tier: pages}, CPU)
        fill(storage, tier, pages)
        order = (np.random.default_rng(0).permutation(pages) if is_scattered else np.arange(pages)).astype(np.int32)
        per = pages // batch
        views = []
        for index in range(batch):
            own = order[index * per : (index + 1) * per]
            slots = (
                (own[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS, dtype=np.int32))
                .reshape(-1)[:context]
                .astype(np.int32)
            )
            group = TileGroup.of(tier, 0, slots, np.arange(context, dtype=np.int32))
            views.append(SequenceView((group,), index * queries, queries, context - queries))
        query = torch.randn(batch * queries, HEADS, DIM).bfloat16()
        return Case(storage, Batch(tuple(views)), query, pages * plans[tier].page_bytes)

    def run(self) -> None:
        for layer in range(LAYERS):
            cpu.attend(self.query, self.storage.layers[layer], self.batch, ATTENTION)


def fill(storage: KVStorage, tier: Tier, pages: int) -> None:
    """Random keys and values in every slot: one block of pages, stored as the tier stores it, then copied."""
    block = min(pages, 64)
    slots = np.arange(block * PAGE_TOKENS, dtype=np.int32)
    for layer in range(LAYERS):
        key, value = (torch.randn(KV_HEADS, len(slots), DIM).bfloat16() for _ in range(2))
        storage.write(layer, slots, key, value)
    if tier != EXACT:
        storage.settle(EXACT, slots, tier, slots)
    for kv in storage.layers:
        blocks = kv.arenas[tier]
        for start in range(block, pages, block):
            count = min(block, pages - start)
            blocks[start : start + count] = blocks[:count]


def torch_decode(context: int, batch: int) -> tuple[Callable[[], None], int]:
    """Torch's attention over contiguous KV of the same size, heads grouped."""
    layers = min(LAYERS, max(2, 3 * 10**9 // (context * batch * KV_HEADS * DIM * 4)))
    kv = [torch.randn(2, batch, KV_HEADS, context, DIM).bfloat16() for _ in range(layers)]
    query = torch.randn(batch, HEADS, 1, DIM).bfloat16()

    def run() -> None:
        for key, value in kv:
            torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return run, layers


def torch_prefill(context: int, queries: int) -> Callable[[], None]:
    """Torch's flash kernel, as well as it can: the past without a mask, the new tokens causal, both of one layer."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    query = torch.randn(1, HEADS, queries, DIM).bfloat16()
    key, value = (torch.randn(1, KV_HEADS, context, DIM).bfloat16() for _ in range(2))
    past = context - queries

    def run() -> None:
        flash(query, key[:, :, :past], value[:, :, :past], 0.0, False, scale=DIM**-0.5)
        flash(query, key[:, :, past:], value[:, :, past:], 0.0, True, scale=DIM**-0.5)

    return run


def median_ratio(over: list[float], under: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def decode(context: int, batch: int, rounds: int, cached: int) -> dict[str, object]:
    """All tiers and torch in rounds; times are of one layer."""
    cases = {name: Case.of(tier, context, batch) for name, tier in TIERS.items()}
    peer, peer_layers = torch_decode(context, batch)
    times: dict[str, list[float]] = {name: [] for name in (*cases, "torch", "read")}
    for _ in range(rounds):
        times["read"].append(1 / bandwidth(max(2**28, min(cases["exact"].num_bytes, 2**30))))
        for name, case in cases.items():
            times[name].append(seconds(case.run, at_least=0.1) / LAYERS)
        times["torch"].append(seconds(peer, at_least=0.1) / peer_layers)
    row: dict[str, object] = {"context": context, "batch": batch}
    for name, case in cases.items():
        layer_bytes = case.num_bytes / LAYERS
        row[name] = {
            "bytes": layer_bytes,
            "us": statistics.median(times[name]) * 1e6,
            "of_bandwidth": statistics.median(
                layer_bytes * r / t for r, t in zip(times["read"], times[name], strict=True)
            ),
            "faster_than_exact": median_ratio(times["exact"], times[name]),
            "faster_than_torch": median_ratio(times["torch"], times[name]),
            "fits_cache": case.num_bytes < cached,
        }
    parts = []
    for name in cases:
        each = row[name]
        assert isinstance(each, dict)
        parts.append(
            f"{name} {each['us']:8.0f} us{'c' if each['fits_cache'] else ' '} {each['of_bandwidth']:4.0%} of read, "
            f"{each['faster_than_exact']:.2f}x exact, {each['faster_than_torch']:.1f}x torch"
        )
    print(f"decode {context:6,} x {batch}: " + " | ".join(parts), flush=True)
    return row


def prefill(context: int, queries: int, rounds: int) -> dict[str, object]:
    cases = {name: Case.of(tier, context, 1, queries=queries) for name, tier in TIERS.items()}
    peer = torch_prefill(context, queries)
    times: dict[str, list[float]] = {name: [] for name in (*cases, "torch")}

    def one_layer(case: Case) -> Callable[[], object]:
        return lambda: cpu.attend(case.query, case.storage.layers[0], case.batch, ATTENTION)

    for _ in range(rounds):
        for name, case in cases.items():
            times[name].append(seconds(one_layer(case), at_least=0.1))
        times["torch"].append(seconds(peer, at_least=0.1))
    faster = {name: median_ratio(times["torch"], times[name]) for name in cases}
    said = ", ".join(f"{name} {ratio:.2f}x torch" for name, ratio in faster.items())
    print(
        f"prefill {queries:5,} of {context:6,}: torch {statistics.median(times['torch']) * 1e3:.1f} ms; {said}",
        flush=True,
    )
    return {"context": context, "queries": queries, "faster_than_torch": faster}


def scattered(context: int, rounds: int) -> dict[str, object]:
    """Equal content in pages one behind the other and in pages at random."""
    result: dict[str, object] = {"context": context}
    for name, tier in TIERS.items():
        inline, random = (Case.of(tier, context, 1, is_scattered=is_so) for is_so in (False, True))
        pairs = [(seconds(inline.run), seconds(random.run)) for _ in range(rounds)]
        result[name] = statistics.median(b / a for a, b in pairs)
        print(f"scattered pages, {context:,} tokens, {name}: {result[name]:.3f} of the time in order", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="small sizes, once: does it run?")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if "cpu" not in BODIES:
        raise SystemExit("the C++ kernels are not built; install a C++ compiler and run: make install")
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    rounds = 1 if arguments.quick else 5
    contexts = (256, 1024) if arguments.quick else (1024, 8192, 32768)
    cached = cache_bytes()
    read = bandwidth(2**24 if arguments.quick else 2**30)
    print(
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} threads, "
        f"body {cpu.isas()[-1]}, reads {read / 1e9:.1f} GB/s, last-level cache {cached / 2**20:.0f} MiB"
    )
    rows = [decode(context, batch, rounds, cached) for context in contexts for batch in (1, 8)]
    prompts = ((512, 64),) if arguments.quick else ((2048, 512), (8192, 512), (8192, 2048), (16384, 2048))
    fills = [prefill(context, queries, rounds) for context, queries in prompts]
    pages = scattered(contexts[-1], rounds)
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        found = {"read_bytes_per_s": read, "threads": torch.get_num_threads(), "isa": cpu.isas()[-1]}
        arguments.json.write_text(json.dumps(found | {"decode": rows, "prefill": fills, "scattered": pages}, indent=1))


if __name__ == "__main__":
    main()
