"""The prepared default model, end to end."""

import subprocess
import sys

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from turnkv.models import resolve_model
from turnkv.models.loading import load_model

pytestmark = pytest.mark.default_model


@pytest.fixture(scope="module")
def loaded() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    said: list[str] = []
    folder = resolve_model(None, progress=said.append)
    assert said == [], "run `make install` first"
    return load_model(folder.path, torch.float32)


def test_preparing_a_ready_model_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-m", "turnkv.models"], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_it_answers_a_plain_question(loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = loaded
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(reply)
    assert reply[-1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<|endoftext|><|im_start|><|im_end|>", [0, 1, 2]),
        ("  12", [256, 33, 34]),
    ],
)
def test_its_tokens_are_those_it_was_trained_on(
    loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase], text: str, ids: list[int]
) -> None:
    assert loaded[1](text)["input_ids"] == ids


@pytest.mark.parametrize("text", ["你好，世界", "def f(x):\n\treturn x  # 1", "👩‍👩‍👧 🎉", "3.14 ² Ⅷ", " \n\n  x\r\n"])
def test_any_text_comes_back_unchanged(loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase], text: str) -> None:
    tokenizer = loaded[1]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
