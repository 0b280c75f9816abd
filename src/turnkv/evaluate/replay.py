"""Replays: recorded sessions run through an engine, request by request, as their client would have sent them."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from turnkv.config import SamplingParams
from turnkv.engine import Engine, Reply, Score, Usage
from turnkv.engine.journal import dump_journal
from turnkv.errors import TurnKVError, UnknownSessionError
from turnkv.evaluate.machine import cpu_name
from turnkv.evaluate.results import ReplayResult, RequestResult, SessionResult, write_atomically
from turnkv.evaluate.sessions import RecordedSession
from turnkv.types import SessionId

Mode = Literal["score", "generate"]

Progress = Callable[[RecordedSession, int], None]
"""Told a session and how many of its requests are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A request that was just replayed; the engine holds its session, the reply included."""

    session: RecordedSession
    index: int
    """Of the assistant message in the session."""
    session_id: SessionId
    result: RequestResult


AfterRequest = Callable[[Answered], None]
"""Called after each request. It may fork the session by asking the engine something, if it closes the fork."""


def replay_session(  # noqa: PLR0913 - the replay's own settings
    engine: Engine,
    session: RecordedSession,
    *,
    mode: Mode = "score",
    max_new_tokens: int = 64,
    progress: Progress = lambda session, done: None,
    after_request: AfterRequest = lambda answered: None,
    journal: Callable[[str], None] | None = None,
) -> SessionResult:
    """Run every request of one session. `score` feeds the recorded replies; `generate` writes its own beside them.

    In either mode the history that the client sends is the recorded one; so a generated reply is measured, then
    the recorded one takes its place, as after a client's edit.
    """
    results: list[RequestResult] = []
    session_id: SessionId | None = None
    error: str | None = None
    try:
        for done, index in enumerate(session.requests):
            try:
                result, now = _request(engine, session, index, mode, max_new_tokens, session_id)
            except TurnKVError as problem:
                error = str(problem)
                break
            if now != session_id:
                _close(engine, session_id)
            session_id = now
            results.append(result)
            after_request(Answered(session=session, index=index, session_id=session_id, result=result))
            progress(session, done + 1)
        if journal is not None and session_id is not None:
            journal(dump_journal(engine.session(session_id).journal))
    finally:
        _close(engine, session_id)
    return SessionResult(id=session.id, turns=tuple(results), error=error)


def _request(
    engine: Engine,
    session: RecordedSession,
    index: int,
    mode: Mode,
    max_new_tokens: int,
    session_id: SessionId | None,
) -> tuple[RequestResult, SessionId]:
    """Run one request, and say which session answered it."""
    if not _is_held(engine, session_id):
        session_id = None
    if mode == "score":
        score = engine.score(session.messages[: index + 1], session.tools, session_id=session_id)
        return _scored(score, is_measured=not engine.runner.is_dry), score.session_id
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    reply = engine.respond(session.messages[:index], session.tools, sampling=sampling, session_id=session_id)
    return _generated(reply), reply.session_id


def _is_held(engine: Engine, session_id: SessionId | None) -> bool:
    """Whether the engine holds a session still; it may have given it up for a fork that was asked something."""
    try:
        return session_id is not None and engine.session(session_id) is not None
    except UnknownSessionError:
        return False


def _close(engine: Engine, session_id: SessionId | None) -> None:
    if session_id is not None and _is_held(engine, session_id):
        engine.close_session(session_id)


def replay(  # noqa: PLR0913 - the replay's own settings
    engine: Engine,
    sessions: Sequence[RecordedSession],
    *,
    mode: Mode = "score",
    out: Path | None = None,
    journal: Path | None = None,
    max_new_tokens: int = 64,
    progress: Progress = lambda session, done: None,
    after_request: AfterRequest = lambda answered: None,
    say: Callable[[str], None] = lambda line: None,
) -> ReplayResult:
    """Replay sessions one after another; with `out`, a killed run is continued after its last whole session.

    Raises:
        TurnKVError: a result cannot be written. Earlier ones are kept.
    """
    settings = _settings(engine, mode)
    decisive = {name: settings[name] for name in ("mode", "dtype", "budget_bytes", "is_dry")}
    decisive |= {"policy": repr(engine.policy), "model": engine.name, "max_new_tokens": max_new_tokens}
    kept = _Unfinished(out, decisive)
    finished = {result.id: result for result in kept.read(sessions, say)}
    wall_s = kept.wall_s
    for session in sessions:
        if session.id in finished:
            progress(session, len(session.requests))
            continue
        started_s = time.perf_counter()
        result = replay_session(
            engine,
            session,
            mode=mode,
            max_new_tokens=max_new_tokens,
            progress=progress,
            after_request=after_request,
            journal=None if journal is None else lambda text, s=session: _write_journal(journal, s, sessions, text),  # type: ignore[misc]
        )
        finished[session.id] = result
        wall_s += time.perf_counter() - started_s
        kept.write(session, result, wall_s)
    whole = ReplayResult(
        model=engine.name,
        policy=engine.policy.name,
        sessions=tuple(finished[session.id] for session in sessions),
        wall_s=wall_s,
        mode=mode,
        versions={name: version(name) for name in ("turnkv", "torch", "transformers")},
        settings=settings,
    )
    if out is not None:
        whole.write_json(out)
        kept.remove()
    return whole


class _Unfinished:
    """The sessions that a run has finished so far, beside its output, for a run that was killed to go on from."""

    def __init__(self, out: Path | None, settings: dict[str, object]) -> None:
        self._path = None if out is None else out.with_name(f"{out.name}.unfinished")
        self._settings = json.dumps(settings, sort_keys=True, default=str)
        self._lines: list[str] = []
        self.wall_s = 0.0

    def _mark(self, session: RecordedSession) -> str:
        """Digest of all that decides a session's result."""
        said = json.dumps([self._settings, session.messages, session.tools], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def read(self, sessions: Sequence[RecordedSession], say: Callable[[str], None]) -> Iterator[SessionResult]:
        if self._path is None or not self._path.exists():
            return
        marks = {session.id: self._mark(session) for session in sessions}
        for line in self._path.read_text("utf-8").split("\n"):
            try:
                raw = json.loads(line)
                result = SessionResult.from_json(raw["session"])
                is_same = raw["mark"] == marks.get(result.id, raw["mark"])
            except (ValueError, KeyError, TypeError, TurnKVError):
                break  # the last line may be torn; what follows is computed again
            if not is_same:
                say(f"{self._path}: left by a run with other settings; starting anew")
                self._lines.clear()
                return
            self._lines.append(line)
            self.wall_s = float(raw["wall_s"])
            yield result
        say(f"continuing a run that was interrupted: {len(self._lines)} sessions are done, the rest is run again")

    def write(self, session: RecordedSession, result: SessionResult, wall_s: float) -> None:
        if self._path is None:
            return
        entry = {"mark": self._mark(session), "wall_s": wall_s, "session": result.to_json()}
        self._lines.append(json.dumps(entry, ensure_ascii=False))
        write_atomically(self._path, "\n".join(self._lines) + "\n")

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _scored(score: Score, *, is_measured: bool) -> RequestResult:
    result = replace(_account(score.usage), scored_tokens=score.usage.reply_tokens)
    if not is_measured:
        return replace(result, ttft_s=0.0)
    return replace(result, nll=score.nll, top1=sum(score.is_top) / len(score.is_top))


def _generated(reply: Reply) -> RequestResult:
    calls = reply.message.to_openai().get("tool_calls")
    return replace(_account(reply.usage), reply=reply.message.content or json.dumps(calls, ensure_ascii=False))


def _account(usage: Usage) -> RequestResult:
    return RequestResult(
        turn=usage.turn,
        kind=usage.kind,
        prompt_tokens=usage.prompt_tokens,
        computed_tokens=usage.computed_tokens,
        cached_tokens=usage.cached_tokens,
        dropped_tokens=usage.dropped_tokens,
        noted_tokens=usage.noted_tokens,
        kv_bytes=usage.kv_bytes,
        ttft_s=usage.ttft_s,
        nll=None,
        scored_tokens=0,
        dropped_turns=usage.dropped_turns,
    )


def _settings(engine: Engine, mode: Mode) -> dict[str, object]:
    return {
        "mode": mode,
        "policy": engine.policy.describe(),
        "dtype": str(engine.runner.dtype).removeprefix("torch."),
        "budget_bytes": engine.stats.budget_bytes,
        "max_step_tokens": engine.config.max_step_tokens,
        "is_dry": engine.runner.is_dry,
        "threads": torch.get_num_threads(),
        "cpu": cpu_name(),
        "cores": os.cpu_count() or 0,
        "date": datetime.now(UTC).date().isoformat(),
    }


def _write_journal(path: Path, session: RecordedSession, sessions: Sequence[RecordedSession], text: str) -> None:
    """One session's journal goes to the file itself; several go to one file each, named after the sessions."""
    name = path if len(sessions) == 1 else path.with_name(f"{path.stem}-{_file_name(session.id)}{path.suffix}")
    write_atomically(name, text)


def _file_name(session_id: str) -> str:
    """An id with nothing in it that a file's name cannot hold."""
    return re.sub(r"[^\w.-]+", "_", session_id)
