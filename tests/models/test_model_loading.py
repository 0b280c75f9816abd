"""A folder becomes a model that computes and says nothing, or one sentence."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from turnkv.errors import ModelFilesError
from turnkv.models import resolve_model
from turnkv.models.loading import load_model


@pytest.fixture
def folder(tiny_gguf: Path, lines: list[str]) -> Path:
    """The tiny model, converted."""
    return resolve_model(str(tiny_gguf), progress=lines.append).path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loading_is_silent_and_ready_to_compute(
    folder: Path, dtype: torch.dtype, capfd: pytest.CaptureFixture[str]
) -> None:
    model, _ = load_model(folder, dtype, attn_implementation="eager")
    assert capfd.readouterr() == ("", "")
    assert model.dtype == dtype
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == "eager"


def test_missing_weights_are_never_made_up(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFilesError, match="lacks 1 of the model's weights"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize(
    ("name", "content"), [("model.safetensors", b"x"), ("config.json", b"{"), ("tokenizer.json", b"{")]
)
def test_a_damaged_file_is_one_sentence(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(ModelFilesError, match="could not be loaded"):
        load_model(folder, torch.float32)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_missing_file_is_one_sentence(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelFilesError, match=str(folder)):
        load_model(folder, torch.float32)


def test_an_unknown_attention_is_one_sentence(folder: Path) -> None:
    with pytest.raises(ModelFilesError, match="no_such_attention"):
        load_model(folder, torch.float32, attn_implementation="no_such_attention")
