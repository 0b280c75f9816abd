"""`turnkv chat`, its lines piped in, by the tiny model."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Turnkv

from turnkv.engine import Engine

SHORT = ("--max-new-tokens", 4)


def _turns(stdout: str) -> list[list[str]]:
    """The rows of the last `/turns`: turn, kind, messages, tokens, held, KV, its unit, tier, age, state."""
    lines = stdout.splitlines()
    start = max(index for index, line in enumerate(lines) if line.split()[:2] == ["turn", "kind"])
    rows = [line.split() for line in lines[start + 1 :]]
    return [row for row in rows if row and (row[0].isdigit() or row[0] == "–") and len(row) >= 9]


def test_a_chat_answers_each_line_and_says_what_it_cost(turnkv: Turnkv) -> None:
    result = turnkv("chat", *SHORT, stdin="hello\nand now\n")
    assert result.exit_code == 0, result.stderr
    first, second = [line for line in result.stdout.splitlines() if "first token" in line]
    assert "cached 0 ·" in first
    assert "cached 0 ·" not in second
    assert "KV" in second


def test_the_system_text_is_the_head(turnkv: Turnkv) -> None:
    result = turnkv("chat", *SHORT, "--system", "be brief", stdin="hello\n/turns\n")
    head, turn = _turns(result.stdout)
    assert head[:2] == ["–", "head"]
    assert head[-1] == "kept"
    assert turn[:3] == ["0", "chat", "2"]
    assert turn[-3:] == ["exact", "0", "open"]


def test_a_turn_can_be_forgotten_and_the_talk_goes_on(turnkv: Turnkv) -> None:
    result = turnkv("chat", *SHORT, stdin="a\nb\nc\n/forget 0\nd\n/turns\n")
    assert result.exit_code == 0, result.stderr
    assert "forgot turn 0:" in result.stdout
    assert _turns(result.stdout)[1][-1] == "dropped"


def test_turns_can_be_dropped_and_pinned_by_hand(turnkv: Turnkv) -> None:
    result = turnkv("chat", *SHORT, stdin="a\nb\nc\n/drop 0\n/pin 1\n/turns\n/unpin 1\n/turns\n")
    assert result.exit_code == 0, result.stderr
    assert "dropped turn 0:" in result.stdout
    _, first, second, third = _turns(result.stdout.split("no longer pinned")[0])
    assert (first[4], first[-1]) == ("0", "dropped")
    assert (second[-1], third[-1]) == ("pinned", "open")
    assert _turns(result.stdout)[2][-1] == "closed"


def test_the_policy_can_be_shown_and_switched_and_the_session_stays(turnkv: Turnkv, narrow_policy: Path) -> None:
    lines = "".join(f"line {i}\n" for i in range(5))
    result = turnkv(
        "chat", *SHORT, "--policy", "full", stdin=f"{lines}/policy\n/policy {narrow_policy}\nmore\n/turns\n"
    )
    assert result.exit_code == 0, result.stderr
    assert "full: keeps every turn" in result.stdout
    assert "narrow: over 3 closed turns down to 1" in result.stdout
    assert "dropped now: turns 0–3" in result.stdout
    assert [row[-1] for row in _turns(result.stdout)[1:]] == ["dropped"] * 4 + ["closed", "open"]


def test_a_switch_to_no_policy_changes_nothing(turnkv: Turnkv) -> None:
    result = turnkv("chat", *SHORT, stdin="/policy no-such\n/policy\nhello\n")
    assert result.exit_code == 1
    assert "error: policy 'no-such'" in result.stderr
    assert "balanced: over 12" in result.stdout
    assert "first token" in result.stdout


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/turns", "no turns yet"),
        ("/drop 0", "no turns yet"),
        ("/no-such", "no command"),
        ("hello\n/drop x", "needs the number"),
        ("hello\n/drop 0", "cannot be dropped"),
        ("hello\n/pin 9", "cannot be pinned"),
        ("word " * 600, "positions"),
    ],
)
def test_a_wrong_line_is_one_line_of_error_and_the_chat_goes_on(turnkv: Turnkv, line: str, complaint: str) -> None:
    result = turnkv("chat", *SHORT, "--policy", "full", stdin=f"{line}\nstill there\n")
    assert result.exit_code == 1
    assert complaint in result.stderr
    assert result.stdout.count("first token") == 1 + line.startswith("hello")


def test_quit_leaves_at_once_and_help_lists_the_commands(turnkv: Turnkv) -> None:
    result = turnkv("chat", stdin="/help\n\n/quit\nnever answered\n")
    assert result.exit_code == 0
    assert "/policy [NAME]" in result.stdout
    assert "first token" not in result.stdout


def test_ctrl_c_takes_a_reply_back_and_keeps_the_session(turnkv: Turnkv, monkeypatch: pytest.MonkeyPatch) -> None:
    step, steps = Engine.step, []

    def interrupted(self: Engine) -> Any:
        steps.append(1)
        if len(steps) == 6:  # the second token of the second reply
            os.kill(os.getpid(), signal.SIGINT)
        step(self)
        self.check()

    monkeypatch.setattr(Engine, "step", interrupted)
    result = turnkv("chat", *SHORT, stdin="one\ntwo\nthree\n/turns\n")
    assert result.exit_code == 0, result.stderr
    assert "cancelled" in result.stderr
    assert [row[0] for row in _turns(result.stdout)] == ["–", "0", "1"]
    assert "cached 0 ·" not in [line for line in result.stdout.splitlines() if "first token" in line][1]
