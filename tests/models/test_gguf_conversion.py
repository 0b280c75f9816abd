"""GGUF files become what transformers' own reader makes of them, rounded to bf16."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from turnkv.errors import ModelFilesError
from turnkv.models import resolve_model, weights
from turnkv.models.loading import load_model

GgufMaker = Callable[..., Path]


def _silent(line: str) -> None: ...


@pytest.mark.parametrize("tied", [True, False])
def test_weights_equal_those_that_transformers_reads(make_gguf: GgufMaker, tied: bool) -> None:
    gguf = make_gguf(tied=tied)
    folder = resolve_model(str(gguf), progress=_silent).path
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    theirs = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    ours = load_file(folder / "model.safetensors")
    assert ("lm_head.weight" in ours) is not tied
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name].to(torch.bfloat16)), name
    assert set(ours) == set(theirs)


def test_the_converted_model_computes_the_same_logits(tiny_gguf: Path) -> None:
    folder = resolve_model(str(tiny_gguf), progress=_silent).path
    model, tokenizer = load_model(folder, torch.float32)
    reference = AutoModelForCausalLM.from_config(model.config)
    tensors = load_gguf_checkpoint(str(tiny_gguf), return_tensors=True, model_to_load=reference)["tensors"]
    reference.load_state_dict({name: t.to(torch.bfloat16).float() for name, t in tensors.items()}, strict=False)
    ids = tokenizer("the 12  34 then", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, reference.eval()(ids).logits, rtol=0, atol=0)


def test_the_configuration_comes_from_the_metadata(tiny_gguf: Path) -> None:
    folder = resolve_model(str(tiny_gguf), progress=_silent).path
    config = json.loads((folder / "config.json").read_text())
    theirs = load_gguf_checkpoint(str(tiny_gguf))["config"]
    for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        assert config[key] == theirs[key]
    assert config["rope_parameters"]["rope_theta"] == theirs["rope_theta"] == 100000.0
    assert config["rms_norm_eps"] == 1e-5
    assert config["eos_token_id"] == 2


def test_every_token_that_ends_a_turn_ends_a_reply(make_gguf: GgufMaker) -> None:
    gguf = make_gguf(metadata=lambda writer: writer.add_eot_token_id(0))
    folder = resolve_model(str(gguf), progress=_silent).path
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [0, 2]


@pytest.mark.parametrize("chunk", [1, 64, 1000])
def test_chunked_dequantisation_gives_the_same_file(
    make_gguf: GgufMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    whole = resolve_model(str(make_gguf(tmp_path / "whole.gguf")), progress=_silent).path
    monkeypatch.setattr(weights, "_CHUNK_ELEMENTS", chunk)
    pieces = resolve_model(str(make_gguf(tmp_path / "pieces.gguf")), progress=_silent).path
    assert (whole / "model.safetensors").read_bytes() == (pieces / "model.safetensors").read_bytes()


def test_rounding_to_bf16_equals_torchs() -> None:
    generator = np.random.default_rng(0)
    values = generator.integers(0, 2**32, 100_000, dtype=np.uint32).view(np.float32)
    edges = np.array([0.0, -0.0, 1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1e-40, -3.0e38], dtype=np.float32)
    values = np.concatenate([values[np.isfinite(values)], edges])
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(weights.round_to_bf16(values), theirs)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("the  12", ["t", "he", "ĠĠ", "1", "2"]),
        (" the12", ["Ġthe", "1", "2"]),
        ("²Ⅷ", ["Â", "²", "â", "ħ", "§"]),
        ("<|im_start|>1<|im_end|>", ["<|im_start|>", "1", "<|im_end|>"]),
    ],
)
def test_digits_stand_alone_as_in_llama_cpp(tiny_gguf: Path, text: str, pieces: list[str]) -> None:
    _, tokenizer = load_model(resolve_model(str(tiny_gguf), progress=_silent).path, torch.float32)
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    "text", ["Hello, the  world's", "你好，世界", "x =\n\t\t[]  ", "👩‍👩‍👧 🎉", "a\r\n\r\nb", "\u00a0\u2003é", ""]
)
def test_text_without_numbers_is_split_as_transformers_does(tiny_gguf: Path, text: str) -> None:
    _, tokenizer = load_model(resolve_model(str(tiny_gguf), progress=_silent).path, torch.float32)
    architecture, description, _ = get_gguf_tokenizer(str(tiny_gguf))
    theirs, _ = convert_gguf_tokenizer(architecture, description)
    assert tokenizer(text)["input_ids"] == theirs.encode(text).ids


def test_the_chat_template_and_special_tokens_come_along(tiny_gguf: Path) -> None:
    _, tokenizer = load_model(resolve_model(str(tiny_gguf), progress=_silent).path, torch.float32)
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<|im_start|>x<|im_end|>"
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


def test_known_splittings_of_other_models_are_left_to_transformers(make_gguf: GgufMaker) -> None:
    folder = resolve_model(str(make_gguf(pre="llama-bpe")), progress=_silent).path
    _, tokenizer = load_model(folder, torch.float32)
    assert tokenizer.convert_ids_to_tokens(tokenizer("12")["input_ids"]) == ["12"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"pre": "no-such-splitting"}, "'no-such-splitting'"),
        ({"extra_tensor": "rope_freqs.weight"}, "rope_freqs.weight"),
        ({"broken": True}, "not finite"),
    ],
)
def test_what_would_answer_wrongly_is_refused(
    make_gguf: GgufMaker, cache: Path, options: dict[str, object], complaint: str
) -> None:
    gguf = make_gguf(**options)
    with pytest.raises(ModelFilesError, match=complaint):
        resolve_model(str(gguf), progress=_silent)
    assert [path for path in (cache / "models").iterdir() if path.is_dir()] == []


def test_a_scaled_rope_is_refused_by_name(make_gguf: GgufMaker) -> None:
    gguf = make_gguf(metadata=lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"))
    with pytest.raises(ModelFilesError, match="rope scaling 'yarn'"):
        resolve_model(str(gguf), progress=_silent)


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -1000])
def test_a_cut_off_file_is_called_unreadable(tiny_gguf: Path, keep: int) -> None:
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:keep])
    with pytest.raises(ModelFilesError, match="not a readable GGUF file"):
        resolve_model(str(tiny_gguf), progress=_silent)


def test_other_architectures_are_left_to_transformers(make_gguf: GgufMaker) -> None:
    gguf = make_gguf(architecture="qwen2", pre="qwen2")
    if find_spec("accelerate") is None:  # transformers wants it for GGUF files; turnkv does not depend on it
        with pytest.raises(ModelFilesError, match="pip install accelerate"):
            resolve_model(str(gguf), progress=_silent)
        return
    model, tokenizer = load_model(resolve_model(str(gguf), progress=_silent).path, torch.float32)
    assert model.config.model_type == "qwen2"
    theirs = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    for name, tensor in model.state_dict().items():
        if name in theirs:
            assert torch.equal(tensor, theirs[name].to(torch.bfloat16).float()), name
    assert tokenizer.decode(tokenizer("the 12")["input_ids"]) == "the 12"
