"""Figures in README and docs, written from the result files and checked against them.

    .venv/bin/python benchmarks/documents.py [--check] [--demo out]

Between `<!-- figures: NAME -->` and `<!-- end -->` stands what the function NAME here makes of benchmarks/results;
docs/claims.md is made as a whole (claims.py). `--check` writes nothing and fails where text and files disagree;
`--demo` takes the figures of a `make demo` from its folder first.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import claims
from turnkv.evaluate.comparison import compare
from turnkv.evaluate.results import ReplayResult

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
FILES = ("README.md", "docs/policies.md", "docs/architecture.md")
BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def read(name: str) -> Any:
    """What was measured under this name; None if nothing was."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def demo(found: Any) -> str:
    lines = [
        "| policy | peak KV | first token, last quarter | NLL of the recorded replies |",
        "| --- | ---: | ---: | ---: |",
    ]
    said = {"full": "keeps every turn", "balanced": "keeps 8 to 12 closed turns, settled"}
    for name, each in found.items():
        share = each["peak_kv_bytes"] / found["full"]["peak_kv_bytes"]
        ratio = "" if name == "full" else f" ({share:.2f}×)"
        lines.append(
            f"| `{name}` {said[name]} | {each['peak_kv_bytes'] / 1e6:.0f} MB{ratio} | "
            f"{each['late_ttft_s'] * 1000:.0f} ms | {each['nll']:.3f} |"
        )
    return "\n".join(lines)


def speed(found: Any) -> str:
    rows = found["rows"]

    def over(kind: str, name: str) -> str:
        ratios = [
            (row["tokens"], row["ours_over"][name])
            for row in rows
            if row["kind"] == kind and row.get("streams", 1) == 1
        ]
        return ", ".join(f"{ratio:.2f} at {round(tokens, -2):,}" for tokens, ratio in ratios)

    lines = ["| time over that of | prefill, by prompt tokens | decode, by context |", "| --- | --- | --- |"]
    for name, said in (("vLLM", "vLLM's CPU build, compiled"), ("transformers", "transformers' `generate`")):
        lines.append(f"| {said} | {over('prefill', name)} | {over('decode', name)} |")
    return "\n".join(lines)


METRICS = {
    "kv_ratio": "KV, of `full`'s",
    "nll": "NLL of replies",
    "nll_tool_call": "… of call tokens",
    "nll_number": "… of number tokens",
    "nll_code": "… of code tokens",
    "kl": "KL to `full`, nats",
    "top1": "same likeliest token",
    "ttft_s": "first token",
    "ttft_after_drop_s": "first token after a drop",
    "gold_ll": "gold calls, log-likelihood",
    "gold_first": "gold call first among 16",
    "gold_exact": "gold call generated",
    "recall_ll": "recall, log-likelihood",
    "recall_ll_dropped": "… where evidence was dropped",
    "recall_first": "right answer first among 16",
    "arithmetic_ll": "sums over tool results",
    "secret_gain": "a told secret's gain",
    "text_nll_en": "NLL of text, English",
    "text_nll_zh": "NLL of text, Chinese",
}


def cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "–"
    unit, value = found["unit"], found["value"]
    if unit == "s":
        return f"{value * 1000:,.0f} ms"
    if unit == "ratio":
        return f"{value:.3f}"
    if found["change"] is None or unit in ("bytes", "tokens"):
        return f"{value:,.3g}"
    form = "+.1%" if unit in ("share", "relative") else "+.3f"
    shown = f"{value:.1%}" if unit == "share" else f"{value:.3f}"
    interval = f"{found['change']:{form}} [{found['low']:{form}}, {found['high']:{form}}]".replace("+0.0%", "0.0%")
    return f"{shown}, {interval}" if found["change"] or found["low"] or found["high"] else shown


def table(evaluation: Mapping[str, Any], protocol: str, metrics: Mapping[str, str]) -> str:
    subjects = evaluation["summary"][protocol]
    names = [name for name in subjects if name != evaluation["reference"]]
    known = [metric for metric in metrics if any(metric in subjects[name] for name in names)]
    lines = [f"| `{protocol}` | " + " | ".join(metrics[metric] for metric in known) + " |"]
    lines.append("| --- |" + " ---: |" * len(known))
    for name in [evaluation["reference"], *names]:
        lines.append(f"| {name} | " + " | ".join(cell(subjects[name].get(metric)) for metric in known) + " |")
    return "\n".join(lines)


def transposed(evaluation: Mapping[str, Any], protocol: str) -> str:
    subjects = evaluation["summary"][protocol]
    known = [metric for metric in METRICS if any(metric in found for found in subjects.values())]
    lines = [f"| `{protocol}` | " + " | ".join(subjects) + " |", "| --- |" + " ---: |" * len(subjects)]
    for metric in known:
        lines.append(
            f"| {METRICS[metric]} | " + " | ".join(cell(each.get(metric)) for each in subjects.values()) + " |"
        )
    return "\n".join(lines)


def setting(evaluation: Mapping[str, Any]) -> str:
    kinds: dict[str, int] = {}
    for item in evaluation["items"]:
        if item["subjects"]:
            name = f"{item['kind']} ({item['protocol']})"
            kinds[name] = kinds.get(name, 0) + 1
    counted = ", ".join(f"{count} {name}" for name, count in kinds.items())
    versions = ", ".join(f"{name} {version}" for name, version in evaluation["versions"].items())
    said = evaluation["settings"]
    return f"{evaluation['model']}, {said['dtype']}, {said['threads']} threads, {versions}, {said['date']}: {counted}."


def policies(found: Any) -> str:
    return "\n\n".join([setting(found), *(transposed(found, protocol) for protocol in found["summary"])])


def tuning(found: Any) -> str:
    chosen = {
        name: METRICS[name] for name in ("kv_ratio", "nll", "nll_number", "nll_tool_call", "kl", "ttft_after_drop_s")
    }
    return "\n\n".join([setting(found), *(table(found, protocol, chosen) for protocol in found["summary"])])


def caches(found: Any) -> str:
    chosen = {name: METRICS[name] for name in ("kv_ratio", "nll", "kl", "top1", "gold_ll", "recall_ll")}
    return "\n\n".join([setting(found), table(found, "oneshot", chosen)])


BLOCKS: dict[str, tuple[Callable[[Any], str], str]] = {
    "demo": (demo, "demo"),
    "speed": (speed, "engine"),
    "policies": (policies, "eval"),
    "tuning": (tuning, "tuning"),
    "caches": (caches, "caches"),
}
"""What makes each block, and the file that it reads."""


def keep_demo(folder: Path) -> None:
    """What the README says of a demo, out of its results."""
    results = [ReplayResult.read_json(folder / f"{name}.json") for name in ("full", "balanced")]
    [session_id] = {session.id for result in results for session in result.sessions}
    comparison = compare(results, session_id)
    found = {run.policy: asdict(comparison.shared_figures(run)) for run in comparison.runs}
    (RESULTS / "demo.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def filled(text: str) -> str:
    """The text with what the files say in its blocks; one whose file is missing says so."""

    def fill(match: re.Match[str]) -> str:
        make, source = BLOCKS[match[2]]
        said = make(found) if (found := read(source)) is not None else f"*Not measured yet: there is no {source}.json.*"
        return f"{match[1]}{said}\n{match[3]}"

    return BLOCK.sub(fill, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--demo", type=Path)
    arguments = parser.parse_args()
    if arguments.demo is not None:
        keep_demo(arguments.demo)
    wanted = {ROOT / name: filled((ROOT / name).read_text("utf-8")) for name in FILES}
    wanted[ROOT / "docs/claims.md"] = claims.page(RESULTS)
    stale = [path for path, text in wanted.items() if path.read_text("utf-8") != text]
    for path in stale:
        name = path.relative_to(ROOT)
        if arguments.check:
            print(f"{name}: figures differ from benchmarks/results; run benchmarks/documents.py", file=sys.stderr)
        else:
            path.write_text(wanted[path], "utf-8")
            print(f"written: {name}")
    sys.exit(bool(stale) and arguments.check)


if __name__ == "__main__":
    main()
