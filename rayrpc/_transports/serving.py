"""The threads of a worker that serve calls."""

from __future__ import annotations

import threading
import time

from rayrpc._concurrency.deadlines import Deadline

__all__ = ["ServingThreads"]

POLL_SECONDS = 0.002


class ServingThreads(set[int]):
    """The idents of the threads that serve calls, until their replies are sent.

    Each change is atomic: a thread adds and discards itself.
    """

    def begin(self) -> None:
        """Add this thread."""
        self.add(threading.get_ident())

    def end(self) -> None:
        """Discard this thread; nothing happens if it was not added."""
        self.discard(threading.get_ident())

    def has_others(self) -> bool:
        """Tell whether other threads than this one serve calls."""
        return bool(self - {threading.get_ident()})

    def wait_for_others(self, timeout: float) -> None:
        """Wait until no thread but this one serves calls.

        Args:
            timeout: in seconds.
        """
        deadline = Deadline(timeout)
        while self.has_others() and not deadline.expired:
            time.sleep(POLL_SECONDS)
