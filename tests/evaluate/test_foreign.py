import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.families import tiny_model, tiny_tokenizer

from turnkv.errors import TurnKVError
from turnkv.evaluate.foreign import ENVIRONMENT, ForeignCache, foreign_cache

Started = Callable[[str, Path, Path], ForeignCache]

PREFIX = [5 + i * 7 % 200 for i in range(60)]
TAIL = [9, 30, 41, 77, 101]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tiny_model("llama", "eager", torch.float32)
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """One that has transformers: this one's."""
    (tmp_path / "own" / "bin").mkdir(parents=True)
    script = tmp_path / "own" / "bin" / "python"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return tmp_path / "own"


@pytest.fixture
def started() -> Iterator[Started]:
    """Starts caches, and ends them with the test."""
    caches: list[ForeignCache] = []

    def start(name: str, folder: Path, environment: Path) -> ForeignCache:
        caches.append(foreign_cache(name, folder, dtype="float32", environment=environment))
        return caches[-1]

    yield start
    for cache in caches:
        cache.close()


def test_the_dynamic_cache_gives_the_logits_of_a_plain_forward_and_stays_as_it_is(
    folder: Path, environment: Path, started: Started
) -> None:
    cache = started("hf:dynamic", folder, environment)
    held = cache.hold(PREFIX)
    with torch.inference_mode():
        model = tiny_model("llama", "eager", torch.float32)
        wanted = model(torch.tensor([PREFIX + TAIL])).logits[0, -4:-1]
    for _ in range(2):
        torch.testing.assert_close(held.score(TAIL, 3), wanted, atol=1e-4, rtol=0)
    config = model.config
    layers, heads, dim = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
    assert held.kv_bytes == 2 * layers * heads * dim * 4 * len(PREFIX)


@pytest.mark.parametrize("name", ["hf:best", "kvpress:snapkv", "kvpress:snapkv@1.5", "kvpress:nobody@0.5", "vllm"])
def test_an_unknown_name_is_refused_with_what_is_known(name: str, folder: Path) -> None:
    with pytest.raises(TurnKVError, match="is unknown; give hf:dynamic"):
        foreign_cache(name, folder, dtype="float32")


def test_a_missing_environment_is_named_with_its_remedy(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TurnKVError, match="call make peers"):
        foreign_cache("hf:dynamic", folder, dtype="float32", environment=tmp_path / "none")


def test_a_package_that_is_missing_ends_it_with_what_it_said(folder: Path, environment: Path) -> None:
    script = environment / "bin" / "python"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -I -c \"raise SystemExit('no module kvpress')\"\n")
    with pytest.raises(TurnKVError, match="no module kvpress; call make peers"):
        foreign_cache("kvpress:snapkv@0.5", folder, dtype="float32", environment=environment)


@pytest.mark.skipif(not (ENVIRONMENT / "bin/python").exists(), reason="call make peers")
@pytest.mark.parametrize("method", ["streaming_llm", "snapkv", "expected_attention", "keydiff"])
def test_a_kvpress_method_keeps_its_share_of_the_bytes_and_answers_otherwise(
    method: str, folder: Path, started: Started
) -> None:
    config = json.loads((folder / "config.json").read_text())
    token_bytes = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4
    prefix = PREFIX * 4
    held = started(f"kvpress:{method}@0.5", folder, ENVIRONMENT).hold(prefix)
    assert abs(held.kv_bytes - token_bytes * len(prefix) / 2) <= token_bytes
    whole = started("hf:dynamic", folder, ENVIRONMENT).hold(prefix)
    assert not torch.allclose(held.score(TAIL, 3), whole.score(TAIL, 3), atol=1e-4)
