"""The command line itself: help, version, errors, exit codes."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Turnkv, session_line, write_sessions


def _run(*arguments: str, stdout: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from turnkv.cli import main; main()", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
    )


def test_help_and_policies_import_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from turnkv.cli.app import app\n"
        "for words in (['--help'], ['replay', '--help'], ['--version'], ['policies']):\n"
        "    assert CliRunner().invoke(app, words).exit_code == 0, words\n"
        "print([name for name in ('torch', 'transformers', 'plotly') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", ["demo", "chat", "replay", "doctor", "policies"])
def test_every_command_explains_itself(turnkv: Turnkv, command: str) -> None:
    assert command in turnkv("--help").stdout


def test_the_version_is_the_packages(turnkv: Turnkv) -> None:
    assert turnkv("--version").stdout == "turnkv 0.1.0\n"


def test_policies_are_listed_each_with_what_it_does(turnkv: Turnkv) -> None:
    lines = turnkv("policies").stdout.splitlines()
    assert "full: keeps every turn" in lines
    assert any(line.startswith("window: over 12 closed turns down to 8") for line in lines)


@pytest.mark.parametrize("columns", [80, 100])
def test_no_line_of_help_is_wider_than_the_terminal(turnkv: Turnkv, columns: int) -> None:
    assert max(map(len, turnkv("--help", columns=columns).stdout.splitlines())) <= columns


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("replay", "no-such.jsonl"), "no-such.jsonl"),
        (("chat", "--policy", "no-such"), "no preset"),
        (("chat", "--budget", "lots"), "--budget = 'lots': is no size"),
        (("demo", "--session", "no-such"), "there are checkout-incident"),
        (("demo", "--policy", "full"), "compare another"),
    ],
)
def test_a_users_mistake_is_one_line_on_stderr(
    turnkv: Turnkv, arguments: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    result = turnkv(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    [line] = [line for line in result.stderr.splitlines() if not line.startswith("loading")]
    assert line.startswith("error: ")
    assert complaint in line


@pytest.mark.parametrize(
    "arguments", [("no-such",), ("replay",), ("replay", "x", "--mode", "y"), ("chat", "--dtype", "int3")]
)
def test_misuse_ends_with_code_2(turnkv: Turnkv, arguments: tuple[str, ...]) -> None:
    assert turnkv(*arguments).exit_code == 2


def test_a_missing_model_is_one_line_without_a_traceback(tmp_path: Path) -> None:
    sessions = write_sessions(tmp_path / "s.jsonl", [session_line("a", 1)])
    done = _run("replay", str(sessions), "--model", "./no-such-model")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ./no-such-model: there is no such folder")


def test_a_reader_that_goes_away_is_no_error() -> None:
    """`turnkv policies | true`."""
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -c 'from turnkv.cli import main; main()' policies | true"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
