"""`turnkv eval`: what each policy saves and what it costs, on recorded sessions."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from turnkv.cli.display import error_console, out_console, say
from turnkv.cli.examples import example_files
from turnkv.cli.options import EngineOptions
from turnkv.engine import Engine
from turnkv.errors import InvalidFileError, TurnKVError
from turnkv.evaluate.evaluation import PROTOCOLS, Evaluation, Step, Task, run_tasks, summarise, tasks_of
from turnkv.evaluate.explain import explain
from turnkv.evaluate.generated import arithmetic_items, leakage_items, text_items
from turnkv.evaluate.items import KINDS, Item, Skipped, load_items
from turnkv.evaluate.machine import cpu_name
from turnkv.evaluate.oneshot import Foreign
from turnkv.evaluate.results import write_atomically
from turnkv.evaluate.sessions import read_ids
from turnkv.models import resolve_model
from turnkv.policy import FULL, Policy, load_policy

if TYPE_CHECKING:
    from turnkv.evaluate.foreign import ForeignCache

SEED = 20261201
QUICK_REQUESTS = 12
SECONDS_BETWEEN_LINES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """The command's own options as given."""

    policies: tuple[str, ...]
    caches: tuple[str, ...]
    data: tuple[Path, ...]
    texts: tuple[Path, ...]
    metrics: tuple[str, ...]
    protocols: tuple[str, ...]
    ids: Path | None
    limit: int | None
    max_requests: int | None
    generated: int
    num_answered: int
    skip_bad: bool
    is_quick: bool
    explain: str | None
    json: Path | None
    report: Path | None


def run_eval(options: EngineOptions, wanted: EvalOptions) -> None:
    """Evaluate and print.

    Raises:
        TurnKVError: data cannot be read, an option not be followed, or a file not be written.
    """
    policies = [FULL, *(policy for name in wanted.policies if (policy := load_policy(name)).name != FULL.name)]
    if len({policy.name for policy in policies}) < len(policies):
        raise TurnKVError("--policy: two policies have one name; give each file a name of its own")
    items, skipped = _items(wanted)
    tasks = _tasks(wanted, items)
    item = next((item for item in items if item.id == wanted.explain and item.kind == "session"), None)
    if wanted.explain is not None and item is None:
        raise InvalidFileError(f"--explain: the data hold no session {wanted.explain!r}; check its id")
    base = options.load_engine(say)
    engines = base.sharing(policies)
    if item is not None:
        for part in explain(engines, item, limit=wanted.max_requests):
            out_console().print(part)
        return
    settings = _settings(options, wanted, base, policies)
    answered = [item.id for item in items if item.kind == "toolcall"][: wanted.num_answered]
    foreign = _foreign(options, wanted)
    evaluation = Evaluation(
        engines,
        [Foreign(cache) for cache in foreign],
        max_requests=_max_requests(wanted),
        answered=answered,
    )
    started = datetime.now(UTC)
    try:
        results = _run(evaluation, tasks, wanted, settings)
    finally:
        for cache in foreign:
            cache.close()
    found = {
        "model": base.name,
        "versions": {name: version(name) for name in ("turnkv", "torch", "transformers")},
        "settings": settings | {"date": started.date().isoformat()},
        "reference": FULL.name,
        "subjects": evaluation.names,
        "summary": summarise(results, evaluation.names),
        "items": results,
        "skipped": [{"where": each.where, "problem": each.problem} for each in skipped],
        "wall_s": (datetime.now(UTC) - started).total_seconds(),
    }
    _print(found, skipped)
    _write(found, wanted)


def _items(wanted: EvalOptions) -> tuple[list[Item], list[Skipped]]:
    """Everything that is to be asked."""
    if unknown := [kind for kind in wanted.metrics if kind not in KINDS]:
        raise TurnKVError(f"--metrics {unknown[0]!r} is unknown; give some of {', '.join(KINDS)}")
    items, skipped = load_items(wanted.data or example_files(), skip_bad=wanted.skip_bad)
    count = min(wanted.generated, 2) if wanted.is_quick else wanted.generated
    leaks = leakage_items(items, max(1, count // 4), SEED)
    if wanted.ids is not None:
        ids = set(read_ids(wanted.ids))
        if missing := ids - {item.id for item in items}:
            raise InvalidFileError(f"{wanted.ids}: the data hold no item {sorted(missing)[0]!r}; check its id")
        items = [item for item in items if item.id in ids]
        leaks = leakage_items(items, max(1, count // 4), SEED)
    if wanted.limit is not None:
        items = [item for kind in KINDS for item in [each for each in items if each.kind == kind][: wanted.limit]]
    items += leaks + arithmetic_items(count, SEED)
    for path in wanted.texts:
        items += text_items(path, 1 if wanted.is_quick else 4)
    return [item for item in items if item.kind in (wanted.metrics or KINDS)], skipped


def _tasks(wanted: EvalOptions, items: Sequence[Item]) -> list[Task]:
    if unknown := [each for each in wanted.protocols if each not in PROTOCOLS]:
        raise TurnKVError(f"--protocol {unknown[0]!r} is unknown; give some of {', '.join(PROTOCOLS)}")
    return tasks_of(items, [each for each in PROTOCOLS if each in (wanted.protocols or PROTOCOLS)])


def _max_requests(wanted: EvalOptions) -> int | None:
    return QUICK_REQUESTS if wanted.is_quick and wanted.max_requests is None else wanted.max_requests


def _foreign(options: EngineOptions, wanted: EvalOptions) -> "list[ForeignCache]":
    if not wanted.caches:
        return []
    from turnkv.evaluate.foreign import foreign_cache  # noqa: PLC0415 (what it needs is an extra)

    folder = resolve_model(options.model, progress=say).path
    return [foreign_cache(name, folder, dtype=options.dtype) for name in wanted.caches]


def _settings(
    options: EngineOptions, wanted: EvalOptions, engine: Engine, policies: Sequence[Policy]
) -> dict[str, object]:
    """What decides the figures, and where they were made."""
    return {
        "dtype": str(options.dtype),
        "weights": str(options.weights),
        "policies": [policy.describe() for policy in policies],
        "max_requests": _max_requests(wanted),
        "max_step_tokens": engine.config.max_step_tokens,
        "num_answered": wanted.num_answered,
        "seed": SEED,
        "machine": cpu_name(),
        "threads": torch.get_num_threads(),
    }


def _run(
    evaluation: Evaluation, tasks: Sequence[Task], wanted: EvalOptions, settings: dict[str, object]
) -> list[dict[str, Any]]:
    try:
        with _shown_progress(len(tasks)) as show:
            return run_tasks(evaluation, tasks, wanted.json, settings, show)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            "nothing was written; with --json OUT a run can go on where it stopped"
            if wanted.json is None
            else f"what was finished is kept beside {wanted.json}; the same command goes on from there"
        ) from None


@contextmanager
def _shown_progress(num_tasks: int) -> Iterator[Callable[[Step], None]]:
    """A bar with the time left; without a terminal a line now and then."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    is_seen = error_console().is_terminal
    bar = Progress(*columns, console=error_console(), disable=not is_seen, expand=True)
    shown = bar.add_task("evaluating", total=num_tasks, left="")
    said_s = time.monotonic()

    def show(now: Step) -> None:
        nonlocal said_s
        left = "" if now.left_s is None else f"{now.left_s / 60:.0f} min left"
        bar.update(shown, completed=now.done, description=now.name[:40], left=left)
        if not is_seen and time.monotonic() - said_s > SECONDS_BETWEEN_LINES:
            said_s = time.monotonic()
            say(f"{now.done} of {now.total} done, {left}: {now.name}")

    with bar:
        yield show


def _print(found: Mapping[str, Any], skipped: Sequence[Skipped]) -> None:
    for protocol, subjects in found["summary"].items():
        names = list(dict.fromkeys(metric for metrics in subjects.values() for metric in metrics))
        table = Table(box=box.SIMPLE_HEAD, title=f"{protocol}: {found['model']}", title_justify="left")
        table.add_column("metric")
        for subject in subjects:
            table.add_column(Text(subject), justify="right")
        for name in names:
            table.add_row(name, *(cell(metrics.get(name)) for metrics in subjects.values()))
        out_console().print(table)
    for each in skipped:
        say(f"skipped: {each.where}: {each.problem}")
    if skipped:
        say(f"{len(skipped)} bad lines were skipped")


def cell(found: Mapping[str, Any] | None) -> str:
    """A figure, with its change and interval."""
    if found is None:
        return "–"
    unit, value = found["unit"], found["value"]
    said = {
        "bytes": lambda: f"{value / 1e6:.1f} MB",
        "s": lambda: f"{value * 1000:.0f} ms",
        "share": lambda: f"{value:.1%}",
        "ratio": lambda: f"{value:.3f}×",
    }.get(unit, lambda: f"{value:,.4g}")()
    if not found["change"] or unit in ("bytes", "s", "ratio", "tokens"):
        return said
    form = "+.2%" if unit in ("share", "relative") else "+.4f"
    return f"{said}\n{found['change']:{form}} [{found['low']:{form}}, {found['high']:{form}}]"


def _write(found: Mapping[str, Any], wanted: EvalOptions) -> None:
    if wanted.json is not None:
        write_atomically(wanted.json, json.dumps(found, ensure_ascii=False, allow_nan=False, indent=1) + "\n")
        wanted.json.with_name(f"{wanted.json.name}.unfinished").unlink(missing_ok=True)
        say(f"written: {wanted.json}")
    if wanted.report is not None:
        from turnkv.evaluate.eval_report import write_eval_plots, write_eval_report  # noqa: PLC0415 (plotting libraries)

        write_eval_report(wanted.report, found)
        plots = write_eval_plots(wanted.report.parent, found)
        say(f"written: {', '.join(map(str, [wanted.report, *plots]))}")
