"""How quantities are written for people: bytes, times, counts, ratios. Units are decimal (1 MB is 10^6 bytes)."""

from collections.abc import Sequence

MISSING = "–"
"""Stands where nothing was measured."""

_BYTE_UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("B", 1))


def byte_unit(largest_bytes: int) -> tuple[str, int]:
    """The unit (its name, its bytes) in which numbers up to `largest_bytes` read best."""
    return next((unit for unit in _BYTE_UNITS if largest_bytes >= unit[1]), ("B", 1))


def bytes_text(num_bytes: int) -> str:
    """Three digits or more, with the unit: `58.3 MB`."""
    unit, size = byte_unit(num_bytes)
    return f"{_digits(num_bytes / size) if size > 1 else num_bytes} {unit}"


def ms_text(seconds: float) -> str:
    """Milliseconds without the unit: `1,204`, `8.31`."""
    return _digits(seconds * 1e3)


def seconds_text(seconds: float) -> str:
    """Milliseconds below one second, then seconds, with the unit."""
    return f"{ms_text(seconds)} ms" if seconds < 1 else f"{_digits(seconds)} s"


def count_text(count: int) -> str:
    """With commas at the thousands."""
    return f"{count:,}"


def nll_text(nll: float | None) -> str:
    """Three decimals."""
    return MISSING if nll is None else f"{nll:.3f}"


def difference_text(difference: float | None) -> str:
    """Three decimals, always with its sign."""
    if difference is None:
        return MISSING
    return f"{difference:+.3f}".replace("-", "−") if abs(difference) >= 5e-4 else "±0.000"


def ratio_text(value: float, reference: float) -> str:
    """`0.46×`: `value` as a multiple of `reference`."""
    return f"{_digits(value / reference)}×" if reference else MISSING


def ranges_text(turns: Sequence[int]) -> str:
    """Turn numbers with runs drawn together: `3–6, 8`."""
    ranges: list[tuple[int, int]] = []
    for turn in sorted(turns):
        if ranges and turn <= ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], turn)
        else:
            ranges.append((turn, turn))
    return ", ".join(str(start) if start == end else f"{start}–{end}" for start, end in ranges)


def _digits(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
