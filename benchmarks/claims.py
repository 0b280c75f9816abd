"""The claims of the interview answer that this project implements, each with what was measured here: docs/claims.md.

documents.py writes the page. Sizes are computed here. Speed and fidelity are read from the results folder, where the
commands named beside them write with `--json` (`settled.json` is `precision.py --dry`'s); a claim whose file is missing
says so, and claims about parts that are still to come are marked *pending*.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from turnkv.cache import LayerShape, TierPlan
from turnkv.types import EXACT, Tier

CONTEXT = 128 * 1024


@dataclass(frozen=True)
class Model:
    """Published sizes: parameters, layers, key-value heads and head dim."""

    name: str
    parameters: float
    layers: int
    kv_heads: int
    dim: int

    @property
    def kv_share(self) -> float:
        """Share of the KV in weights and KV together, bf16, one conversation of 128K tokens."""
        kv = 2 * self.layers * self.kv_heads * self.dim * 2 * CONTEXT
        return kv / (kv + 2 * self.parameters)


MODELS = (
    Model("Llama-2-7B", 6.74e9, 32, 32, 128),
    Model("Llama-3.1-8B", 8.03e9, 32, 8, 128),
    Model("Qwen3-8B", 8.19e9, 36, 8, 128),
    Model("Llama-3.1-70B", 70.6e9, 80, 8, 128),
)


def sizes() -> str:
    shapes = [LayerShape(num_heads=8, key_dim=128, value_dim=128)]
    exact = TierPlan.of(EXACT, shapes, torch.bfloat16).page_bytes
    return ", ".join(
        f"{name} {TierPlan.of(Tier(name, name), shapes, torch.bfloat16).page_bytes / exact:.3f}"
        for name in ("int8", "fp8", "int4")
    )


def measured(say: Callable[[Any], str], path: Path, command: str) -> str:
    """What `say` makes of a result file, or how to make the file."""
    if path.is_file():
        return say(json.loads(path.read_text("utf-8")))
    return f"not measured yet: `{command} --json {path.name}`"


def speed(kernels: Any) -> str:
    return "; ".join(
        f"{row['context']:,} tokens, batch {row['batch']}: int8 {row['int8']['faster_than_exact']:.2f}×, "
        f"int4 {row['int4']['faster_than_exact']:.2f}×"
        for row in kernels["decode"]
    )


def switching(kernels: Any) -> str:
    found = kernels["scattered"]
    parts = ", ".join(f"{name} {found[name]:.3f}" for name in ("exact", "int8", "int4"))
    return f"time with pages at random, of that with pages in order, {found['context']:,} tokens: {parts}"


def fidelity(precision: Any) -> str:
    return "; ".join(
        f"{name}: NLL of number and code tokens {each['fragile_nll_change']:+.2%} ({each['fragile_tokens']:,} tokens), "
        f"of all {each['nll_change']:+.2%}, KL {each['kl']:.5f}"
        for name, each in precision["total"].items()
    )


def settled(dry: Any) -> str:
    return f"settled KV of {len(dry['sessions'])} sessions, of exact: " + ", ".join(
        f"{name} {each['memory']:.2f} ({each['kept_exact']:.0%} of tokens exact)" for name, each in dry["total"].items()
    )


def allocation(found: Any) -> str:
    return f"{found['sessions']} sessions, memory needed for their tokens: " + "; ".join(
        f"{row['at_once']} at once: contiguous {row['contiguous']['room']:.2f}×, paged {row['paged']['room']:.2f}×"
        for row in found["rows"]
    )


def engines(found: Any) -> str:
    said = []
    for row in found["rows"]:
        others = ", ".join(
            f"{name} {ratio:.2f}" for name, ratio in row["ours_over"].items() if name != "turnkv int8 KV"
        )
        streams = f", {row['streams']} streams" if row.get("streams", 1) > 1 else ""
        said.append(f"{row['kind']} {row['tokens']:,} tokens{streams}: {others}")
    return "turnkv's time over each engine's, same machine and prompt: " + "; ".join(said)


def orders(found: Any) -> str:
    online = found["summary"]["online"]
    return "at equal bytes: " + "; ".join(
        f"{said}: KV {online[name]['kv_ratio']['value']:.2f} of full's, NLL {online[name]['nll']['change']:+.1%} "
        f"[{online[name]['nll']['low']:+.1%}, {online[name]['nll']['high']:+.1%}]"
        for name, said in (("results-last", "chat dropped first"), ("results-first", "tool results dropped first"))
    )


def rows(results: Path) -> list[tuple[str, str, str]]:
    kernels, precision = results / "kernels.json", results / "precision.json"
    by_kernels, by_precision = "benchmarks/kernels.py", "benchmarks/precision.py FILE"
    by_allocation = "benchmarks/allocation.py FILE"
    shares = ", ".join(f"{model.name} {model.kv_share:.0%}" for model in MODELS)
    pending = "*pending*"
    return [
        ("INT8 halves KV memory", f"bytes of bf16 with scales, D = 128: {sizes()}", "this command"),
        (
            "INT8 speeds decode by 20–30%",
            f"attention alone, of exact: {measured(speed, kernels, by_kernels)}",
            "`benchmarks/kernels.py`",
        ),
        ("KV is 80% of memory at 128K tokens", f"one conversation, bf16: {shares}", "this command"),
        (
            "quantisation loses 5% on numbers and code, mixed precision 0.5%",
            measured(fidelity, precision, by_precision),
            "`benchmarks/precision.py`",
        ),
        (
            "mixed precision saves memory where numbers, code and tool calls stay exact",
            measured(settled, results / "settled.json", f"{by_precision} --dry"),
            "`benchmarks/precision.py --dry`",
        ),
        ("changing pages costs time", measured(switching, kernels, by_kernels), "`benchmarks/kernels.py`"),
        (
            "a window of 8 turns halves memory",
            "for all KV in 14 of 21 long sessions, for what a window can drop in 19",
            "`benchmarks/memory.py`, docs/policies.md",
        ),
        (
            "contiguous allocation wastes memory by fragmentation",
            measured(allocation, results / "allocation.json", by_allocation),
            "`benchmarks/allocation.py`",
        ),
        ("mixing prefill with decode raises throughput", pending, ""),
        ("a summary of dropped turns keeps answers right", pending, ""),
        ("a memory pool recalls what was dropped", pending, ""),
        ("retrieval results cached beside the KV save time", pending, ""),
        ("shared KV heads for ordinary tokens save memory without loss", pending, ""),
        ("quantisation-aware training recovers the loss", pending, ""),
        (
            "the choice of engine and configuration decides speed",
            measured(engines, results / "engine.json", "benchmarks/engine.py --peers"),
            "`benchmarks/engine.py --peers`",
        ),
        (
            "tool results must outlive chat",
            measured(orders, results / "tuning.json", "turnkv eval"),
            "docs/policies.md",
        ),
    ]


def page(results: Path) -> str:
    lines = [
        "# Claims, and what was measured",
        "",
        "Made by `.venv/bin/python benchmarks/documents.py` from benchmarks/results; figures of speed are of two cores",
        "of an Intel Xeon with AMX.",
        "",
        "| claim | measured | by |",
        "| --- | --- | --- |",
        *(f"| {claim} | {answer} | {source} |" for claim, answer, source in rows(results)),
    ]
    return "\n".join(lines) + "\n"
