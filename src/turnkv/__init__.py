"""turnkv: a turn-aware KV cache for long agent conversations."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turnkv.config import CacheConfig, EngineConfig, SamplingParams
    from turnkv.engine import Engine, Reply, Score, Usage
    from turnkv.errors import TurnKVError
    from turnkv.policy import Policy, load_policy

__version__ = version("turnkv")

_HOMES = {
    "CacheConfig": "turnkv.config",
    "Engine": "turnkv.engine",
    "EngineConfig": "turnkv.config",
    "Policy": "turnkv.policy",
    "Reply": "turnkv.engine",
    "SamplingParams": "turnkv.config",
    "Score": "turnkv.engine",
    "TurnKVError": "turnkv.errors",
    "Usage": "turnkv.engine",
    "load_policy": "turnkv.policy",
}
"""Where each public name lives. Imported on first use, so that `turnkv --help` does not wait for torch."""

__all__ = [
    "CacheConfig",
    "Engine",
    "EngineConfig",
    "Policy",
    "Reply",
    "SamplingParams",
    "Score",
    "TurnKVError",
    "Usage",
    "__version__",
    "load_policy",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
