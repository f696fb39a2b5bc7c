"""Which functions have been fast so far, so that they may run in the thread that reads."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import MethodType
from typing import Any, TypeVar

__all__ = ["LatencyProfile", "SHORT_SECONDS", "profiled_by_name"]

F = TypeVar("F", bound=Callable[..., Any])

# A function that takes no longer than this may delay the next message.
QUICK_SECONDS = 0.0005
# A function that takes no longer than this may run there if no message is expected meanwhile.
SHORT_SECONDS = 0.002
# A fast run adds 1 to a function's score, a slow one subtracts SLOW_COUNTS, within these bounds.
# So one slow run among many fast ones leaves the score above TRUSTED_SCORE.
MAX_SCORE, MIN_SCORE = 64, -8
SLOW_COUNTS = 32
TRUSTED_SCORE = 3
# Functions that are made anew for every call would fill the table; it is cleared at this size.
MAX_ENTRIES = 4096

_profiled_by_name: set[int] = set()


def profiled_by_name(func: F) -> F:
    """Profile a function by its second argument, the name of the method that it calls."""
    _profiled_by_name.add(id(func))
    return func


class LatencyProfile:
    """Score functions by how long they ran.

    A function is identified by its ``id``, so that the profile keeps none alive.  If a new function
    gets the ``id`` of a collected one, it inherits the score, and at worst runs in the wrong thread
    once.

    Args:
        seconds (float): a run that takes no longer is fast.
    """

    def __init__(self, seconds: float = QUICK_SECONDS) -> None:
        self._seconds = seconds
        self._scores: dict[Hashable, int] = {}

    @staticmethod
    def key(func: Any, args: Any) -> Hashable:
        """Return the key of a function in the profile."""
        key = id(func.__func__ if type(func) is MethodType else func)
        return (key, args[1]) if key in _profiled_by_name else key

    def is_quick(self, key: Hashable) -> bool:
        """Tell whether a function has been fast often enough to be trusted."""
        return self._scores.get(key, 0) >= TRUSTED_SCORE

    def record(self, key: Hashable, seconds: float, exclusive: bool) -> None:
        """Record one run of a function.

        Args:
            key: of the function.
            seconds: how long it ran.
            exclusive: no other call ran meanwhile; else a slow run may be the others' fault, and
                does not count.
        """
        score = self._scores.get(key, 0)
        if seconds <= self._seconds:
            if score == MAX_SCORE:
                return
            score += 1
        elif exclusive:
            score = max(score - SLOW_COUNTS, MIN_SCORE)
        else:
            return
        if len(self._scores) >= MAX_ENTRIES:
            self._scores.clear()
        self._scores[key] = score
