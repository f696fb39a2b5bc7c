"""The value of an RRef at its owner."""

from __future__ import annotations

from typing import Any

from rayrpc._concurrency.outcome import Outcome
from rayrpc._concurrency.promise import Promise
from rayrpc._concurrency.reader import release_reader

__all__ = ["Cell"]


class Cell(Promise[Outcome[Any]]):
    """Hold the outcome of the function that makes a value, once it has run.

    Args:
        outcome (Outcome, optional): the outcome, if it is there already.
        made (object): where the value was made; see ``made_text``.
    """

    __slots__ = ("made",)

    def __init__(self, outcome: Outcome[Any] | None = None, made: object = None) -> None:
        super().__init__()
        self.made = made
        if outcome is not None:
            self.set(outcome)

    def wait(self, timeout: float | None = None) -> Outcome[Any]:
        """Return the outcome; wait for it at most ``timeout`` seconds (TimeoutError)."""
        if not self.is_done:
            release_reader()
        return super().wait(timeout)
