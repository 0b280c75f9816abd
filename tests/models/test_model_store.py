"""A prepared model is complete or absent: killed runs, other processes, damage and full disks."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from turnkv.errors import ModelFilesError
from turnkv.models import resolve_model, weights

KILLED_WHILE_WRITING = """
import os, signal, sys
from turnkv.models import resolve_model, weights
original, calls = weights.round_to_bf16, []
def die(values):
    calls.append(1)
    if len(calls) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(values)
weights.round_to_bf16 = die
resolve_model(sys.argv[1], progress=print)
"""
CONVERTED = "import sys; from turnkv.models import resolve_model; resolve_model(sys.argv[1], progress=print)"


def _folders(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.is_dir())


def test_a_ready_model_is_found_without_a_word(tiny_gguf: Path, lines: list[str]) -> None:
    first = resolve_model(str(tiny_gguf), progress=lines.append)
    assert lines == ["converting tiny.gguf to safetensors (bf16)"]
    assert resolve_model(str(tiny_gguf), progress=lines.append) == first
    assert len(lines) == 1


def test_a_changed_file_is_another_model(tiny_gguf: Path, lines: list[str]) -> None:
    first = resolve_model(str(tiny_gguf), progress=lines.append).path
    os.utime(tiny_gguf, ns=(1, 1))
    assert resolve_model(str(tiny_gguf), progress=lines.append).path != first


def test_a_run_killed_while_writing_is_said_and_redone(tiny_gguf: Path, cache: Path, lines: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_WHILE_WRITING, str(tiny_gguf)], check=False)
    assert done.returncode == -signal.SIGKILL
    (unfinished,) = _folders(cache)
    assert unfinished.endswith(".unfinished")
    folder = resolve_model(str(tiny_gguf), progress=lines.append).path
    assert "a run was stopped" in lines[0]
    assert lines[1].startswith("converting")
    assert _folders(cache) == [folder.name]


def test_a_second_process_says_that_it_waits_and_then_finds_the_model(
    tiny_gguf: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-u", "-c", CONVERTED, str(tiny_gguf)]
    started: list[subprocess.Popen[str]] = []
    original = weights.round_to_bf16

    def meanwhile(values: Any) -> Any:
        if not started:
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert started[0].stdout is not None
            assert "waiting" in started[0].stdout.readline()
        return original(values)

    monkeypatch.setattr(weights, "round_to_bf16", meanwhile)
    resolve_model(str(tiny_gguf), progress=lines.append)
    assert started[0].communicate()[0] == ""
    assert started[0].returncode == 0


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: _cut(folder / "model.safetensors"), "is damaged (model.safetensors has"),
        (lambda folder: (folder / "config.json").unlink(), "is damaged (config.json is missing)"),
        (lambda folder: (folder / "turnkv.json").write_text("{"), "turnkv.json is not readable"),
        (lambda folder: (folder / "turnkv.json").write_text("[]"), "turnkv.json is not readable"),
        (lambda folder: (folder / "turnkv.json").unlink(), "turnkv.json is missing"),
    ],
)
def test_a_damaged_folder_is_said_and_made_again(tiny_gguf: Path, lines: list[str], damage: Any, said: str) -> None:
    folder = resolve_model(str(tiny_gguf), progress=lines.append).path
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    lines.clear()
    damage(folder)
    assert resolve_model(str(tiny_gguf), progress=lines.append).path == folder
    assert said in lines[0]
    assert "making it again" in lines[0]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == good


def test_a_folder_of_an_older_converter_is_made_again(tiny_gguf: Path, lines: list[str]) -> None:
    folder = resolve_model(str(tiny_gguf), progress=lines.append).path
    manifest = json.loads((folder / "turnkv.json").read_text())
    (folder / "turnkv.json").write_text(json.dumps({**manifest, "converter": 0}))
    lines.clear()
    resolve_model(str(tiny_gguf), progress=lines.append)
    assert "another version of turnkv" in lines[0]


def _full(*args: object, **options: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("owner", "name"), [(weights, "round_to_bf16"), (json, "dumps"), (os, "fsync")], ids=lambda x: str(x)[:16]
)
def test_a_disk_that_fills_up_is_named_with_the_bytes_needed(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, lines: list[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _full)
        with pytest.raises(ModelFilesError, match=r"disk that holds .*models is full: about [\d,]+ bytes are needed"):
            resolve_model(str(tiny_gguf), progress=lines.append)
    assert _folders(cache) == []
    resolve_model(str(tiny_gguf), progress=lines.append)


def test_too_little_room_is_refused_before_anything_is_written(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ModelFilesError, match="is full"):
        resolve_model(str(tiny_gguf), progress=lines.append)
    assert lines == []
    assert _folders(cache) == []


def test_a_cache_that_cannot_be_written_is_named(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelFilesError, match="set XDG_CACHE_HOME"):
        resolve_model(str(tiny_gguf), progress=lines.append)


def test_an_interrupted_run_leaves_nothing_behind(
    tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    def interrupt(values: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "round_to_bf16", interrupt)
    with pytest.raises(KeyboardInterrupt):
        resolve_model(str(tiny_gguf), progress=lines.append)
    assert _folders(cache) == []
