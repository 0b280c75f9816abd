"""The report: one HTML page that holds all it needs, so that it can be read offline and sent as a file."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2
from plotly.offline import get_plotlyjs

from turnkv.errors import TurnKVError
from turnkv.evaluate import figures, quantities
from turnkv.evaluate.comparison import Comparison, PolicyFigures, Run, compare, policy_names, session_ids
from turnkv.evaluate.results import ReplayResult, write_atomically


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPair:
    """One question about a session, and what was answered to it."""

    question: str
    recorded: str
    """The answer that the session recorded."""

    answers: Mapping[str, str]
    """The text each policy's run generated, by the policy's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One headline figure: what the compared policy comes to, and the figure of each policy below it."""

    label: str
    headline: str
    note: str
    rows: tuple[tuple[int, str, str], ...]
    """(colour, policy, figure)."""


def write_report(
    path: Path, results: Sequence[ReplayResult], *, title: str, answers: Sequence[AnswerPair] = ()
) -> None:
    """Write the results as one self-contained HTML page, whole or not at all; the first result is the reference.

    Raises:
        TurnKVError: there are no results, or the file cannot be written. What was at `path` is still there.
    """
    if not results:
        raise TurnKVError("a report needs at least one result; replay a session first")
    write_atomically(path, _page(results, title=title, answers=answers))


def _page(results: Sequence[ReplayResult], *, title: str, answers: Sequence[AnswerPair]) -> str:
    # Undefined names are errors, and everything that is put in is escaped unless marked safe.
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(
        resources.files("turnkv.evaluate").joinpath("report.html.jinja").read_text(encoding="utf-8")
    )
    comparisons = [compare(results, session_id) for session_id in session_ids(results)]
    names = policy_names(results)
    return template.render(
        title=title,
        models=list(dict.fromkeys(result.model for result in results)),
        policies=list(enumerate(names)),
        sessions=[_session(comparison) for comparison in comparisons],
        plots=[_plots(comparison) for comparison in comparisons],
        answers=answers,
        settings=list(_settings(results)),
        num_colours=figures.NUM_COLOURS,
        plotly_js=get_plotlyjs(),
    )


def _session(comparison: Comparison) -> dict[str, object]:
    """What the template shows of one session, apart from its plots."""
    return {
        "id": comparison.session_id,
        "num_requests": comparison.num_requests,
        "num_shared": comparison.num_shared,
        "errors": [run for run in comparison.runs if run.error_turn is not None],
        "cards": _cards(comparison) if comparison.num_shared else (),
        "runs": comparison.runs,
        "rows": list(_rows(comparison)),
    }


def _plots(comparison: Comparison) -> dict[str, object]:
    """Plotly's own JSON of each figure, by the name that the template knows it by."""
    if not comparison.num_requests:
        return {}
    made = {
        "kv": figures.kv_figure(comparison),
        "ttft": figures.ttft_figure(comparison),
        "nll": figures.nll_figure(comparison),
        "tokens": figures.tokens_figure(comparison),
    }
    return {name: json.loads(figure.to_json()) for name, figure in made.items() if figure is not None}


def _cards(comparison: Comparison) -> tuple[Card, ...]:
    """Headlines compare the last policy with the first; a single policy's stand for themselves."""
    each = [(run, comparison.shared_figures(run)) for run in comparison.runs]
    (reference_run, reference), (_, last) = each[0], each[-1]
    is_alone = len(each) == 1

    def rows(text: Callable[[PolicyFigures], str]) -> tuple[tuple[int, str, str], ...]:
        return () if is_alone else tuple((run.colour, run.policy, text(shown)) for run, shown in each)

    def peak(shown: PolicyFigures) -> str:
        return quantities.bytes_text(shown.peak_kv_bytes)

    def late(shown: PolicyFigures) -> str:
        return quantities.seconds_text(shown.late_ttft_s)

    def computed(shown: PolicyFigures) -> str:
        return quantities.count_text(shown.computed_tokens)

    def nll(shown: PolicyFigures) -> str:
        return quantities.nll_text(shown.nll)

    difference = None if last.nll is None or reference.nll is None else last.nll - reference.nll
    of = f"of {reference_run.policy}’s"
    return (
        Card(
            label="Peak KV memory",
            headline=peak(last) if is_alone else quantities.ratio_text(last.peak_kv_bytes, reference.peak_kv_bytes),
            note="highest in the session" if is_alone else of,
            rows=rows(peak),
        ),
        Card(
            label="First token, late",
            headline=late(last),
            note="median of the last quarter",
            rows=rows(late),
        ),
        Card(
            label="Tokens computed",
            headline=computed(last),
            note="of all prompts"
            if is_alone
            else f"{quantities.ratio_text(last.computed_tokens, reference.computed_tokens)} {of}",
            rows=rows(computed),
        ),
        Card(
            label="NLL" if is_alone else "NLL difference",
            headline=nll(last) if is_alone else quantities.difference_text(difference),
            note="nats per token" if difference is not None else "nothing was scored",
            rows=rows(nll) if difference is not None else (),
        ),
    )


def _rows(comparison: Comparison) -> Iterator[dict[str, object]]:
    """The table's rows: a request, under every policy."""
    for i in range(comparison.num_requests):
        here = [run.session.turns[i] if i < len(run.session.turns) else None for run in comparison.runs]
        known = next((request for request in here if request is not None), None)
        failed = next((run.error_turn for run in comparison.runs if len(run.session.turns) == i), None)
        yield {
            "turn": failed if known is None else known.turn,
            "kind": quantities.MISSING if known is None else known.kind.value,
            "cells": [_row_cells(run, i) for run in comparison.runs],
        }


def _row_cells(run: Run, i: int) -> list[str]:
    requests = run.session.turns
    if i >= len(requests):
        has_failed = run.error_turn is not None and i == len(requests)
        return ["error" if has_failed else quantities.MISSING] + [quantities.MISSING] * (4 if run.has_drops else 3)
    request = requests[i]
    cells = [
        quantities.bytes_text(request.kv_bytes),
        quantities.ms_text(request.ttft_s),
        quantities.count_text(request.computed_tokens),
        quantities.nll_text(request.nll),
    ]
    return [*cells, quantities.ranges_text(request.dropped_turns)] if run.has_drops else cells


def _settings(results: Sequence[ReplayResult]) -> Iterator[tuple[str, list[str]]]:
    """(name, value under each policy), one value alone where all agree."""
    flat = [
        {"model": result.model, "mode": result.mode}
        | dict(_flattened(result.settings))
        | {f"{name} version": version for name, version in result.versions.items()}
        | {"wall time": f"{result.wall_s:,.1f} s"}
        for result in results
    ]
    for name in dict.fromkeys(name for settings in flat for name in settings):
        values = [settings.get(name, quantities.MISSING) for settings in flat]
        yield name, values[:1] if len(set(values)) == 1 else values


def _flattened(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings under dotted names."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
