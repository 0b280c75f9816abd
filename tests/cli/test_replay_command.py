"""`turnkv replay`, by the tiny model: what is printed and written, and what an interruption leaves."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Turnkv, session_line, write_sessions

from turnkv.engine import Engine
from turnkv.engine.journal import load_journal
from turnkv.evaluate.results import ReplayResult


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    """Three short sessions."""
    return write_sessions(tmp_path / "s.jsonl", [session_line(name, 6) for name in ("a", "b", "c")])


def _without_times(path: Path) -> Any:
    raw = json.loads(path.read_text("utf-8"))
    del raw["totals"]["wall_s"]
    for session in raw["sessions"]:
        for turn in session["turns"]:
            del turn["ttft_s"]
    return raw


def test_a_replay_prints_a_table_and_writes_what_was_asked_for(
    turnkv: Turnkv, sessions: Path, tmp_path: Path, narrow_policy: Path
) -> None:
    out, journal, report = (tmp_path / name for name in ("r.json", "j.jsonl", "r.html"))
    result = turnkv(
        "replay", sessions, "--policy", narrow_policy, "--json", out, "--journal", journal, "--report", report
    )
    assert result.exit_code == 0, result.stderr
    assert "tiny" in result.stdout
    assert "under narrow" in result.stdout
    replayed = ReplayResult.read_json(out)
    assert [len(session.turns) for session in replayed.sessions] == [6, 6, 6]
    assert any(request.dropped_turns for session in replayed.sessions for request in session.turns)
    assert {event.kind for event in load_journal(tmp_path / "j-a.jsonl")} >= {"open", "extend", "drop"}
    assert report.read_text("utf-8").startswith("<!")
    assert "narrow: 18 requests" in result.stderr


@pytest.mark.parametrize("columns", [80, 100])
def test_the_table_fits_the_terminal(turnkv: Turnkv, sessions: Path, columns: int) -> None:
    result = turnkv("replay", sessions, columns=columns)
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "…" not in result.stdout


def test_limit_and_ids_choose_sessions(turnkv: Turnkv, sessions: Path, tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    ids.write_text("# only\nc\n")
    out = tmp_path / "r.json"
    assert turnkv("replay", sessions, "--ids", ids, "--json", out).exit_code == 0
    assert [session.id for session in ReplayResult.read_json(out).sessions] == ["c"]
    assert turnkv("replay", sessions, "--limit", 2, "--json", out).exit_code == 0
    assert [session.id for session in ReplayResult.read_json(out).sessions] == ["a", "b"]


def test_generate_writes_replies_of_at_most_the_tokens_asked_for(
    turnkv: Turnkv, sessions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r.json"
    result = turnkv("replay", sessions, "--limit", 1, "--mode", "generate", "--max-new-tokens", 4, "--json", out)
    assert result.exit_code == 0, result.stderr
    assert all(request.reply is not None for request in ReplayResult.read_json(out).sessions[0].turns)


def test_a_session_that_outruns_the_model_is_code_1_and_the_rest_is_written(turnkv: Turnkv, tmp_path: Path) -> None:
    lines = [session_line("long", 30, "a question of many words"), session_line("short", 2)]
    out = tmp_path / "r.json"
    result = turnkv("replay", write_sessions(tmp_path / "s.jsonl", lines), "--policy", "full", "--json", out)
    assert result.exit_code == 1
    assert "error: session long: turn" in result.stderr
    assert "after request" in result.stdout
    long, short = ReplayResult.read_json(out).sessions
    assert long.error is not None
    assert f"full: {len(long.turns) + 2} requests" in result.stderr
    assert len(short.turns) == 2


def test_a_killed_replay_goes_on_where_it_stopped(
    turnkv: Turnkv, sessions: Path, tmp_path: Path, tiny_model_folder: Path
) -> None:
    whole, out = tmp_path / "whole.json", tmp_path / "r.json"
    assert turnkv("replay", sessions, "--json", whole).exit_code == 0
    code = (
        "import os, signal\n"
        "from turnkv.engine import Engine\n"
        "calls, score = [], Engine.score\n"
        "def dying(*arguments, **options):\n"
        "    calls.append(arguments)\n"
        "    if len(calls) == 9: os.kill(os.getpid(), signal.SIGKILL)\n"  # in the middle of the second session
        "    return score(*arguments, **options)\n"
        "Engine.score = dying\n"
        "from turnkv.cli import main\n"
        "main()"
    )
    options = ["--model", str(tiny_model_folder), "--dtype", "float32", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", str(sessions), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    assert (tmp_path / "r.json.unfinished").exists()

    again = turnkv("replay", sessions, "--json", out)
    assert again.exit_code == 0, again.stderr
    assert "continuing a run that was interrupted: 1 session" in again.stderr
    assert not (tmp_path / "r.json.unfinished").exists()
    assert _without_times(out) == _without_times(whole)


def test_ctrl_c_says_what_was_kept(
    turnkv: Turnkv, sessions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, calls = Engine.score, []

    def interrupted(self: Engine, *arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return score(self, *arguments, **options)

    monkeypatch.setattr(Engine, "score", interrupted)
    result = turnkv("replay", sessions, "--json", tmp_path / "r.json")
    assert result.exit_code == 130
    last = result.stderr.splitlines()[-1]
    assert last.startswith("interrupted: the sessions that were finished are kept beside")
    assert turnkv("replay", sessions, "--json", tmp_path / "r.json").exit_code == 0


def test_a_full_disk_is_one_line_and_the_earlier_file_stays(
    turnkv: Turnkv, sessions: Path, tmp_path: Path, tiny_model_folder: Path
) -> None:
    """The limit on a file's size stands for the full disk; Python turns its signal into an error as well."""
    out = tmp_path / "r.json"
    assert turnkv("replay", sessions, "--limit", 1, "--json", out).exit_code == 0
    before = out.read_bytes()
    code = (
        "import resource, sys\n"
        "from turnkv.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "main()"
    )
    options = ["--model", str(tiny_model_folder), "--dtype", "float32", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", str(sessions), *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"error: {out}")
    assert "cannot be written (File too large)" in done.stderr
    assert "Traceback" not in done.stderr
    assert out.read_bytes() == before
