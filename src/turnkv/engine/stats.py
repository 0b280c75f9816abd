"""What the KV memory of an engine comes to, exactly."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """Exact account of the KV memory."""

    budget_bytes: int
    """What the pool can hold: the budget, rounded down to whole pages."""
    held_bytes: int
    """Pages in use or reserved."""
    committed_bytes: int
    """What the system may have committed for pages, those held now and those not yet given back."""
    live_bytes: int
    """KV of live segments and of tokens being computed, each counted once."""
    peak_held_bytes: int
    tier_bytes: dict[str, int]
    """Live bytes by tier, each counted once."""
    free_runs: dict[str, int]
    """Contiguous runs of free pages by tier; 1 where the pool is not fragmented."""
    num_sessions: int
    num_given_up: int
    """Idle sessions whose KV was freed for another's; their next request computes them again."""
    num_segments: int
    num_parts: int
    """Parts of segments, one for each tier that a segment's tokens are stored in."""
    num_runs: int
    """Contiguous runs of all parts; equal to `num_parts` where each lies in one piece."""
