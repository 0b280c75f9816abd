"""The C++ kernels (csrc/). Addresses and strides in elements; whoever calls keeps the memory alive."""

import numpy as np
from numpy.typing import NDArray

_Group = tuple[int, int, NDArray[np.int32], NDArray[np.uint16], NDArray[np.int32]]
_Arena = tuple[int, int, int, int, int]

class Batch:
    def __init__(self, sequences: list[tuple[int, int, int, list[_Group]]]) -> None: ...

class Layer:
    def __init__(
        self,
        arenas: list[_Arena],
        dtype: int,
        shape: tuple[int, int, int, int],
        scale: float,
        softcap: float,
        window: int,
        sinks: int,
        is_interleaved: bool,
        first_rotated: int,
        num_pairs: int,
    ) -> None: ...

_Matrix = tuple[int, int, int, int, int, int]
_Rows = tuple[int, int, int]

class Block:
    def __init__(
        self,
        dtype: int,
        hidden: int,
        shape: tuple[int, int, int, int],
        num_pairs: int,
        activation: int,
        norms: list[tuple[int, float]],
        matrices: list[_Matrix],
    ) -> None: ...

def block(
    block: Block,
    layer: Layer,
    batch: Batch,
    angles: list[tuple[int, int, int]],
    arena: tuple[int, int, int, int, int, int, int],
    slots: NDArray[np.int32],
    rows: int,
    row_angles: tuple[int, int, int],
    isa: int,
) -> None: ...
def product(matrix: _Matrix, dtype: int, rows: _Rows, count: int, out: _Rows, isa: int) -> None: ...
def attend(
    layer: Layer,
    batch: Batch,
    angles: list[tuple[int, int, int]],
    query: int,
    row: int,
    head: int,
    out: int,
    isa: int,
) -> None: ...
def write(
    arena: tuple[int, int, int, int, int, int, int],
    key: tuple[int, int, int],
    value: tuple[int, int, int],
    slots: NDArray[np.int32],
    isa: int | None = None,
) -> None: ...
def settle(
    layers: list[tuple[_Arena, _Arena, int, int, int]],
    dtype: int,
    source_slots: NDArray[np.int32],
    target_slots: NDArray[np.int32],
    isa: int | None = None,
) -> None: ...
def read(address: int, count: int) -> int: ...
def isas() -> list[str]: ...
