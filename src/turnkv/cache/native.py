"""The compiled kernels, where they were built: the one place that loads them."""

import logging
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from turnkv.cache.tiles import TileLayout

FORMATS = {"exact": 0, "int8": 1, "fp8": 2, "int4": 3}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

Arena = tuple[int, int, int, int, int]
"""Address, bytes of a page, bytes of a head block, format of keys, format of values."""


def _load() -> ModuleType | None:
    # torch comes first: the kernels share its OpenMP, so that its thread count is theirs and no second pool spins.
    try:
        return import_module("turnkv._kernels")
    except ImportError:
        return None


KERNELS = _load()
"""The module `turnkv._kernels`; None where the package was installed without a C++ compiler."""

_has_said = False


def say_if_missing() -> None:
    """Warn, once a process, that everything runs on the slow reference."""
    global _has_said  # noqa: PLW0603 (once means once a process)
    if KERNELS is None and not _has_said:
        _has_said = True
        logging.getLogger("turnkv").warning(
            "the C++ kernels were not built, so attention runs on the slow reference; "
            "install a C++ compiler (GCC or Clang) and install turnkv again"
        )


def can_serve(blocks: Tensor, layout: TileLayout) -> bool:
    """Whether the kernels know this memory: on the CPU, of their formats, dtypes and dims."""
    return (
        KERNELS is not None
        and blocks.device.type == "cpu"
        and layout.dtype in DTYPES
        and layout.tier.keys in FORMATS
        and layout.tier.values in FORMATS
        and max(layout.shape.key_dim, layout.shape.value_dim) <= 512
        and layout.shape.key_dim * layout.dtype.itemsize % 4 == 0
    )


def arena(blocks: Tensor, layout: TileLayout) -> Arena:
    """One tier of one layer as the kernels take it."""
    tier = layout.tier
    return blocks.data_ptr(), layout.page_bytes, layout.head_bytes, FORMATS[tier.keys], FORMATS[tier.values]


def exact_arena(blocks: Tensor, layout: TileLayout) -> tuple[int, int, int, int, int, int, int]:
    """The exact tier of one layer as writing takes it: address, bytes of a page and a head block, dtype, G, D, E."""
    shape = layout.shape
    return (
        blocks.data_ptr(),
        layout.page_bytes,
        layout.head_bytes,
        DTYPES[layout.dtype],
        shape.num_heads,
        shape.key_dim,
        shape.value_dim,
    )
