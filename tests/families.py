"""Tiny random-weight models of every verified family, and a tokenizer for them."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


NEAR_TIES: dict[str, tuple[int, int]] = {}
"""By family: greedy choices whose first two logits lie within 1e-3, where two engines may differ, and tokens in all."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with a ChatML template; one token a byte, so that texts give many tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=260,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
    )


_BASE: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_WINDOWS = ["sliding_attention", "full_attention"] * 2


def _config(name: str, **own: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**(_BASE | own))


_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig"),
    "llama3-rope": _config(
        "LlamaConfig",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    ),
    "yarn": _config(
        "LlamaConfig",
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ),
    "qwen2": _config("Qwen2Config"),
    "qwen3": _config("Qwen3Config"),
    "qwen3-moe": _config("Qwen3MoeConfig", **_MOE),
    "mistral": _config("MistralConfig", sliding_window=24),
    "gemma2": _config(
        "Gemma2Config",
        sliding_window=24,
        layer_types=_WINDOWS,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        query_pre_attn_scalar=24,
    ),
    "gemma3": _config("Gemma3TextConfig", sliding_window=24, layer_types=_WINDOWS, query_pre_attn_scalar=24),
    "phi3": _config("Phi3Config", partial_rotary_factor=0.5),
    "smollm3": _config("SmolLM3Config", no_rope_layers=[1, 1, 1, 0]),
    "gpt-oss": _config(
        "GptOssConfig", sliding_window=24, layer_types=_WINDOWS, num_local_experts=4, num_experts_per_tok=2
    ),
}


def tiny_model(family: str, attn_implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    """The family's tiny model; always the same weights."""
    config = FAMILIES[family]()
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=dtype)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "bias")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval().requires_grad_(False)
