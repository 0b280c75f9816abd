"""A whole session, request by request: turnkv under a policy in little memory, beside peers with all that they want.

    .venv/bin/python benchmarks/session.py [FILE.jsonl] [--id ID] [--policy P] [--share 0.25] [--peers] [--json OUT]

Each request of a recorded session is answered anew by as many tokens as the recorded reply has, greedy, whatever they
are; the next request then brings the recorded reply, as a client's history does. turnkv gets a KV budget of `--share`
of what the session takes at its longest; the others (turnkv under `full`, and with `--peers` vLLM's CPU build, the best
of the peers, with its prefix cache) get all. Seconds are of the whole session, with what turnkv does between requests;
the arms run in turn, there and back.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from peer_workers import Worker, start_peers
from turnkv.config import CacheConfig, SamplingParams
from turnkv.engine import Engine
from turnkv.evaluate.machine import cpu_name
from turnkv.evaluate.sessions import RecordedSession, load_sessions
from turnkv.models import resolve_model
from turnkv.policy import FULL, load_policy

EXAMPLE = Path(__file__).parents[1] / "examples/sessions/operations.jsonl"


@dataclass(frozen=True)
class Request:
    """What one request asks: messages up to an index, the same as tokens, and how many tokens to answer."""

    index: int
    prompt: list[int]
    num_reply_tokens: int


@dataclass(frozen=True)
class Taken:
    """What a session took."""

    wall_s: float
    first_token_s: float
    """Median over the last quarter of the requests."""
    peak_bytes: int | None = None


def requests_of(engine: Engine, session: RecordedSession) -> tuple[list[Request], int]:
    """The session's requests, and the bytes that it takes whole, read off a replay that keeps every turn."""
    requests, peak = [], 0
    for index in session.requests:
        score = engine.score(session.messages[: index + 1], session.tools)
        records = engine.session(score.session_id).records
        last = records[-1]
        prompt = [token for record in records[:-1] for token in record.tokens] + list(last.tokens[: last.header_tokens])
        requests.append(Request(index, prompt, len(last.tokens) - last.header_tokens))
        peak = max(peak, engine.stats.peak_held_bytes)
    engine.clear()
    return requests, peak


def late(times: list[float]) -> float:
    return statistics.median(times[-max(1, len(times) // 4) :])


def run_ours(engine: Engine, session: RecordedSession, requests: list[Request]) -> Taken:
    engine.clear()
    firsts, peak, started = [], 0, time.perf_counter()
    for asked in requests:
        sampling = SamplingParams(max_new_tokens=asked.num_reply_tokens)
        request = engine.generation(session.messages[: asked.index], session.tools, sampling=sampling)
        request.stop_ids = frozenset()
        engine.submit(request)
        while not request.is_done:
            engine.step()
        if request.error is not None:
            raise request.error
        assert request.ttft_s is not None
        firsts.append(request.ttft_s)
        engine.tidy()
        peak = max(peak, engine.stats.committed_bytes)
    return Taken(time.perf_counter() - started, late(firsts), peak)


def run_peer(worker: Worker, requests: list[Request]) -> Taken:
    worker.ask(prompt=requests[0].prompt[:1], new_tokens=1, streams=1)  # begins with an empty cache
    firsts, wall_s = [], 0.0
    for asked in requests:
        answer = worker.ask(prompt=asked.prompt, new_tokens=asked.num_reply_tokens, is_cached=True)
        firsts.append(answer["first_token_s"])
        wall_s += answer["all_s"]
    return Taken(wall_s, late(firsts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=EXAMPLE)
    parser.add_argument("--id", default="checkout-incident")
    parser.add_argument("--policy", default="balanced")
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--peers", action="store_true", help="vLLM too; `make peers` first")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--limit", type=int, help="the first N requests")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    [session] = (each for each in load_sessions(arguments.file) if each.id == arguments.id)
    full = Engine.load(policy=FULL, cache=CacheConfig(budget_bytes=2**31), progress=print)
    requests, whole_bytes = requests_of(full, session)
    requests = requests[: arguments.limit]
    budget = int(whole_bytes * arguments.share)
    ours = full.with_policy(load_policy(arguments.policy), cache=CacheConfig(budget_bytes=budget))
    folder = resolve_model(None, progress=print)
    workers = start_peers(folder.path, with_llama=False) if arguments.peers else []
    name = f"turnkv {arguments.policy}"
    arms = {name: ours, "turnkv full": full} | {worker.name: worker for worker in workers}
    print(
        f"{session.id}: {len(requests)} requests, {whole_bytes / 1e6:.0f} MB whole; {name} gets {budget / 1e6:.0f} MB"
    )
    taken: dict[str, list[Taken]] = {each: [] for each in arms}
    try:
        for _ in range(arguments.rounds):
            for each in [*arms, *reversed(arms)]:
                arm = arms[each]
                taken[each].append(
                    run_peer(arm, requests) if isinstance(arm, Worker) else run_ours(arm, session, requests)
                )
    finally:
        for worker in workers:
            worker.stop()
    found: dict[str, dict[str, Any]] = {}
    for each, runs in taken.items():
        peaks = [run.peak_bytes for run in runs if run.peak_bytes is not None]
        found[each] = {
            "wall_s": statistics.median(run.wall_s for run in runs),
            "first_token_s": statistics.median(run.first_token_s for run in runs),
            "peak_bytes": max(peaks, default=None),
        }
        ratios = [a.wall_s / b.wall_s for a, b in zip(taken[name], runs, strict=True)]
        found[each]["ours_over"] = statistics.median(ratios)
        peak = "" if not peaks else f", KV committed at most {max(peaks) / 1e6:.0f} MB"
        print(
            f"{each:20} {found[each]['wall_s']:6.2f} s, late first token {found[each]['first_token_s'] * 1000:.0f} ms; "
            f"{name}'s time over it {found[each]['ours_over']:.2f}{peak}"
        )
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        setting = {
            "model": folder.name,
            "machine": cpu_name(),
            "threads": torch.get_num_threads(),
            "date": datetime.now(UTC).date().isoformat(),
            "peers": {worker.name: worker.version for worker in workers},
        }
        summary = {"session": session.id, "requests": len(requests), "whole_bytes": whole_bytes, "budget_bytes": budget}
        arguments.json.write_text(json.dumps({"setting": setting} | summary | {"arms": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
