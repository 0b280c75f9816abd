"""The cache owns KV memory: pages, extents, segments and views; it never knows messages, policies or attention."""

from turnkv.cache.extents import Writer
from turnkv.cache.memory import KVMemory, Page
from turnkv.cache.pages import Budget, Extent, PagePool
from turnkv.cache.segments import Part, Segment, SegmentStore, segment_key, settled_key, slots_of
from turnkv.cache.storage import DryStorage, KVStorage, LayerKV, TierPlan
from turnkv.cache.tiles import LayerShape, TileLayout
from turnkv.cache.views import Entry, TileGroup, View

__all__ = [
    "Budget",
    "DryStorage",
    "Entry",
    "Extent",
    "KVMemory",
    "KVStorage",
    "LayerKV",
    "LayerShape",
    "Page",
    "PagePool",
    "Part",
    "Segment",
    "SegmentStore",
    "TierPlan",
    "TileGroup",
    "TileLayout",
    "View",
    "Writer",
    "segment_key",
    "settled_key",
    "slots_of",
]
