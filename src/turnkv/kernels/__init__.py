"""Kernels compute attention over a view, one contract with exchangeable bodies; they never allocate or decide."""

from turnkv.kernels import cpu, reference
from turnkv.kernels.contract import (
    BODIES,
    AttentionBody,
    Batch,
    LayerAttention,
    LayerStep,
    SequenceView,
    default_body,
    register,
)
from turnkv.kernels.rotation import Rotation

__all__ = [
    "BODIES",
    "AttentionBody",
    "Batch",
    "LayerAttention",
    "LayerStep",
    "Rotation",
    "SequenceView",
    "cpu",
    "default_body",
    "reference",
    "register",
]
