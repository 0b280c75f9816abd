"""The engine runs Hugging Face models over views: sessions, matching, steps and sampling; it never decides drops."""

from turnkv.engine.engine import Engine
from turnkv.engine.request import Generation, Reply, Request, Score, Scoring, Usage
from turnkv.engine.runner import Chunk, ModelRunner
from turnkv.engine.session import Session
from turnkv.engine.stats import CacheStats

__all__ = [
    "CacheStats",
    "Chunk",
    "Engine",
    "Generation",
    "ModelRunner",
    "Reply",
    "Request",
    "Score",
    "Scoring",
    "Session",
    "Usage",
]
