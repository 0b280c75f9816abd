"""Number formats that keys and values are stored in: one file each, and a registry. They know no pages."""

from turnkv.cache.formats import exact, fp8, int4, int8
from turnkv.cache.formats.format import FORMATS, Format

__all__ = ["FORMATS", "Format", "exact", "fp8", "int4", "int8"]
