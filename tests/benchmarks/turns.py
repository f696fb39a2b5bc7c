"""Time several ways to do a thing, in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

__all__ = ["medians"]


def medians(ways: Sequence[Callable[[], object]], rounds: int, warm_up: int) -> list[float]:
    """Return the median time of each way, in seconds.

    Args:
        ways: each round times each of them once.
        rounds: how many are counted.
        warm_up: how many rounds come before.
    """
    times: list[list[float]] = [[] for _ in ways]
    for number in range(warm_up + rounds):
        for way, found in zip(ways, times, strict=True):
            start = time.perf_counter()
            way()
            if number >= warm_up:
                found.append(time.perf_counter() - start)
    return [statistics.median(found) for found in times]
