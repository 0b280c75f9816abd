"""Kernels compute attention over a view, one contract with exchangeable bodies; they never allocate or decide."""

from turnkv.kernels import flash, reference
from turnkv.kernels.contract import BODIES, AttentionBody, LayerAttention, SequenceView, register
from turnkv.kernels.rotation import Rotation

__all__ = ["BODIES", "AttentionBody", "LayerAttention", "Rotation", "SequenceView", "flash", "reference", "register"]
