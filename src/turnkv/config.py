"""Settings of the cache, the engine and the sampler: frozen, documented, checked once at construction."""

from dataclasses import dataclass

from turnkv.errors import InvalidConfigError

PAGE_TOKENS = 16
"""Slots in a page. Kernels read keys in tiles of this many, so it is no setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How much KV the device may hold."""

    budget_bytes: int = 2 * 2**30
    """KV bytes on the device, all sessions together. A hard limit; memory is committed only as it is used."""

    def __post_init__(self) -> None:
        if self.budget_bytes <= 0:
            raise InvalidConfigError(
                "budget_bytes", self.budget_bytes, "must be positive", remedy="give the KV budget in bytes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How the engine computes."""

    max_step_tokens: int = 2048
    """Tokens that one forward pass computes at most: all decode tokens, then prefill chunks."""

    max_new_tokens: int = 512
    """Tokens that a reply may have when its request sets no limit of its own."""

    attention: str = "auto"
    """Body of the attention kernel: a registered name, or `auto` for the fastest that is right for the layer."""

    weights: str = "exact"
    """`exact` as they are, or `int8`: rounded to 8 bits, with a scale for each output, where layers are fused."""

    def __post_init__(self) -> None:
        for field in ("max_step_tokens", "max_new_tokens"):
            if getattr(self, field) < 1:
                raise InvalidConfigError(field, getattr(self, field), "must be at least 1", remedy="give a count")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and where a reply ends."""

    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""

    top_k: int | None = None
    """Keep this many of the likeliest tokens; None keeps all."""

    top_p: float | None = None
    """Keep the smallest set of tokens whose probability reaches this; None keeps all."""

    min_p: float | None = None
    """Keep tokens at least this fraction as likely as the likeliest; None keeps all."""

    repetition_penalty: float = 1.0
    """Above 1 makes tokens that the conversation already holds less likely (arXiv:1909.05858)."""

    seed: int | None = None
    """Makes sampling repeatable, whatever else is in the batch; None draws a seed."""

    max_new_tokens: int | None = None
    """Tokens of the reply at most; None takes the engine's own limit."""

    stop: tuple[str, ...] = ()
    """The reply ends before the first of these strings."""

    logprobs: int | None = None
    """Report the log-probability of each token and of this many likeliest alternatives; None reports nothing."""

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, bool, str], ...] = (
            ("temperature", self.temperature >= 0, "give 0 (greedy) or a positive number"),
            ("top_k", self.top_k is None or self.top_k >= 1, "give a count from 1, or leave it out"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, "give a probability in (0, 1], or leave it out"),
            ("min_p", self.min_p is None or 0 <= self.min_p <= 1, "give a fraction in [0, 1], or leave it out"),
            ("repetition_penalty", self.repetition_penalty > 0, "give a positive number; 1 turns it off"),
            (
                "max_new_tokens",
                self.max_new_tokens is None or self.max_new_tokens >= 1,
                "give a count from 1, or leave it out",
            ),
            ("stop", all(self.stop), "give non-empty strings"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "give a count from 0 to 20"),
        )
        for field, is_right, remedy in checks:
            if not is_right:
                raise InvalidConfigError(field, getattr(self, field), "is out of range", remedy=remedy)
