from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.engine.conversations import conversation, reply_rows, score_all
from tests.families import _BASE, tiny_tokenizer
from tests.tolerances import LOGITS
from torch import nn

from turnkv.engine import Engine, ModelRunner
from turnkv.engine.traits import refuse_unsupported
from turnkv.errors import OutOfPositionsError, UnsupportedModelError
from turnkv.policy import Keep, Policy, Window


def rope(kind: str, **own: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **own}}


def longrope(short: float, long: float) -> dict[str, Any]:
    own = {"short_factor": [short] * 8, "long_factor": [long] * 8, "factor": 4.0}
    return rope("longrope", original_max_position_embeddings=1024, **own)


def config(name: str, **own: Any) -> Any:
    return getattr(transformers, name)(**own)


@pytest.mark.parametrize(
    ("name", "own", "trait"),
    [
        ("GPT2Config", {}, "learned positions"),
        ("OPTConfig", {}, "learned positions"),
        ("BloomConfig", {}, "ALiBi"),
        ("MptConfig", {}, "ALiBi"),
        ("FalconConfig", {"alibi": True}, "ALiBi"),
        ("MambaConfig", {}, "state-space"),
        ("JambaConfig", {}, "state-space"),
        ("Qwen3NextConfig", {}, "state-space"),
        ("T5Config", {}, "encoder-decoder"),
        ("DeepseekV3Config", {}, "MLA"),
        ("Qwen2VLTextConfig", rope("default", mrope_section=[2, 3, 3]), "M-RoPE"),
        ("LlamaConfig", rope("dynamic", factor=2.0), "dynamic NTK"),
        ("Phi3Config", _BASE | longrope(1.0, 2.0), "LongRoPE"),
        ("Llama4TextConfig", {}, "temperature"),
        ("Gemma3nTextConfig", {}, "other layers"),
    ],
)
def test_models_that_cannot_be_served_faithfully_are_refused_by_name(
    name: str, own: dict[str, Any], trait: str
) -> None:
    model = config(name, **own)
    with pytest.raises(UnsupportedModelError, match=trait) as error:
        refuse_unsupported(model.get_text_config())
    assert model.get_text_config().model_type in str(error.value)
    assert "; " in str(error.value), "a remedy follows"


def models(name: str, attn_implementation: str, **own: Any) -> Any:
    torch.manual_seed(7)
    made = transformers.AutoModelForCausalLM.from_config(
        config(name, **(_BASE | own)), attn_implementation=attn_implementation, dtype=torch.float32
    )
    return made.eval().requires_grad_(False)


UNLISTED = [
    ("CohereConfig", {}),
    ("Cohere2Config", {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    ("GlmConfig", {}),
    ("Olmo2Config", {}),
    ("StableLmConfig", {}),
    ("GraniteConfig", {"attention_multiplier": 0.2}),
    ("Phi3Config", longrope(1.5, 1.5)),
]


@pytest.mark.parametrize(("name", "own"), UNLISTED)
def test_a_family_that_nobody_listed_is_served_if_it_passes_the_probe(name: str, own: dict[str, Any]) -> None:
    runner = ModelRunner(models(name, "turnkv", **own))
    assert runner.can_shift
    engine = Engine(runner, tiny_tokenizer(), name=name)
    score, got = score_all(engine, conversation(2, with_tools=False))
    tokens, rows = reply_rows(engine, score.session_id)
    want = models(name, "eager", **own)(torch.tensor([tokens])).logits[0, rows]
    torch.testing.assert_close(got, want, atol=LOGITS, rtol=0)


def test_interleaved_and_half_rotations_are_told_apart() -> None:
    layouts = {}
    for name in ("CohereConfig", "LlamaConfig"):
        rotation = ModelRunner(models(name, "turnkv")).layers[0].attention.rotation
        assert rotation is not None
        layouts[name] = rotation.layout
    assert layouts == {"CohereConfig": "interleaved", "LlamaConfig": "half"}


class _OwnAttention(nn.Module):
    """Attends by itself, as Falcon's does, and never asks transformers' interface."""

    def forward(self, hidden_states: Any, **options: Any) -> tuple[Any, None]:
        return hidden_states, None


def test_a_model_with_a_layer_that_attends_by_itself_is_refused() -> None:
    model = models("LlamaConfig", "turnkv")
    model.model.layers[2].self_attn = _OwnAttention()
    with pytest.raises(UnsupportedModelError, match=r"layers \[2\]"):
        ModelRunner(model)


class _OddRotary(nn.Module):
    """Angles that grow with the square of the position: no rotation by a distance explains them."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, x: Any, position_ids: Any) -> Any:
        return self.plain(x, position_ids**2)


def test_a_model_whose_positions_are_not_understood_never_shifts_and_says_so_when_they_run_out() -> None:
    model = models("LlamaConfig", "turnkv")
    model.model.rotary_emb = _OddRotary(model.model.rotary_emb)
    runner = ModelRunner(model)
    assert not runner.can_shift
    runner.max_positions = 200
    policy = Policy(name="narrow", window=Window(high=2, low=0), keep=Keep(recent=0))
    engine = Engine(runner, tiny_tokenizer(), name="odd", policy=policy)
    with pytest.raises(OutOfPositionsError, match="positions"):
        score_all(engine, conversation(8, with_tools=False))
    for session in engine._table:
        assert all(entry.offset == 0 for entry in session.view.entries)


def test_a_falcon_folder_is_refused_by_the_way_it_attends(tmp_path: Path) -> None:
    own = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    transformers.FalconForCausalLM(config("FalconConfig", alibi=False, **own)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"{tmp_path.name}: its attention does not go through"):
        ModelRunner.load(tmp_path, dtype="float32")
