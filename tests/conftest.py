"""A temporary home for every test, and a tiny model that turnkv loads like any other."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Path | None:
    """An empty home for the test; the real one for those that need the prepared default model."""
    if request.node.get_closest_marker("default_model"):
        return None
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / ".cache"))
    return folder


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights (2 layers, 4 heads on 2, 512 positions), its tokenizer and a ChatML template."""
    import torch  # noqa: PLC0415 (tests that need no model start without it)
    from tests.families import tiny_tokenizer  # noqa: PLC0415 (likewise)
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 (likewise)

    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
        # Larger than usual, so that random weights tell tokens apart.
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder
