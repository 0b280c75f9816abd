"""Recorded sessions small enough for the tiny model, and `turnkv` called as a person would."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from turnkv.cli.app import app

Turnkv = Callable[..., Result]


@pytest.fixture
def turnkv(tiny_model_folder: Path) -> Turnkv:
    """Runs a command in this process; those that load a model get the tiny one."""

    def run(*arguments: object, stdin: str | None = None, columns: int = 100) -> Result:
        words = [str(argument) for argument in arguments]
        if words[0] in ("chat", "replay", "demo", "doctor", "eval"):
            words[1:1] = ["--model", str(tiny_model_folder), "--dtype", "float32"]
        return CliRunner(env={"COLUMNS": str(columns), "NO_COLOR": "1"}).invoke(app, words, input=stdin)

    return run


def session_line(session_id: str, num_turns: int, words: str = "hi") -> str:
    """A recorded session as a line of its file."""
    messages: list[dict[str, str]] = [{"role": "system", "content": "be brief"}]
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"{words} {turn}"})
        messages.append({"role": "assistant", "content": f"ok {turn}"})
    return json.dumps({"id": session_id, "messages": messages})


def write_sessions(path: Path, lines: Sequence[str]) -> Path:
    """A file of recorded sessions."""
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def narrow_policy(tmp_path: Path) -> Path:
    """A policy file that drops from the fourth closed turn on."""
    path = tmp_path / "narrow.toml"
    path.write_text("[window]\nhigh = 3\nlow = 1\n[keep]\nrecent = 1\n")
    return path
