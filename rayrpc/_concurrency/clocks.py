"""How the monotonic clocks of hosts differ."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Clock", "clock", "measure"]

# How often the clock of another host is asked for.
ASKS = 9


class Clock(NamedTuple):
    """How another clock differs from this host's.

    Args:
        offset (float): in seconds, to be taken from its times.
        error (float): of the offset, at most, in seconds; 0: it is the same clock.
    """

    offset: float = 0.0
    error: float = 0.0


def clock() -> tuple[str, float]:
    """Return the identity of this host's clock, and its time in seconds."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip(), time.monotonic()
    except OSError:  # no Linux: each process for itself
        return f"{os.uname().nodename}-{os.getpid()}", time.monotonic()


def measure(ask: Callable[[], tuple[str, float]]) -> Clock:
    """Return how the clock of another host differs from this one's.

    Args:
        ask: returns ``clock()`` of that host.

    Source: Cristian's algorithm: of several answers, the quickest one errs least.
    """
    here, _ = clock()
    best = Clock(0.0, float("inf"))
    for _ in range(ASKS):
        began = time.monotonic()
        there, time_there = ask()
        if there == here:
            return Clock()
        ended = time.monotonic()
        if (ended - began) / 2 < best.error:
            best = Clock(time_there - (began + ended) / 2, (ended - began) / 2)
    return best
