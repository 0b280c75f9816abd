"""Intervals by the paired bootstrap: sessions are drawn again with replacement, a policy and its reference together."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A ratio of sums under a policy, under the reference, and how far they lie apart."""

    value: float
    full: float
    change: float
    low: float
    """Of the change: the middle 95% of the resamples lie between."""
    high: float


@dataclass(frozen=True, slots=True)
class Sums:
    """Numerators and denominators, one entry a group."""

    over: NDArray[np.float64]
    under: NDArray[np.float64]


def estimate(ours: Sums, full: Sums, *, is_relative: bool, seed: int = 0) -> Estimate:
    """Compare two ratios of sums over the same groups; a relative change is a share of the reference.

    Source: Efron & Tibshirani, An Introduction to the Bootstrap (1993), percentile intervals.
    """
    count = len(ours.over)
    drawn = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count)) if count > 1 else np.zeros((1, 1), int)
    changes = [
        _change(
            ours.over[pick].sum(), ours.under[pick].sum(), full.over[pick].sum(), full.under[pick].sum(), is_relative
        )
        for pick in drawn
    ]
    low, high = np.nanpercentile(changes, [2.5, 97.5])
    value, reference = ours.over.sum() / ours.under.sum(), full.over.sum() / full.under.sum()
    change = _change(ours.over.sum(), ours.under.sum(), full.over.sum(), full.under.sum(), is_relative)
    return Estimate(float(value), float(reference), change, float(low), float(high))


def _change(over: float, under: float, full_over: float, full_under: float, is_relative: bool) -> float:
    if not under or not full_under:
        return float("nan")
    value, reference = over / under, full_over / full_under
    if is_relative:
        return float(value / reference - 1) if reference else float("nan")
    return float(value - reference)


def sums(groups: Sequence[str], pairs: Sequence[tuple[float, float]]) -> tuple[list[str], Sums]:
    """Pairs (numerator, denominator) added up by group, groups in order of their first."""
    names = list(dict.fromkeys(groups))
    place = {name: index for index, name in enumerate(names)}
    over, under = np.zeros(len(names)), np.zeros(len(names))
    for group, (a, b) in zip(groups, pairs, strict=True):
        over[place[group]] += a
        under[place[group]] += b
    return names, Sums(over, under)
