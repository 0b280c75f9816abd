"""The plots of an evaluation, by matplotlib: the same figures as SVG in the page and as PNG beside it.

Axes and text are of a grey that reads on light and on dark, and there is no background.
"""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

COLOURS = ("#7f8894", "#2f7fd0", "#c8691c", "#12916f", "#a05ba6", "#b8962b", "#c24f5b", "#4a9aa8", "#7a6fd0", "#6f8f3a")
_GREY = "#7f8894"
_LOSSES = {
    "nll": "NLL of replies, change",
    "kl": "KL to full, nats a token",
    "recall_ll": "recall, log-likelihood lost",
    "gold_ll": "gold calls, log-likelihood lost",
}


def pareto_figure(summary: Mapping[str, Any], subjects: Sequence[str]) -> Figure:
    """KV ratio against each loss that was measured, a panel each; lower left is better."""
    known = [
        (protocol, metric)
        for protocol, of_subject in summary.items()
        for metric in _LOSSES
        if any(metric in found and found[metric]["change"] is not None for found in of_subject.values())
    ]
    columns = min(3, max(1, len(known)))
    rows = max(1, -(-len(known) // columns))
    figure = Figure(figsize=(4.2 * columns, 3.3 * rows), layout="constrained")
    for index, (protocol, metric) in enumerate(known):
        axes = figure.add_subplot(rows, columns, index + 1)
        _plain(axes, f"{protocol}: {_LOSSES[metric]}", "KV, of full’s")
        for place, name in enumerate(subjects):
            found = summary[protocol].get(name, {})
            if metric in found and "kv_ratio" in found and found[metric]["change"] is not None:
                _point(axes, found["kv_ratio"]["value"], found[metric], COLOURS[place % len(COLOURS)], name)
        axes.set_xlim(0, 1.12)
        axes.margins(y=0.18)
    return figure


def _point(axes: Axes, ratio: float, found: Mapping[str, Any], colour: str, name: str) -> None:
    sign = -1 if found["unit"] == "nats" and found["value"] < 0 else 1  # a log-likelihood lost is a loss
    low, high = sorted((sign * found["low"], sign * found["high"]))
    change = sign * found["change"]
    bar = [[max(0.0, change - low)], [max(0.0, high - change)]]
    axes.errorbar([ratio], [change], yerr=bar, fmt="o", color=colour, markersize=6, elinewidth=1, capsize=2)
    axes.annotate(name, (ratio, change), xytext=(6, 5), textcoords="offset points", fontsize=8, color=colour)


def curves_figure(items: Sequence[Mapping[str, Any]], subjects: Sequence[str]) -> Figure | None:
    """Online: the loss by drops so far and by turn, and KV by turn, means over sessions; None if nothing was."""
    rows: list[tuple[str, Mapping[str, Any]]] = [
        (name, request)
        for item in items
        for name, found in item["subjects"].items()
        for request in found.get("requests", ())
    ]
    if not rows:
        return None
    figure = Figure(figsize=(12.6, 3.6), layout="constrained")
    panels = (
        ("num_drops", "loss by drop batches so far, nats a token", "drop batches so far"),
        ("turn", "loss by turn, nats a token", "turn"),
        ("kv", "KV held by turn, MB", "turn"),
    )
    for index, (by, title, label) in enumerate(panels):
        axes = figure.add_subplot(1, 3, index + 1)
        _plain(axes, title, label)
        for place, name in enumerate(subjects):
            points = _means([request for subject, request in rows if subject == name], by)
            if points and not (by != "kv" and place == 0):
                xs, ys = zip(*points, strict=True)
                axes.plot(xs, ys, "o-", color=COLOURS[place % len(COLOURS)], markersize=3, linewidth=1.4, label=name)
    figure.axes[-1].legend(fontsize=8, frameon=False, labelcolor=_GREY)
    return figure


def _means(requests: Sequence[Mapping[str, Any]], by: str) -> list[tuple[float, float]]:
    """(x, mean) in order; losses are weighted by tokens, turns grouped by fours so that the line is readable."""
    sums: dict[float, list[float]] = {}
    for request in requests:
        x = request["num_drops"] if by == "num_drops" else request["turn"] // 4 * 4
        weight = 1 if by == "kv" else request["tokens"]
        value = request["kv_bytes"] / 1e6 if by == "kv" else request["nll"] - request["full_nll"]
        pair = sums.setdefault(x, [0.0, 0.0])
        pair[0] += value * weight
        pair[1] += weight
    return [(x, over / under) for x, (over, under) in sorted(sums.items()) if under]


def _plain(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", color=_GREY)
    axes.set_xlabel(label, fontsize=9, color=_GREY)
    axes.tick_params(colors=_GREY, labelsize=8)
    axes.grid(color=_GREY, alpha=0.25, linewidth=0.6)
    axes.axhline(0, color=_GREY, linewidth=0.8)
    axes.patch.set_alpha(0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(_GREY)


def svg_text(figure: Figure) -> str:
    """The figure as an SVG element."""
    figure.patch.set_alpha(0)
    written = io.StringIO()
    FigureCanvasSVG(figure).print_svg(written, metadata={"Date": None})
    text = written.getvalue()
    return text[text.index("<svg") :]


def write_png(figure: Figure, path: Path) -> None:
    """The figure as a picture on white."""
    figure.patch.set_alpha(1)
    figure.patch.set_facecolor("white")
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": "turnkv"})
