"""The report of an evaluation: one HTML page that holds all it needs, and its plots as PNG."""

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from turnkv.evaluate import eval_figures
from turnkv.evaluate.quantities import MISSING
from turnkv.evaluate.results import write_atomically

NUM_SESSIONS = 5
"""Sessions shown as text: those that changed most."""

_HEADLINES = {
    "nll": "NLL of replies",
    "kl": "KL to full",
    "gold_first": "gold call first",
    "recall_first": "answer first",
}


def write_eval_report(path: Path, evaluation: Mapping[str, Any]) -> None:
    """Write an evaluation as one self-contained HTML page, whole or not at all.

    Raises:
        TurnKVError: the file cannot be written. What was at `path` is still there.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(
        resources.files("turnkv.evaluate").joinpath("eval_report.html.jinja").read_text("utf-8")
    )
    subjects = list(evaluation["subjects"])
    colours = {name: eval_figures.COLOURS[i % len(eval_figures.COLOURS)] for i, name in enumerate(subjects)}
    write_atomically(
        path,
        template.render(
            evaluation=evaluation,
            subjects=subjects,
            colours=colours,
            cards=list(_cards(evaluation)),
            plots=[(title, eval_figures.svg_text(figure)) for title, _, figure in _plots(evaluation)],
            tables=list(_tables(evaluation)),
            sessions=_most_changed(evaluation),
            settings=[(name, _said(value)) for name, value in _settings(evaluation)],
            problems=[(item["id"], item["problem"]) for item in evaluation["items"] if item.get("problem")],
        ),
    )


def write_eval_plots(folder: Path, evaluation: Mapping[str, Any]) -> list[Path]:
    """Write the plots as PNG into a folder; gives their paths."""
    written = []
    for _, name, figure in _plots(evaluation):
        eval_figures.write_png(figure, folder / f"{name}.png")
        written.append(folder / f"{name}.png")
    return written


def _plots(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, str, Figure]]:
    if evaluation["summary"]:
        yield "What memory costs", "pareto", eval_figures.pareto_figure(evaluation["summary"], evaluation["subjects"])
    curves = eval_figures.curves_figure(evaluation["items"], evaluation["subjects"])
    if curves is not None:
        yield "Turn by turn, online", "curves", curves


def _cards(evaluation: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """One headline a subject and protocol."""
    for protocol, subjects in evaluation["summary"].items():
        for name, found in subjects.items():
            if name != evaluation["reference"] and "kv_ratio" in found:
                rows = [(label, change(found[metric])) for metric, label in _HEADLINES.items() if metric in found]
                yield {"name": name, "protocol": protocol, "ratio": f"{found['kv_ratio']['value']:.2f}×", "rows": rows}


def _tables(evaluation: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    for protocol, subjects in evaluation["summary"].items():
        metrics = dict.fromkeys(metric for found in subjects.values() for metric in found)
        rows = [
            (metric, [(value(found.get(metric)), change(found.get(metric))) for found in subjects.values()])
            for metric in metrics
        ]
        yield {"protocol": protocol, "subjects": list(subjects), "rows": rows}


def value(found: Mapping[str, Any] | None) -> str:
    """A figure in its unit."""
    if found is None:
        return MISSING
    number = found["value"]
    return {
        "bytes": f"{number / 1e6:.1f} MB",
        "s": f"{number * 1000:,.0f} ms",
        "share": f"{number:.1%}",
        "ratio": f"{number:.3f}×",
    }.get(found["unit"], f"{number:,.4g}")


def change(found: Mapping[str, Any] | None) -> str:
    """Its distance from the reference, with the interval."""
    if found is None or found["change"] is None or found["low"] is None:
        return MISSING
    scale, form = {
        "share": (1.0, "+.1%"),
        "relative": (1.0, "+.2%"),
        "bytes": (1e-6, "+,.1f"),
        "s": (1e3, "+,.0f"),
        "tokens": (1.0, "+,.1f"),
    }.get(found["unit"], (1.0, "+.4f"))
    said, low, high = (f"{found[name] * scale:{form}}" for name in ("change", "low", "high"))
    return f"{said} [{low}, {high}]"


def _most_changed(evaluation: Mapping[str, Any]) -> list[dict[str, object]]:
    """Sessions by how much a subject changed them, with the request at which it differs most."""
    found = []
    for item in evaluation["items"]:
        for name, result in item["subjects"].items():
            requests: Sequence[Mapping[str, Any]] = result.get("requests", ())
            tokens = sum(request["tokens"] for request in requests)
            if name == evaluation["reference"] or not tokens:
                continue
            loss = sum((request["nll"] - request["full_nll"]) * request["tokens"] for request in requests) / tokens
            widest = max(requests, key=lambda request: request["kl"])
            found.append({"id": item["id"], "subject": name, "loss": loss, "request": widest})
    best: dict[str, dict[str, object]] = {}
    for each in sorted(found, key=lambda each: -abs(each["loss"])):
        best.setdefault(each["id"], each)
    return list(best.values())[:NUM_SESSIONS]


def _settings(evaluation: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    yield "model", evaluation["model"]
    yield from evaluation["settings"].items()
    yield from ((f"{name} version", version) for name, version in evaluation["versions"].items())
    yield "wall time", f"{evaluation['wall_s']:,.0f} s"


def _said(value: object) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
