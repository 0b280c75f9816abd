"""Which models are refused, by the traits of their configuration, before any weight is read."""

from collections.abc import Callable
from typing import Any

from turnkv.errors import UnsupportedModelError


def refuse_unsupported(config: Any) -> None:
    """Refuse the kinds of model whose cache cannot be edited faithfully.

    Raises:
        UnsupportedModelError: names the trait and the remedy.
    """
    for trait, is_present, remedy in _TRAITS:
        if is_present(config):
            raise UnsupportedModelError(f"model type {config.model_type!r} has {trait}; {remedy}")


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Every set of rotary parameters: one, or one a kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _rope_type(config: Any) -> set[str]:
    return {str(p.get("rope_type", p.get("type", "default"))) for p in _rope_parameters(config)}


def _has_layers(config: Any, *kinds: str) -> bool:
    layer_types = getattr(config, "layer_types", None) or ()
    return any(any(kind in layer for kind in kinds) for layer in layer_types)


def _is_unpinned_longrope(config: Any) -> bool:
    return any(
        p.get("rope_type", p.get("type")) == "longrope" and p.get("short_factor") != p.get("long_factor")
        for p in _rope_parameters(config)
    )


_STATEFUL = ("mamba", "rwkv", "jamba", "bamba", "zamba", "falcon_h1", "recurrent", "nemotron_h", "lfm2", "xlstm")
_LEARNED = ("gpt2", "gpt_bigcode", "opt", "gpt_neo", "openai-gpt", "xglm", "biogpt", "codegen_learned", "ctrl")
_EDITABLE = "serve it with an engine that only appends, or choose a model with rotary positions and a plain KV cache"

_TRAITS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("an encoder (encoder-decoder)", lambda c: bool(getattr(c, "is_encoder_decoder", False)), _EDITABLE),
    ("multi-head latent attention (MLA)", lambda c: getattr(c, "kv_lora_rank", None) is not None, _EDITABLE),
    (
        "state-space or recurrent layers",
        lambda c: (
            any(name in c.model_type for name in _STATEFUL)
            or _has_layers(c, "mamba", "linear_attention", "recurrent", "conv", "ssm")
        ),
        _EDITABLE,
    ),
    (
        "ALiBi positions",
        lambda c: bool(
            getattr(c, "alibi", False)
            or c.model_type in ("bloom", "mpt")
            or getattr(c, "position_embedding_type", "") == "alibi"
        ),
        _EDITABLE,
    ),
    ("learned positions", lambda c: c.model_type in _LEARNED, _EDITABLE),
    (
        "multimodal rotary positions (M-RoPE)",
        lambda c: any("mrope_section" in p for p in _rope_parameters(c)) or "mrope" in _rope_type(c),
        "use its text-only sibling",
    ),
    (
        "dynamic NTK rotary scaling, which changes with the prompt's length",
        lambda c: "dynamic" in _rope_type(c),
        'set rope_parameters to a fixed kind such as "yarn" or "linear" in its config.json',
    ),
    (
        "a temperature that depends on the position (Llama 4)",
        lambda c: (
            bool(getattr(c, "attn_temperature_tuning", False))
            or bool(getattr(getattr(c, "text_config", None), "attn_temperature_tuning", False))
        ),
        _EDITABLE,
    ),
    (
        "LongRoPE, whose factors change with the prompt's length",
        _is_unpinned_longrope,
        "pin them: give short_factor and long_factor of its rope_parameters the same values in its config.json",
    ),
    (
        "layers that read other layers' keys and values",
        lambda c: bool(getattr(c, "num_kv_shared_layers", 0)),
        _EDITABLE,
    ),
)
