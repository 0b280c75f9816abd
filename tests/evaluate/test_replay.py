import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.engine.conversations import TOOLS, conversation, tiny_engine

from turnkv.engine import Engine
from turnkv.engine.journal import load_journal
from turnkv.errors import InvalidFileError, UnknownSessionError
from turnkv.evaluate.replay import Answered, replay, replay_session
from turnkv.evaluate.results import SessionResult
from turnkv.evaluate.sessions import RecordedSession, load_sessions, read_ids
from turnkv.policy import FULL, Keep, Policy, Window
from turnkv.types import SessionId

NARROW = Policy(name="narrow", window=Window(high=3, low=1), keep=Keep(recent=0))


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


@pytest.fixture
def sessions(tmp_path: Path) -> list[RecordedSession]:
    lines = [{"id": f"s/{n}", "messages": conversation(n), "tools": TOOLS} for n in (3, 6)]
    return load_sessions(write(tmp_path / "sessions.jsonl", *lines))


def timeless(result: SessionResult) -> SessionResult:
    return replace(result, turns=tuple(replace(turn, ttft_s=0.0) for turn in result.turns))


@pytest.mark.parametrize("policy", [FULL, NARROW], ids=["full", "narrow"])
def test_the_account_adds_up_over_every_request_and_over_the_session(
    sessions: list[RecordedSession], policy: Policy
) -> None:
    engine = tiny_engine(policy=policy)
    num_tokens = 0

    def look(answered: Answered) -> None:
        nonlocal num_tokens
        num_tokens = sum(len(record.tokens) for record in engine.session(answered.session_id).records)

    result = replay_session(engine, sessions[1], after_request=look)
    assert result.error is None
    assert len(result.turns) == len(sessions[1].requests)
    for turn in result.turns:
        assert turn.prompt_tokens == turn.cached_tokens + turn.computed_tokens + turn.dropped_tokens
    assert sum(turn.computed_tokens + turn.scored_tokens for turn in result.turns) == num_tokens
    assert any(turn.dropped_tokens for turn in result.turns) == (policy is NARROW)
    assert engine.stats.num_sessions == engine.stats.held_bytes == 0


def test_generating_replays_the_recorded_history_and_holds_one_session_at_a_time(
    sessions: list[RecordedSession],
) -> None:
    engine = tiny_engine()
    held = []
    result = replay_session(
        engine, sessions[1], mode="generate", max_new_tokens=4, after_request=lambda _: held.append(len(engine._table))
    )
    assert held == [1] * len(sessions[1].requests)
    assert all(turn.reply is not None and turn.nll is None and not turn.scored_tokens for turn in result.turns)
    for turn in result.turns:
        assert turn.prompt_tokens == turn.cached_tokens + turn.computed_tokens + turn.dropped_tokens
    assert all(turn.cached_tokens for turn in result.turns[1:])
    assert engine.stats.held_bytes == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_replay_goes_on_and_gives_equal_results(
    sessions: list[RecordedSession], tmp_path: Path, error: type[BaseException]
) -> None:
    whole = replay(tiny_engine(policy=NARROW), sessions)
    out = tmp_path / "out.json"

    def interrupt(answered: Answered) -> None:
        if answered.session is sessions[1] and answered.index > 8:
            raise error

    engine = tiny_engine(policy=NARROW)
    with pytest.raises(error):
        replay(engine, sessions, out=out, after_request=interrupt)
    assert engine.stats.num_sessions == engine.stats.held_bytes == 0, "the engine is left clean"
    seen: list[str] = []
    said: list[str] = []
    resumed = replay(
        engine, sessions, out=out, after_request=lambda answered: seen.append(answered.session.id), say=said.append
    )
    assert set(seen) == {"s/6"}
    assert "1 sessions are done" in said[0]
    assert [timeless(session) for session in resumed.sessions] == [timeless(session) for session in whole.sessions]
    assert [path.name for path in tmp_path.iterdir() if "unfinished" in path.name] == []


def interrupted(engine: Engine, sessions: list[RecordedSession], out: Path) -> None:
    def interrupt(answered: Answered) -> None:
        if answered.session is sessions[1]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(engine, sessions, out=out, after_request=interrupt)


@pytest.mark.parametrize("what", ["policy", "messages"])
def test_what_was_replayed_otherwise_is_not_taken_for_this_replay(
    sessions: list[RecordedSession], tmp_path: Path, what: str
) -> None:
    out = tmp_path / "out.json"
    interrupted(tiny_engine(policy=NARROW), sessions, out)
    policy = NARROW if what == "messages" else replace(NARROW, keep=Keep(recent=1))
    assert policy.describe() == NARROW.describe(), "descriptions do not tell all"
    if what == "messages":
        sessions[0] = replace(sessions[0], messages=sessions[0].messages[:-1])
    seen: list[str] = []
    said: list[str] = []
    replay(
        tiny_engine(policy=policy),
        sessions,
        out=out,
        after_request=lambda answered: seen.append(answered.session.id),
        say=said.append,
    )
    assert set(seen) == {"s/3", "s/6"}
    assert "starting anew" in said[0]


def test_a_written_journal_makes_the_view_again(sessions: list[RecordedSession], tmp_path: Path) -> None:
    engine = tiny_engine(policy=NARROW)
    hashes: dict[str, str] = {}

    def look(answered: Answered) -> None:
        hashes[answered.session.id] = engine.session(answered.session_id).view.hash

    replay(engine, sessions, journal=tmp_path / "journal.jsonl", after_request=look)
    for name, session_id in (("journal-s_3.jsonl", "s/3"), ("journal-s_6.jsonl", "s/6")):
        again = tiny_engine(policy=NARROW).restore(load_journal(tmp_path / name))
        assert again.view.hash == hashes[session_id]


def test_a_session_given_up_midway_is_computed_again_and_the_replay_goes_on(sessions: list[RecordedSession]) -> None:
    engine = tiny_engine()
    result = replay_session(
        engine, sessions[0], after_request=lambda answered: engine.close_session(answered.session_id)
    )
    assert result.error is None
    assert all(turn.cached_tokens == 0 for turn in result.turns)
    assert len(result.turns) == len(sessions[0].requests)


def test_a_request_that_cannot_be_held_ends_its_session_with_the_reason(sessions: list[RecordedSession]) -> None:
    engine = tiny_engine(max_positions=700)
    result = replay(engine, sessions)
    assert [session.error is None for session in result.sessions] == [True, False] or result.sessions[0].error
    assert "positions" in str(result.sessions[1].error)
    assert engine.stats.held_bytes == 0
    with pytest.raises(UnknownSessionError):
        engine.session(SessionId("s1"))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no session"),
        ({"id": "x"}, "is no session"),
        ({"id": "x", "messages": [{"role": "user"}]}, r"messages\[0\]\.content"),
        ({"id": "x", "messages": []}, "is empty"),
        ({"id": "x", "messages": conversation(1), "tools": [{}]}, r"tools\[0\]"),
        ({"id": "good", "messages": conversation(1)}, "occurs twice"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: Any, problem: str) -> None:
    path = write(tmp_path / "bad.jsonl", {"id": "good", "messages": conversation(1)}, "", line)
    with pytest.raises(InvalidFileError, match=problem) as error:
        load_sessions(path)
    assert str(error.value).startswith(f"{path}:3: ")


def test_files_that_cannot_be_read_or_hold_nothing_are_named(tmp_path: Path) -> None:
    for path, reader in ((tmp_path / "none.jsonl", load_sessions), (tmp_path / "none.txt", read_ids)):
        with pytest.raises(InvalidFileError, match="cannot be read"):
            reader(path)
    with pytest.raises(InvalidFileError, match="holds no session;"):
        load_sessions(write(tmp_path / "empty.jsonl"))
    with pytest.raises(InvalidFileError, match="'b'"):
        load_sessions(write(tmp_path / "one.jsonl", {"id": "a", "messages": conversation(1)}), ids=["b"])


def test_text_with_other_line_separators_stays_on_its_line(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "one\u2028two\x85three"}, {"role": "assistant", "content": "Yes."}]
    line = json.dumps({"id": "a", "messages": messages}, ensure_ascii=False)
    [session] = load_sessions(write(tmp_path / "s.jsonl", line))
    assert session.messages[0]["content"] == "one\u2028two\x85three"
