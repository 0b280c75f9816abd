"""Policies decide what becomes of closed turns: a snapshot in, decisions out; they look and never free."""

from turnkv.policy.decide import Drop, Snapshot, TurnSnapshot, decide
from turnkv.policy.files import load_policy, parse_policy, parse_size, preset_names
from turnkv.policy.policy import FULL, Keep, Policy, Window

__all__ = [
    "FULL",
    "Drop",
    "Keep",
    "Policy",
    "Snapshot",
    "TurnSnapshot",
    "Window",
    "decide",
    "load_policy",
    "parse_policy",
    "parse_size",
    "preset_names",
]
