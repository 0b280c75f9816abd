"""Evaluations: items through policies and other caches, resumable, and the summary with its intervals."""

import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from turnkv.engine import Engine
from turnkv.errors import OutOfPositionsError, OverBudgetError, TurnKVError
from turnkv.evaluate.bootstrap import Sums, estimate, sums
from turnkv.evaluate.items import Item, session_item
from turnkv.evaluate.oneshot import Ours, OursHolding, Reference, Subject, oneshot_metrics
from turnkv.evaluate.online import online_metrics, replay_online
from turnkv.evaluate.scoring import Pair

Protocol = Literal["oneshot", "online"]
PROTOCOLS: tuple[Protocol, ...] = ("oneshot", "online")

RELATIVE = ("nll", "nll_tool_call", "nll_number", "nll_code", "text_nll_en", "text_nll_zh")
"""Metrics whose change is a share of the reference."""

UNITS = {
    "kv_ratio": "ratio", "kv_mean_ratio": "ratio", "kv_peak_bytes": "bytes", "ttft_s": "s", "ttft_after_drop_s": "s",
    "computed_tokens": "tokens", "top1": "share", "gold_first": "share", "recall_first": "share",
    "arithmetic_first": "share", "gold_exact": "share", "gold_rank": "rank", "recall_rank": "rank",
    "arithmetic_rank": "rank",
}  # fmt: skip
"""Units of metrics; all others are in nats, or relative."""


@dataclass(frozen=True, slots=True)
class Task:
    """One item under one protocol."""

    protocol: Protocol
    item: Item


@dataclass(frozen=True, slots=True)
class Step:
    """How far an evaluation has come."""

    done: int
    total: int
    left_s: float | None
    """Seconds that the rest is likely to take; None before the first is done."""
    name: str


class Evaluation:
    """Runs tasks with some engines, the first of which keeps everything, and other libraries' caches."""

    def __init__(
        self,
        engines: Sequence[Engine],
        foreign: Sequence[Subject] = (),
        *,
        max_requests: int | None = None,
        answered: Collection[str] = (),
    ) -> None:
        """Take engines that share a memory.

        Args:
            engines: the first keeps everything.
            foreign: other caches, for `oneshot` alone.
            max_requests: requests of a session that are replayed online, at most; None replays all.
            answered: ids of items whose calls are generated too.
        """
        self.engines = list(engines)
        self._full = engines[0]
        assert self._full.policy.window is None
        assert self._full.policy.precision is None
        self._subjects: list[Subject] = [*(Ours(engine, self._full) for engine in engines), *foreign]
        self._reference = Reference(self._full)
        self._max_requests = max_requests
        self._answered = frozenset(answered)

    @property
    def names(self) -> list[str]:
        """All subjects, the reference first."""
        return [subject.name for subject in self._subjects]

    def run(self, task: Task) -> dict[str, Any]:
        """One item's result: metrics of every subject as numerators and denominators, and its requests.

        An item that the reference cannot hold has a `problem` and no subjects.
        """
        item = task.item
        said = {
            "id": item.id, "kind": item.kind, "lang": item.lang, "group": item.group, "protocol": task.protocol,
        }  # fmt: skip
        try:
            return said | {"subjects": self._subjects_of(task)}
        except (OutOfPositionsError, OverBudgetError) as error:
            return said | {"subjects": {}, "problem": str(error)}

    def _subjects_of(self, task: Task) -> dict[str, dict[str, Any]]:
        item = task.item
        if task.protocol == "online":
            return self._online(item)
        if item.twin is not None:
            without = self._oneshot(replace(item, history=item.twin, evidence=(), twin=None))
            return {name: _gain(found, without[name]["metrics"]) for name, found in self._oneshot(item).items()}
        return self._oneshot(self._held(item))

    def _held(self, item: Item) -> Item:
        """A session's first requests, as many as the reference can hold; any other item as it is."""
        if item.kind != "session":
            return item
        session = item.session()
        num_requests = len(session.requests)
        while not self._reference.can_hold(item):
            num_requests = num_requests * 9 // 10
            if num_requests < 2:
                break
            item = session_item(session, item.lang, num_requests)
        return item

    def _oneshot(self, item: Item) -> dict[str, dict[str, Any]]:
        base = self._reference.base(item)
        found: dict[str, dict[str, Any]] = {}
        full = Ours(self._full, self._full).hold(base, item)
        try:
            reference, tails = self._reference.tails(full, item)
            for subject in self._subjects:
                holding = full if subject.name == self._full.policy.name else subject.hold(base, item)
                try:
                    runs = reference if holding is full else holding.score(item, tails)
                    metrics = oneshot_metrics(item, holding, runs, full, reference)
                    if item.id in self._answered and isinstance(holding, OursHolding):
                        metrics["gold_exact"] = (float(holding.answers_rightly(item)), 1.0)
                    found[subject.name] = {"metrics": metrics}
                finally:
                    if holding is not full:
                        holding.close()
        finally:
            full.close()
        return found

    def _online(self, item: Item) -> dict[str, dict[str, Any]]:
        self._reference = Reference(self._full)
        try:
            accounts = replay_online(self.engines, item, limit=self._max_requests)
            return {
                engine.policy.name: {"metrics": online_metrics(account, accounts[0]), "requests": account.requests}
                for engine, account in zip(self.engines, accounts, strict=True)
                if account.requests
            }
        finally:
            for engine in self.engines:
                engine.clear()


def _gain(found: dict[str, Any], without: dict[str, Pair]) -> dict[str, Any]:
    metrics = dict(found["metrics"])
    over = metrics.pop("secret_ll")[0] - without["secret_ll"][0]
    return {"metrics": metrics | {"secret_gain": (over, 1.0)}}


def tasks_of(items: Iterable[Item], protocols: Sequence[Protocol]) -> list[Task]:
    """All that there is to do; items that share a conversation come one behind the other."""
    items = sorted(items, key=lambda item: (item.kind, item.group))
    found = [Task("online", item) for item in items if item.kind == "session" and "online" in protocols]
    return found + [Task("oneshot", item) for item in items if "oneshot" in protocols and item.history]


def run_tasks(
    evaluation: Evaluation,
    tasks: Sequence[Task],
    out: Path | None,
    settings: dict[str, object],
    progress: Callable[[Step], None] = lambda step: None,
) -> list[dict[str, Any]]:
    """Results of all tasks, in order. With `out`, those of a run that was killed are read from beside it.

    Raises:
        TurnKVError: a result cannot be written. Earlier ones are kept.
    """
    kept = _Kept(out, json.dumps([settings, evaluation.names], sort_keys=True, default=str))
    found = kept.read()
    results: list[dict[str, Any]] = []
    total = sum(task.item.num_characters for task in tasks if kept.mark(task) not in found)
    spent = deque([(0.0, 0)])
    for done, task in enumerate(tasks):
        left = None if not spent[-1][1] else spent[-1][0] / spent[-1][1] * (total - spent[-1][1])
        progress(Step(done, len(tasks), left, task.item.id))
        if (result := found.get(kept.mark(task))) is None:
            started_s = time.perf_counter()
            # As JSON has it, so that a result is the same whether it was read or made.
            result = json.loads(json.dumps(evaluation.run(task)))
            kept.add(task, result)
            spent.append((spent[-1][0] + time.perf_counter() - started_s, spent[-1][1] + task.item.num_characters))
        results.append(result)
    return results


class _Kept:
    """Results beside the output, one a line as soon as it is there."""

    def __init__(self, out: Path | None, settings: str) -> None:
        self.path = None if out is None else out.with_name(f"{out.name}.unfinished")
        self._settings = settings

    def mark(self, task: Task) -> str:
        """Digest of all that decides a result."""
        said = json.dumps([self._settings, task.protocol, repr(task.item)])
        return hashlib.sha256(said.encode()).hexdigest()[:24]

    def read(self) -> dict[str, dict[str, Any]]:
        if self.path is None or not self.path.exists():
            return {}
        found = {}
        for line in self.path.read_text("utf-8").split("\n"):
            try:
                entry = json.loads(line)
                found[str(entry["mark"])] = entry["result"]
            except (ValueError, KeyError, TypeError):
                continue  # torn: it is computed again
        return found

    def add(self, task: Task, result: dict[str, Any]) -> None:
        if self.path is None:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"mark": self.mark(task), "result": result}) + "\n")
                file.flush()
        except OSError as error:
            raise TurnKVError(f"{self.path}: cannot be written ({error.strerror}); free some space") from error


def summarise(results: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """By protocol, subject and metric: value, the reference's, the change and its interval."""
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for protocol in PROTOCOLS:
        of_protocol = [result for result in results if result["protocol"] == protocol]
        for name in names:
            metrics = dict.fromkeys(
                metric for result in of_protocol for metric in result["subjects"].get(name, {}).get("metrics", ())
            )
            for metric in metrics:
                summary.setdefault(protocol, {}).setdefault(name, {})[metric] = _summary(
                    of_protocol, name, names[0], metric
                )
    return summary


def _summary(results: Sequence[dict[str, Any]], name: str, reference: str, metric: str) -> dict[str, Any]:
    rows = []
    for result in results:
        ours, full = (result["subjects"].get(each, {}).get("metrics", {}) for each in (name, reference))
        # What is split by a policy's own deed is compared with all that the reference did there.
        beside = full.get(metric, full.get(metric.removesuffix("_dropped"))) if metric in ours else None
        if metric in ours:
            rows.append((result["group"], ours[metric], beside))
    groups, ours_sums = sums([row[0] for row in rows], [row[1] for row in rows])
    has_reference = all(row[2] is not None for row in rows)
    _, full_sums = sums([row[0] for row in rows], [row[2] or row[1] for row in rows])
    found = estimate(ours_sums, full_sums, is_relative=metric in RELATIVE)
    if metric in ("kv_ratio", "kv_mean_ratio"):  # a ratio to the reference already
        found = estimate(ours_sums, Sums(full_sums.under, full_sums.under), is_relative=False)

    def known(value: float) -> float | None:
        return value if has_reference and math.isfinite(value) else None

    return {
        "value": found.value, "full": known(found.full), "change": known(found.change),
        "low": known(found.low), "high": known(found.high),
        "unit": "relative" if metric in RELATIVE else UNITS.get(metric, "nats"),
        "items": len(rows), "groups": len(groups), "tokens": round(float(ours_sums.under.sum())),
    }  # fmt: skip
