"""What the user types becomes a folder, or a sentence that says what to do."""

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from turnkv.errors import ModelFilesError
from turnkv.models import resolve_model


def test_a_folder_with_a_configuration_is_itself(tmp_path: Path, lines: list[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    found = resolve_model(str(tmp_path), progress=lines.append)
    assert (found.path, found.name, lines) == (tmp_path, tmp_path.name, [])


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "name is empty"),
        ("  ", "name is empty"),
        ("./no-such-folder", "no such folder"),
        ("/no/such/folder", "no such folder"),
        ("a/b/c", "no such folder"),
        ("missing.gguf", "missing.gguf: No such file"),
        ("empty", "holds no config.json"),
        ("holder", "give the file .*weights.gguf itself"),
        ("folder.gguf", "is a folder; give the .gguf file itself"),
        ("notes.txt", "is a file but no .gguf"),
        ("bad name!", "neither a folder nor a hub name"),
        ("no-such-org/no-such-model", "check the name for a typo and the network, or unset HF_HUB_OFFLINE"),
    ],
)
def test_a_wrong_name_is_answered_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], name: str, complaint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "folder.gguf", "holder"):
        Path(folder).mkdir()
    Path("holder/weights.gguf").touch()
    Path("notes.txt").touch()
    with pytest.raises(ModelFilesError, match=complaint):
        resolve_model(name, progress=lines.append)


class Hub:
    """Stands for the hub: a snapshot folder, on disk or to be fetched, or an error."""

    def __init__(self, folder: Path, *, cached: bool = False, error: Exception | None = None) -> None:
        self.folder, self.cached, self.error = folder, cached, error

    def __call__(self, name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        assert "*.safetensors" in allow_patterns
        if local_files_only and not self.cached:
            raise errors.LocalEntryNotFoundError("not in the cache")
        if not local_files_only and self.error is not None:
            raise self.error
        return str(self.folder)


@pytest.mark.parametrize("cached", [True, False])
def test_a_hub_name_is_fetched_unless_it_is_whole_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], cached: bool
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(tmp_path, cached=cached))
    found = resolve_model("org/model", progress=lines.append)
    assert (found.path, found.name) == (tmp_path, "org/model")
    assert lines == ([] if cached else ["fetching org/model from the Hugging Face hub"])


def test_a_snapshot_that_lacks_a_shard_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "a.safetensors").touch()
    shards = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(shards))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(tmp_path, cached=True))
    with pytest.raises(ModelFilesError, match="with safetensors weights"):
        resolve_model("org/model", progress=lines.append)
    assert len(lines) == 1


def _http(kind: Any) -> Exception:
    error: Exception = kind.__new__(kind)
    return error


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (_http(errors.RepositoryNotFoundError), "the hub has no such model"),
        (_http(errors.GatedRepoError), "hf auth login"),
        (ConnectionError("refused"), "ConnectionError: refused"),
        (OSError(errno.ENOSPC, "No space left"), "is full"),
    ],
)
def test_each_failure_of_the_hub_names_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str], error: Exception, complaint: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(tmp_path, error=error))
    with pytest.raises(ModelFilesError, match=complaint):
        resolve_model("org/model", progress=lines.append)


def test_finding_a_model_imports_nothing_heavy() -> None:
    heavy = ("torch", "transformers", "numpy", "gguf", "huggingface_hub")
    script = f"import sys, turnkv.models.__main__; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"
