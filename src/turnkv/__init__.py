"""turnkv: a turn-aware KV cache for long agent conversations."""

from importlib.metadata import version

from turnkv.config import CacheConfig, EngineConfig, SamplingParams
from turnkv.engine import Engine, Reply, Score, Usage
from turnkv.errors import TurnKVError
from turnkv.policy import Policy, load_policy

__version__ = version("turnkv")

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
