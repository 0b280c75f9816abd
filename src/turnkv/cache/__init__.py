"""The cache owns KV memory: pages, extents, segments and views; it never knows messages, policies or attention."""

from turnkv.cache.extents import Writer
from turnkv.cache.pages import Extent, PagePool
from turnkv.cache.segments import Segment, SegmentStore, segment_key
from turnkv.cache.storage import KVStorage, LayerShape, token_bytes
from turnkv.cache.views import Entry, Run, View, coalesce, runs_of

__all__ = [
    "Entry",
    "Extent",
    "KVStorage",
    "LayerShape",
    "PagePool",
    "Run",
    "Segment",
    "SegmentStore",
    "View",
    "Writer",
    "coalesce",
    "runs_of",
    "segment_key",
    "token_bytes",
]
