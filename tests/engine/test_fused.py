"""Fused layers: which are put in place, what they compute, and what stays the model's own."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from tests.engine.conversations import conversation, score_all, tiny_engine
from tests.families import _BASE, FAMILIES, tiny_model, tiny_tokenizer
from tests.tolerances import LOGITS
from torch import nn
from transformers import AutoModelForCausalLM

from turnkv.config import CacheConfig
from turnkv.engine import Engine, ModelRunner
from turnkv.engine.fused import FusedLayer
from turnkv.errors import InvalidConfigError
from turnkv.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.isas(), reason="the C++ kernels were not built")

MIXTURES = {"qwen3-moe", "gpt-oss"}
MESSAGES = conversation(4)


def random_model(config: Any, attn_implementation: str = "turnkv") -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def engine_over(runner: ModelRunner) -> Engine:
    return Engine(runner, tiny_tokenizer(), name="tiny", cache=CacheConfig(budget_bytes=32 * 2**20))


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    cpu.use_isa(request.param)
    yield request.param
    cpu.use_isa(None)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_verified_family_is_fused_but_for_mixtures_of_experts(family: str, dtype: torch.dtype) -> None:
    fusion = ModelRunner(tiny_model(family, "turnkv", dtype)).fusion
    assert fusion.num_fused == fusion.num_layers == 4
    assert fusion.has_fused_mlps == (family not in MIXTURES)
    assert fusion.has_fused_head


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_fused_logits_equal_the_models_own_code(family: str) -> None:
    _, fused = score_all(engine_over(ModelRunner(tiny_model(family, "turnkv"))), MESSAGES)
    _, own = score_all(engine_over(ModelRunner(tiny_model(family, "turnkv"), is_fused=False)), MESSAGES)
    torch.testing.assert_close(fused, own, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("isa", cpu.isas(), indirect=True)
@pytest.mark.parametrize(
    "odd", [{"intermediate_size": 72}, {"hidden_size": 40}, {"head_dim": 10}, {"num_key_value_heads": 1}], ids=str
)
def test_sizes_that_fill_no_panel_are_computed_right_on_every_instruction_set(isa: str, odd: dict[str, int]) -> None:
    config = transformers.LlamaConfig(**(_BASE | odd))
    runner = ModelRunner(random_model(config))
    assert runner.fusion.num_fused == 4
    _, fused = score_all(engine_over(runner), MESSAGES)
    _, own = score_all(engine_over(ModelRunner(random_model(config), is_fused=False)), MESSAGES)
    torch.testing.assert_close(fused, own, atol=LOGITS, rtol=0)


def test_a_layer_with_something_more_than_the_known_parts_stays_the_models_own() -> None:
    """Granite's layers have Llama's modules, and scale what they add."""
    runner = ModelRunner(random_model(transformers.GraniteConfig(**_BASE, residual_multiplier=0.5)))
    assert runner.fusion.num_fused == 0
    same = ModelRunner(random_model(transformers.GraniteConfig(**_BASE, residual_multiplier=1.0)))
    assert same.fusion.num_fused == 4


def test_one_damaged_layer_among_others_is_found_by_comparison() -> None:
    model = tiny_model("llama", "turnkv")
    layer = model.model.layers[2]
    layer.mlp.register_forward_hook(lambda module, given, out: out * 1.01)
    runner = ModelRunner(model)
    assert runner.fusion.num_fused == 3
    assert model.model.layers[2] is layer
    assert isinstance(model.model.layers[1], FusedLayer)


def test_an_unknown_activation_leaves_the_mlp_to_the_model() -> None:
    fusion = ModelRunner(random_model(transformers.LlamaConfig(**_BASE, hidden_act="relu"))).fusion
    assert fusion.num_fused == 4
    assert not fusion.has_fused_mlps
    assert str(fusion) == "4 of 4 layers (attention only), output head"


def test_tied_embeddings_are_held_once() -> None:
    model = random_model(transformers.LlamaConfig(**_BASE, tie_word_embeddings=True))
    embedding = model.get_input_embeddings().weight.clone()
    runner = ModelRunner(model)
    ids = torch.tensor([[0, 5, 271]])
    assert torch.equal(model.get_input_embeddings()(ids)[0], embedding[ids[0]])
    assert runner.num_tokens == 272
    assert not [module for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)]


def test_int8_weights_change_logits_a_little_and_are_half_of_bf16() -> None:
    own = ModelRunner(tiny_model("llama", "turnkv", torch.bfloat16))
    rounded = ModelRunner(tiny_model("llama", "turnkv", torch.bfloat16), weights="int8")
    sizes = [runner.model.model.layers[0].block.num_bytes for runner in (own, rounded)]
    assert 0.5 < sizes[1] / sizes[0] < 0.6
    _, want = score_all(tiny_engine(), MESSAGES)
    _, got = score_all(engine_over(ModelRunner(tiny_model("llama", "turnkv"), weights="int8")), MESSAGES)
    assert 1e-3 < float((got - want).std()) < 0.1 * float(want.std())


def test_only_known_forms_of_weights_are_taken() -> None:
    with pytest.raises(InvalidConfigError, match="give exact or int8"):
        ModelRunner(tiny_model("llama", "turnkv"), weights="int3")


def test_the_reference_body_keeps_the_models_own_layers() -> None:
    runner = ModelRunner(tiny_model("llama", "turnkv"), attention="reference")
    assert runner.fusion.num_fused == 0
    assert not runner.fusion.has_fused_head
