"""What the KV memory of an engine comes to, exactly."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Exact account of the KV memory."""

    budget_bytes: int
    """What the pool can hold: the budget, rounded down to whole pages."""
    held_bytes: int
    """Pages in use or reserved."""
    live_bytes: int
    """KV of live segments and of tokens being computed, each counted once."""
    peak_held_bytes: int
    num_sessions: int
    num_given_up: int
    """Idle sessions whose KV was freed for another's; their next request computes them again."""
    num_segments: int
    num_runs: int
    """Contiguous runs of all segments; equal to `num_segments` where each lies in one piece."""
