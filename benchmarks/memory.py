"""How much KV a window saves on real sessions, by exact account and in seconds: nothing is computed.

    .venv/bin/python benchmarks/memory.py FILE.jsonl [--min-turns 30] [--json OUT]

For each session with enough turns, under `full` and under windows: the peak of the *droppable* KV (closed turns, less
the latest user message: what a policy can do anything about) and the peak of all KV, as ratios to `full`'s. The model
is given room enough for every session, so that `full` can hold it and only the window acts.
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from turnkv.config import CacheConfig
from turnkv.conversation.turns import group_turns
from turnkv.engine import Engine
from turnkv.engine.retention import droppable_records
from turnkv.evaluate.replay import Answered, replay_session
from turnkv.evaluate.sessions import RecordedSession, load_sessions
from turnkv.policy import FULL, Policy, Window

WINDOWS = ((8, 5), (8, 8), (12, 8))
"""High and low marks. (8, 8) is the plain window of 8 turns of which it is claimed that it halves memory."""


@dataclass(frozen=True)
class Row:
    id: str
    requests: int
    full_bytes: int
    droppable: dict[str, float]
    """Ratio to full's peak, by policy."""
    everything: dict[str, float]


def peaks(engine: Engine, session: RecordedSession) -> tuple[int, int]:
    """Peak of the droppable and of all KV, bytes."""
    droppable, everything = [0], [0]

    def look(answered: Answered) -> None:
        held = engine.session(answered.session_id)
        closed = group_turns(held.messages)[:-1]
        records = [record for turn in closed for record in droppable_records(held, turn)]
        droppable.append(sum(held.record_bytes(record) for record in records))
        everything.append(answered.result.kv_bytes)

    result = replay_session(engine, session, after_request=look)
    assert result.error is None, result.error
    return max(droppable), max(everything)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--min-turns", type=int, default=30)
    parser.add_argument("--model")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    base = Engine.load(arguments.model, is_dry=True, cache=CacheConfig(budget_bytes=2**35), progress=print)
    base.runner.max_positions = None
    policies = [FULL] + [Policy(name=f"{high}/{low}", window=Window(high=high, low=low)) for high, low in WINDOWS]
    rows: list[Row] = []
    for session in load_sessions(arguments.file, limit=arguments.limit):
        if len(session.requests) < arguments.min_turns:
            continue
        full, *others = (peaks(base.with_policy(policy), session) for policy in policies)
        names = [policy.name for policy in policies[1:]]
        row = Row(
            id=session.id,
            requests=len(session.requests),
            full_bytes=full[1],
            droppable={name: one[0] / full[0] for name, one in zip(names, others, strict=True)},
            everything={name: one[1] / full[1] for name, one in zip(names, others, strict=True)},
        )
        rows.append(row)
        ratios = "  ".join(f"{name}: {row.droppable[name]:.2f} ({row.everything[name]:.2f})" for name in names)
        print(f"{row.id:48} {row.requests:4} requests  full {full[1] / 1e6:7.1f} MB  {ratios}", flush=True)
    print(f"\n{len(rows)} sessions of {arguments.min_turns} and more requests; droppable KV (all KV), ratio to full:")
    for policy in policies[1:]:
        droppable = [row.droppable[policy.name] for row in rows]
        everything = [row.everything[policy.name] for row in rows]
        print(
            f"  {policy.name:5} median {statistics.median(droppable):.2f} ({statistics.median(everything):.2f}), "
            f"worst {max(droppable):.2f} ({max(everything):.2f}), at most half in "
            f"{sum(one <= 0.5 for one in droppable)} ({sum(one <= 0.5 for one in everything)}) of {len(rows)}"
        )
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"model": base.name, "sessions": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
