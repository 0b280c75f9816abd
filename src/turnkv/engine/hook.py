"""The hook into Hugging Face models: their attention layers call whatever step is in progress."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from turnkv.kernels import LayerStep

ATTENTION_NAME = "turnkv"
"""Models are loaded with this `attn_implementation`. Nothing is registered for masks: transformers then builds none."""


class AttentionStep(Protocol):
    """What a forward pass does at each attention layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """T tokens, H and G heads, D and E dims. query [H, T, D], key [G, T, D], value [G, T, E] → [T, H, E]."""
        ...

    def layer_step(self, layer: int) -> LayerStep:
        """What a fused layer, which calls its attention itself, needs to know."""
        ...


_STEP: ContextVar[AttentionStep] = ContextVar("turnkv_step")


@contextmanager
def step_in_progress(step: AttentionStep) -> Iterator[None]:
    """Direct the attention layers of a forward pass inside this block to `step`."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def current_step() -> AttentionStep:
    """What the forward pass that is in progress does at its layers."""
    return _STEP.get()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    out = current_step().attend(module.layer_idx, query[0], key[0], value[0], options)  # type: ignore[arg-type]
    return out.unsqueeze(0), None


AttentionInterface.register(ATTENTION_NAME, _attention)
