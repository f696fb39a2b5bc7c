"""The value of an RRef at its owner: an outcome that may still be on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from rayrpc._concurrency.outcome import Outcome
from rayrpc._concurrency.reader import release_reader

__all__ = ["Cell"]

Callback = Callable[[Outcome[Any]], None]


class Cell:
    """Hold an outcome, once it is there."""

    __slots__ = ("_callbacks", "_changed", "_outcome")

    def __init__(self, outcome: Outcome[Any] | None = None) -> None:
        self._outcome = outcome
        self._changed = threading.Condition() if outcome is None else None
        self._callbacks: list[Callback] = []

    @property
    def outcome(self) -> Outcome[Any] | None:
        """The outcome, or None while it is on its way."""
        return self._outcome

    def set(self, outcome: Outcome[Any]) -> None:
        """Fill the cell."""
        assert self._changed is not None
        with self._changed:
            self._outcome = outcome
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            callback(outcome)

    def on_done(self, callback: Callback) -> None:
        """Call ``callback`` with the outcome, now if it is there."""
        if self._changed is not None:
            with self._changed:
                if self._outcome is None:
                    self._callbacks.append(callback)
                    return
        assert self._outcome is not None
        callback(self._outcome)

    def wait(self, timeout: float | None = None) -> Outcome[Any]:
        """Return the outcome.

        Raises:
            TimeoutError: it did not come in ``timeout`` seconds.
        """
        if self._outcome is None and self._changed is not None:
            release_reader()
            with self._changed:
                if not self._changed.wait_for(lambda: self._outcome is not None, timeout):
                    raise TimeoutError
        assert self._outcome is not None
        return self._outcome
