"""The report's plots, as Plotly figures whose colours are names: the page puts in its theme's own.

A colour is written `var(--name)`, which Plotly's checks let pass; the page's script resolves it when it draws.
"""

import html
import itertools
import textwrap
from collections.abc import Callable, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from turnkv.evaluate.comparison import Comparison, Run
from turnkv.evaluate.quantities import byte_unit, ranges_text
from turnkv.evaluate.results import RequestResult, mean_nll

NUM_COLOURS = 4
"""Policies that have a colour of their own; a fifth begins again."""

_DASHES = ("solid", "solid", "dash", "dot")
_GRID, _INK, _MUTED, _SURFACE = "var(--grid)", "var(--ink)", "var(--muted)", "var(--surface)"


def kv_figure(comparison: Comparison) -> go.Figure:
    """KV bytes of the view when each request ended, with a marker wherever turns were dropped."""
    peak = max((request.kv_bytes for run in comparison.runs for request in run.session.turns), default=0)
    unit, size = byte_unit(peak)
    figure = _lines(comparison, lambda request: request.kv_bytes / size, hover=f"%{{y:.2f}} {unit}")
    for run in comparison.runs:
        drops = [request for request in run.session.turns if request.dropped_turns]
        if drops:
            figure.add_scatter(
                x=[request.turn for request in drops],
                y=[request.kv_bytes / size for request in drops],
                mode="markers",
                marker={
                    "symbol": "triangle-down",
                    "size": 9,
                    "color": _colour(run),
                    "line": {"width": 1, "color": _SURFACE},
                },
                name=f"{_name(run)}: turns dropped",
                text=[_wrapped(f"dropped {ranges_text(request.dropped_turns)}") for request in drops],
                hovertemplate="%{text}<extra></extra>",
            )
    return _finished(figure, comparison, unit)


def ttft_figure(comparison: Comparison) -> go.Figure:
    """Milliseconds to the first token of each request."""
    figure = _lines(comparison, lambda request: request.ttft_s * 1e3, hover="%{y:,.0f} ms")
    return _finished(figure, comparison, "ms")


def nll_figure(comparison: Comparison) -> go.Figure | None:
    """NLL of each request as a faint point and of all up to it as a line; None if nothing was scored."""
    figure = go.Figure()
    for run in comparison.runs:
        scored = [(i, request) for i, request in enumerate(run.session.turns) if request.nll is not None]
        turns = [request.turn for _, request in scored]
        if not scored:
            continue
        figure.add_scatter(
            x=turns,
            y=[request.nll for _, request in scored],
            mode="markers",
            marker={"size": 5, "color": _colour(run), "symbol": _symbol(run)},
            opacity=0.38,
            showlegend=False,
            hoverinfo="skip",
        )
        figure.add_scatter(
            x=turns,
            y=_running_means([request for _, request in scored]),
            mode="lines",
            line=_line(run),
            name=_name(run),
            customdata=[request.nll for _, request in scored],
            hovertemplate="%{y:.3f} so far, %{customdata:.3f} here",
        )
    if not figure.data:
        return None
    return _finished(figure, comparison, "nats per token").update_yaxes(rangemode="normal")


def tokens_figure(comparison: Comparison) -> go.Figure:
    """Prompt tokens of each request, by what became of them; one row of bars per policy, on one scale."""
    runs = comparison.runs
    figure = make_subplots(
        rows=len(runs),
        cols=1,
        shared_xaxes=True,
        shared_yaxes="all",
        vertical_spacing=0.36 / (2 * len(runs)),
        subplot_titles=[f"<b>{_name(run)}</b>" for run in runs],
    )
    parts: tuple[tuple[str, str, str, Callable[[RequestResult], int]], ...] = (
        ("computed", "var(--computed)", "", lambda request: request.computed_tokens),
        ("cached", "var(--cached)", "", lambda request: request.cached_tokens),
        ("dropped", "var(--dropped)", "/", lambda request: request.dropped_tokens),
    )
    for (row, run), (name, colour, shape, tokens) in itertools.product(enumerate(runs, start=1), parts):
        pattern = {"shape": shape, "fgcolor": colour, "bgcolor": _SURFACE, "size": 5, "solidity": 0.35}
        figure.add_bar(
            x=[request.turn for request in run.session.turns],
            y=[tokens(request) for request in run.session.turns],
            marker={"color": colour, "line": {"width": 0}, **({"pattern": pattern} if shape else {})},
            name=name,
            legendgroup=name,
            showlegend=row == 1,
            hovertemplate="%{y:,}",
            row=row,
            col=1,
        )
    for title, run in zip(figure.layout.annotations, runs, strict=True):
        title.update(x=0, xanchor="left", font={"size": 13, "color": _colour(run)})
    figure.update_layout(barmode="stack", bargap=0.15)
    figure = _finished(figure, comparison, "")
    figure.update_xaxes(title_text=None)
    figure.update_xaxes(title_text="Turn", row=len(runs))
    # Stated, since Plotly finds no range of its own for axes that match beside a stated range of turns.
    highest = max(
        (sum(tokens(request) for *_, tokens in parts) for run in runs for request in run.session.turns), default=0
    )
    return figure.update_yaxes(nticks=4, tickformat="~s", range=[0, max(highest, 1) * 1.05]).update_layout(margin_t=24)


def _lines(comparison: Comparison, value: Callable[[RequestResult], float], *, hover: str) -> go.Figure:
    """One line per run, with a cross where an error stopped it."""
    figure = go.Figure()
    for run in comparison.runs:
        turns = [request.turn for request in run.session.turns]
        values = [value(request) for request in run.session.turns]
        figure.add_scatter(
            x=turns,
            y=values,
            mode="lines" if len(turns) > 1 else "markers",
            line=_line(run),
            marker={"color": _colour(run), "size": 7},
            name=_name(run),
            hovertemplate=hover,
        )
        if run.error_turn is not None:
            figure.add_scatter(
                x=[run.error_turn],
                y=values[-1:] or [0],
                mode="markers",
                marker={"symbol": "x", "size": 11, "color": _colour(run), "line": {"width": 1.5, "color": _SURFACE}},
                name=f"{_name(run)}: error",
                text=[_wrapped(run.session.error or "")],
                hovertemplate="%{text}<extra></extra>",
            )
    return figure


def _finished(figure: go.Figure, comparison: Comparison, unit: str) -> go.Figure:
    """The common look: no frame, a faint grid, the legend below, and a line at each turn that failed.

    The unit goes to the page (as `layout.meta`), which shows it in the heading and so saves a phone an axis title.
    """
    axis = {"gridcolor": _GRID, "linecolor": _GRID, "zerolinecolor": _GRID, "automargin": True, "title_standoff": 8}
    turns = [request.turn for run in comparison.runs for request in run.session.turns]
    turns += [run.error_turn for run in comparison.runs if run.error_turn is not None]
    figure.update_layout(
        template=go.layout.Template(),
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": _MUTED},
        margin={"l": 8, "r": 8, "t": 10, "b": 8},
        hovermode="x unified",
        hoverlabel={"bgcolor": _SURFACE, "bordercolor": _GRID, "font": {"color": _INK, "size": 13}},
        legend={
            "orientation": "h",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "x": 0,
            "font": {"color": _INK},
        },
        dragmode="zoom",
        meta={"unit": unit},
    )
    figure.update_xaxes(
        range=[min(turns) - 0.8, max(turns) + 0.8],
        showgrid=False,
        zeroline=False,
        title={"text": "Turn", "font": {"size": 13}},
        hoverformat="d",
        spikecolor=_MUTED,
        spikethickness=-2,
        spikedash="solid",
        unifiedhovertitle={"text": "turn %{x}"},
        **axis,
    )
    figure.update_yaxes(rangemode="tozero", fixedrange=True, tickformat=",", **axis)
    for run in comparison.runs:
        if run.error_turn is not None:
            figure.add_vline(x=run.error_turn, line={"width": 1, "dash": "dot", "color": _colour(run)})
    return figure


def _running_means(requests: Sequence[RequestResult]) -> list[float | None]:
    return [mean_nll(requests[: i + 1]) for i in range(len(requests))]


def _name(run: Run) -> str:
    """Escaped, since Plotly reads tags in names."""
    return html.escape(run.policy)


def _wrapped(text: str) -> str:
    return "<br>".join(html.escape(line) for line in textwrap.wrap(text, 48))


def _colour(run: Run) -> str:
    return f"var(--policy-{run.colour % NUM_COLOURS})"


def _symbol(run: Run) -> str:
    return ("circle", "diamond", "square", "cross")[run.colour % NUM_COLOURS]


def _line(run: Run) -> dict[str, object]:
    return {"color": _colour(run), "width": 2, "dash": _DASHES[run.colour % NUM_COLOURS]}
