"""A call that a thread will wait for, or abandon."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["StartedCall"]


class StartedCall:
    """A call under way: call this once for its value, or ``abandon`` it.

    Args:
        wait (Callable): returns the value; takes ``unwanted``.
        abandon (Callable): does nothing once the call has been waited for.
    """

    def __init__(
        self, wait: Callable[[Callable[[], bool] | None], Any], abandon: Callable[[], None]
    ) -> None:
        self._wait = wait
        self.abandon = abandon

    def __call__(self, unwanted: Callable[[], bool] | None = None) -> Any:
        """Return the value.

        Args:
            unwanted: called twice a second; the wait ends (CallTimeoutError) when it
                returns True.
        """
        try:
            return self._wait(unwanted)
        finally:
            self.abandon()
