"""What allocation costs: pages that are shared, against one contiguous block for each session at its longest length.

    .venv/bin/python benchmarks/allocation.py FILE.jsonl [--at-once 1 8 16] [--limit N] [--json OUT]

The recorded sessions are replayed, some at once, one request of each in turn; when one ends, the next of the file
begins. Nothing is computed. After every request it is counted how many bytes the tokens of the running sessions
take, what the allocator holds for them, and how far up its memory is used. Ratios are to the tokens' own bytes: `held`
by what is held, over all requests (waste inside of blocks and pages), `room` by the memory that was ever used, at the
peak of the tokens' bytes (waste between them too). `paged` is the engine under `full`; what sessions share, it holds
but once, and each ratio is to what that leaves of the tokens, `unique`. The contiguous allocator is told each session's
longest length in advance, which none knows, and takes the lowest run of free memory that is long enough.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnkv.cache import PagePool
from turnkv.config import PAGE_TOKENS, CacheConfig
from turnkv.engine import Engine
from turnkv.evaluate.sessions import RecordedSession, load_sessions
from turnkv.policy import FULL
from turnkv.types import SessionId


@dataclass
class Waste:
    """Sums over all requests, and peaks, in bytes."""

    tokens: int = 0
    held: int = 0
    peak_tokens: int = 0
    room: int = 0

    def add(self, tokens: int, held: int, room: int) -> None:
        self.tokens += tokens
        self.held += held
        self.peak_tokens = max(self.peak_tokens, tokens)
        self.room = max(self.room, room)

    def ratios(self) -> dict[str, float]:
        return {"held": self.held / self.tokens, "room": self.room / self.peak_tokens}


@dataclass(frozen=True)
class Step:
    """One request of a session, by the session's number and the messages that it holds by then."""

    number: int
    num_messages: int
    is_last: bool


def schedule(sessions: Sequence[RecordedSession], at_once: int) -> Iterator[Step]:
    """Requests of all sessions, `at_once` running in turn."""
    waiting = iter(enumerate(sessions))
    running: list[Iterator[Step]] = []
    while True:
        for number, session in itertools.islice(waiting, at_once - len(running)):
            last = session.requests[-1]
            running.append(iter([Step(number, index + 1, index == last) for index in session.requests]))
        if not running:
            return
        for steps in list(running):
            step = next(steps)
            yield step
            if step.is_last:
                running.remove(steps)


class Blocks:
    """One contiguous run of memory a session, the lowest that is free and long enough."""

    def __init__(self, num_pages: int) -> None:
        self._pool = PagePool(num_pages)
        self._blocks: dict[int, range] = {}

    def begin(self, number: int, longest: int) -> None:
        if number not in self._blocks:
            [run] = self._pool.claim(-(-longest // PAGE_TOKENS))
            self._blocks[number] = run.pages

    def end(self, number: int) -> None:
        for page in self._blocks.pop(number):
            self._pool.unclaim(page)

    @property
    def held(self) -> int:
        """Slots of all blocks."""
        return self._pool.num_held_pages * PAGE_TOKENS

    @property
    def top(self) -> int:
        """Slots up to the end of the highest block."""
        return max(block.stop for block in self._blocks.values()) * PAGE_TOKENS


def measure(
    engine: Engine, sessions: Sequence[RecordedSession], longest: Sequence[int], at_once: int
) -> dict[str, Any]:
    """The waste of both allocators, and the share of the tokens that is unique."""
    contiguous, paged = Waste(), Waste()
    blocks = Blocks(num_pages=2 * sum(longest) // PAGE_TOKENS)
    ids: dict[int, SessionId] = {}
    tokens: dict[int, int] = {}
    for step in schedule(sessions, at_once):
        session = sessions[step.number]
        ids[step.number] = score_up_to(engine, session, step.num_messages)
        tokens[step.number] = num_tokens(engine, ids[step.number])
        blocks.begin(step.number, longest[step.number])
        size = engine.token_bytes
        contiguous.add(sum(tokens.values()) * size, blocks.held * size, blocks.top * size)
        stats = engine.stats
        paged.add(stats.live_bytes, stats.held_bytes, stats.committed_bytes)
        if step.is_last:
            engine.close_session(ids.pop(step.number))
            blocks.end(step.number)
            del tokens[step.number]
    engine.clear()
    return {
        "contiguous": contiguous.ratios(),
        "paged": paged.ratios(),
        "unique": paged.tokens / contiguous.tokens,
        "paged_of_contiguous": paged.room / contiguous.room,
    }


def score_up_to(engine: Engine, session: RecordedSession, num_messages: int) -> SessionId:
    return engine.score(session.messages[:num_messages], session.tools).session_id


def num_tokens(engine: Engine, session_id: SessionId) -> int:
    return sum(len(record.tokens) for record in engine.session(session_id).records)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--model")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cache = CacheConfig(budget_bytes=2**37)
    engine = Engine.load(arguments.model, policy=FULL, cache=cache, is_dry=True, progress=print)
    engine.runner.max_positions = None
    sessions = list(load_sessions(arguments.file, limit=arguments.limit))
    longest = []
    for session in sessions:
        longest.append(num_tokens(engine, score_up_to(engine, session, session.requests[-1] + 1)))
        engine.clear()
    found = []
    for at_once in arguments.at_once:
        row = {"at_once": at_once} | measure(engine, sessions, longest, at_once)
        found.append(row)
        contiguous, paged = row["contiguous"], row["paged"]
        print(
            f"{at_once:3} at once: contiguous held {contiguous['held']:.2f}, room {contiguous['room']:.2f};  "
            f"paged held {paged['held']:.3f}, room {paged['room']:.3f}, unique {row['unique']:.2f};  "
            f"memory needed, paged of contiguous {row['paged_of_contiguous']:.2f}",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"sessions": len(sessions), "rows": found}, indent=1))


if __name__ == "__main__":
    main()
