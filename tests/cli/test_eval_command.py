"""`turnkv eval`, by the tiny model: what is printed and written, what is refused, and how a run continues."""

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Turnkv, session_line, write_sessions


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    return write_sessions(tmp_path / "s.jsonl", [session_line(name, 14, f"hi {name}") for name in ("a", "b", "c")])


def test_an_evaluation_prints_tables_and_writes_what_was_asked_for(
    turnkv: Turnkv, sessions: Path, tmp_path: Path, narrow_policy: Path
) -> None:
    out, report = tmp_path / "e.json", tmp_path / "report" / "e.html"
    result = turnkv(
        "eval", "--policy", narrow_policy, "--data", sessions, "--metrics", "session,leakage", "--json", out,
        "--report", report,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "oneshot" in result.stdout
    assert "online" in result.stdout
    found = json.loads(out.read_text("utf-8"))
    assert found["subjects"] == ["full", "narrow"]
    assert found["summary"]["online"]["narrow"]["kv_ratio"]["value"] < 1
    assert {item["kind"] for item in found["items"]} == {"session", "leakage"}
    assert not out.with_name("e.json.unfinished").exists()
    assert report.read_text("utf-8").startswith("<!")
    assert list(report.parent.glob("*.png"))


def test_the_explanation_names_each_turn_and_what_became_of_it(
    turnkv: Turnkv, sessions: Path, narrow_policy: Path
) -> None:
    result = turnkv("eval", "--policy", narrow_policy, "--data", sessions, "--explain", "b")
    assert result.exit_code == 0, result.stderr
    assert "dropped" in result.stdout
    assert "held: " in result.stdout
    assert "where replies became unlikely" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--metrics", "taste"), "--metrics 'taste' is unknown"),
        (("--protocol", "offline"), "--protocol 'offline' is unknown"),
        (("--explain", "nobody"), "hold no session 'nobody'"),
        (("--policy", "nowhere.toml"), "no preset and no file"),
        (("--text", "nowhere.txt"), "cannot be read"),
    ],
)
def test_what_cannot_be_followed_is_named_with_a_remedy(
    turnkv: Turnkv, sessions: Path, arguments: tuple[str, ...], problem: str
) -> None:
    result = turnkv("eval", "--data", sessions, *arguments)
    assert result.exit_code == 1
    assert problem in result.stderr.replace("\n", " ")


def test_bad_lines_stop_the_run_unless_they_are_to_be_skipped_and_are_counted(
    turnkv: Turnkv, sessions: Path, tmp_path: Path
) -> None:
    sessions.write_text(sessions.read_text("utf-8") + "{broken\n", "utf-8")
    result = turnkv("eval", "--data", sessions, "--policy", "window")
    assert result.exit_code == 1
    assert f"{sessions}:4" in result.stderr.replace("\n", "")
    out = tmp_path / "e.json"
    result = turnkv(
        "eval", "--data", sessions, "--policy", "window", "--skip-bad", "--metrics", "session", "--protocol", "oneshot",
        "--json", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert "1 bad lines were skipped" in result.stderr
    assert json.loads(out.read_text("utf-8"))["skipped"][0]["where"] == f"{sessions}:4"


def test_two_policies_of_one_name_are_refused(turnkv: Turnkv, sessions: Path, narrow_policy: Path) -> None:
    result = turnkv("eval", "--data", sessions, "--policy", narrow_policy, "--policy", narrow_policy)
    assert result.exit_code == 1
    assert "two policies have one name" in result.stderr
