"""Policies decide what becomes of closed turns: a snapshot in, decisions out; they look and never free."""

from turnkv.policy.decide import Drop, Size, Snapshot, TurnSnapshot, decide
from turnkv.policy.files import load_policy, parse_policy, parse_size, preset_names
from turnkv.policy.policy import FULL, Keep, Policy, Window
from turnkv.policy.precision import Form, Old, Precision

__all__ = [
    "FULL",
    "Drop",
    "Form",
    "Keep",
    "Old",
    "Policy",
    "Precision",
    "Size",
    "Snapshot",
    "TurnSnapshot",
    "Window",
    "decide",
    "load_policy",
    "parse_policy",
    "parse_size",
    "preset_names",
]
