"""A replay's results in the terminal: a table of some requests, and the answer to one claim."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from turnkv.evaluate.comparison import Comparison, Run, compare
from turnkv.evaluate.quantities import (
    MISSING,
    bytes_text,
    count_text,
    difference_text,
    ms_text,
    nll_text,
    ratio_text,
    seconds_text,
)
from turnkv.evaluate.results import ReplayResult

_ROWS = 12
"""Requests shown, about."""

_DROP_ROWS = 16
"""Requests at which turns were dropped, shown at most; where there are more, some evenly apart."""

_NAME_CHARS = 8
"""Room for a policy's name above its columns."""


def comparison_table(results: Sequence[ReplayResult], session_id: str) -> Table:
    """About a dozen requests of one session, the policies side by side, with totals and ratios to the first policy.

    The first request, the last, those that failed and up to 16 at which turns were dropped are among them.
    `full` and `window` fit into 80 columns, long names and two policies that drop into 92.

    Raises:
        TurnKVError: no result has a session of this id.
    """
    comparison = compare(results, session_id)
    table = Table(
        title=Text(f"Session {session_id}", style="bold"),
        title_justify="left",
        caption=_caption(comparison),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_footer=True,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    reference = comparison.runs[0].policy
    ratios = f"vs {reference}" if len(reference) < _NAME_CHARS else "ratio"
    table.add_column(Text("\nTurn"), Text(f"all\n{ratios}"), no_wrap=True)
    table.add_column("\nKind", no_wrap=True)
    for run in comparison.runs:
        _add_columns(table, comparison, run)
    for i in sampled_requests(comparison):
        turn, kind = _turn_and_kind(comparison, i)
        cells = [cell for run in comparison.runs for cell in _cells(run, i)]
        table.add_row(Text(str(turn)), Text(kind), *cells)
    return table


def claim_line(
    full: ReplayResult,
    window: ReplayResult,
    *,
    session_id: str,
    window_turns: int = 8,
    fixed_kv_bytes: int | None = None,
) -> str:
    """Whether a window of `window_turns` turns halves the KV memory of this session, with the ratio of the peaks.

    `fixed_kv_bytes`: KV bytes of what no policy may drop (system text, tool schemas, pinned turns). Where it is
    given, the line also states the ratio of what may be dropped.

    Raises:
        TurnKVError: neither result has a session of this id.
    """
    question = f"Does a window of {window_turns} turns halve the KV memory of {session_id}?"
    comparison = compare([full, window], session_id)
    if len(comparison.runs) < 2 or not comparison.num_shared:
        return f"{question} Unknown: no request was answered under both policies."
    before, after = (comparison.shared_figures(run).peak_kv_bytes for run in comparison.runs)
    if not before:
        return f"{question} Unknown: {comparison.runs[0].policy} held no KV."
    verdict = "Yes" if after * 2 <= before else "No"
    line = f"{question} {verdict}: its peak is {after / before:.2f} of {comparison.runs[0].policy}'s "
    line += f"({bytes_text(after)} of {bytes_text(before)})"
    if fixed_kv_bytes is not None and fixed_kv_bytes < before:
        droppable = (after - fixed_kv_bytes) / (before - fixed_kv_bytes)
        line += f", and {droppable:.2f} without the {bytes_text(fixed_kv_bytes)} that may not be dropped"
    if comparison.num_shared < comparison.num_requests:
        line += f", over the {comparison.num_shared} requests that both answered"
    return f"{line}."


def sampled_requests(comparison: Comparison) -> list[int]:
    """Positions of about a dozen requests to show, in order."""
    last = comparison.num_requests - 1
    if last < 0:
        return []
    failed = {len(run.session.turns) for run in comparison.runs if run.error_turn is not None}
    dropped = {
        i for run in comparison.runs for i, request in enumerate(run.session.turns) if request.dropped_turns
    } - failed
    chosen = {0, last} | failed | set(_spread(sorted(dropped), _DROP_ROWS))
    others = [i for i in range(last + 1) if i not in chosen]
    return sorted(chosen | set(_spread(others, _ROWS - len(chosen))))


def _spread(positions: Sequence[int], count: int) -> Iterator[int]:
    """At most `count` of `positions`, evenly apart."""
    count = min(max(count, 0), len(positions))
    return (positions[(2 * i + 1) * len(positions) // (2 * count)] for i in range(count))


def _add_columns(table: Table, comparison: Comparison, run: Run) -> None:
    requests = run.session.turns
    reference, shared = (comparison.shared_figures(each) for each in (comparison.runs[0], run))
    difference = None if shared.nll is None or reference.nll is None else shared.nll - reference.nll
    whole = shared.of(requests)
    columns = (
        ("KV MB", _megabytes(whole.peak_kv_bytes), ratio_text(shared.peak_kv_bytes, reference.peak_kv_bytes)),
        ("TTFT", seconds_text(whole.ttft_s), ratio_text(shared.ttft_s, reference.ttft_s)),
        ("new", count_text(whole.computed_tokens), ratio_text(shared.computed_tokens, reference.computed_tokens)),
        ("NLL", nll_text(whole.nll), difference_text(difference)),
    )
    group = _cut(run.policy)
    for name, total, ratio in columns:
        table.add_column(Text(f"{group}\n{name}"), Text(f"{total}\n{ratio}"), justify="right", no_wrap=True)
        group = ""
    if run.has_drops:
        num_dropped = sum(len(request.dropped_turns) for request in requests)
        table.add_column(Text("\ndrop"), Text(f"{num_dropped}"), justify="right", no_wrap=True)


def _cells(run: Run, i: int) -> Iterator[Text]:
    requests = run.session.turns
    if i < len(requests):
        request = requests[i]
        yield Text(_megabytes(request.kv_bytes))
        yield Text(ms_text(request.ttft_s))
        yield Text(count_text(request.computed_tokens))
        yield Text(nll_text(request.nll))
        if run.has_drops:
            yield Text(str(len(request.dropped_turns) or ""))
        return
    yield Text("error", style="red") if run.error_turn is not None and i == len(requests) else Text(MISSING)
    for _ in range(4 if run.has_drops else 3):
        yield Text(MISSING)


def _turn_and_kind(comparison: Comparison, i: int) -> tuple[int, str]:
    for run in comparison.runs:
        if i < len(run.session.turns):
            return run.session.turns[i].turn, run.session.turns[i].kind.value
    return next(run.error_turn for run in comparison.runs if run.error_turn is not None), MISSING


def _caption(comparison: Comparison) -> Text:
    lines = [
        f"{len(sampled_requests(comparison))} of {comparison.num_requests} requests. "
        "TTFT: milliseconds to the first token; new: tokens computed. Last two lines: highest KV, sums, NLL"
        + (", drop: turns dropped." if any(run.has_drops for run in comparison.runs) else "."),
    ]
    if comparison.num_shared < comparison.num_requests:
        lines.append(f"Ratios are over the {comparison.num_shared} requests that every policy answered.")
    lines += [
        f"{run.policy} stopped at turn {run.error_turn}: {run.session.error}"
        for run in comparison.runs
        if run.error_turn is not None
    ]
    return Text("\n".join(lines), style="dim")


def _megabytes(num_bytes: int) -> str:
    """Three digits that matter, without the unit."""
    megabytes = num_bytes / 1e6
    if megabytes >= 100:
        return f"{megabytes:.0f}"
    return f"{megabytes:.1f}" if megabytes >= 1 else f"{megabytes:.3g}"


def _cut(name: str) -> str:
    return name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 1]}…"
