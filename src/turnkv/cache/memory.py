"""All KV memory of an engine: a page pool per tier under one budget, the live segments, and the storage behind them."""

from collections.abc import Mapping, Set

from turnkv.cache.pages import Budget, PagePool
from turnkv.cache.segments import Segment, SegmentStore
from turnkv.cache.storage import KVStorage, TierPlan
from turnkv.config import PAGE_TOKENS
from turnkv.errors import OverBudgetError
from turnkv.types import EXACT, Tier

Page = tuple[Tier, int]
"""A page of a tier's pool."""


class KVMemory:
    """Counts bytes exactly: of pages held, of tokens live, and of what the system may have committed."""

    def __init__(self, plans: Mapping[Tier, TierPlan], budget_bytes: int, storage: KVStorage) -> None:
        """Account for storage that has `num_pages(plans, budget_bytes)` pages."""
        self.page_bytes = {tier: plan.page_bytes for tier, plan in plans.items()}
        self.budget = Budget(budget_bytes)
        self.budget.relieve = self.give_back
        self.pools = {
            tier: PagePool(count, self.page_bytes[tier], self.budget)
            for tier, count in self.num_pages(plans, budget_bytes).items()
        }
        self.store = SegmentStore(self.pools)
        self.storage = storage
        self.is_shared = False
        """Whether more than one engine has sessions here."""

    @staticmethod
    def num_pages(plans: Mapping[Tier, TierPlan], budget_bytes: int) -> dict[Tier, int]:
        """Pages of each tier's pool: enough to fill the budget alone.

        Raises:
            OverBudgetError: the budget is less than a page of exact KV.
        """
        page_bytes = plans[EXACT].page_bytes
        if budget_bytes < page_bytes:
            raise OverBudgetError(f"the KV budget of {budget_bytes:,} bytes is less than a page; give {page_bytes:,}")
        return {tier: budget_bytes // plan.page_bytes for tier, plan in plans.items()}

    def token_bytes(self, tier: Tier = EXACT) -> int:
        """KV bytes of one token over all layers."""
        return self.page_bytes[tier] // PAGE_TOKENS

    def segment_bytes(self, segment: Segment) -> int:
        """KV bytes of a segment's tokens."""
        return sum(len(part) * self.token_bytes(part.tier) for part in segment.parts)

    def bytes_of_pages(self, pages: Set[Page]) -> int:
        """Bytes of pages."""
        return sum(self.page_bytes[tier] for tier, _ in pages)

    @property
    def live_bytes(self) -> int:
        """KV bytes of all tokens held."""
        return sum(pool.num_used_slots * self.token_bytes(tier) for tier, pool in self.pools.items())

    def give_back(self) -> None:
        """Return what free pages had committed to the system."""
        for tier, pool in self.pools.items():
            self.storage.give_back(tier, pool.untouch())

    def check(self) -> None:
        """Assert what always holds, in pools and segments."""
        for pool in self.pools.values():
            pool.check()
        self.store.check()
        assert self.budget.held_bytes == sum(
            pool.num_held_pages * self.page_bytes[tier] for tier, pool in self.pools.items()
        )
        assert 0 <= self.budget.held_bytes <= self.budget.total_bytes
