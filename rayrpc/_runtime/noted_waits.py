"""Record what threads wait for at other workers, apart from replies to calls, for reports."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

__all__ = ["NotedWait", "NotedWaits"]


class NotedWait(NamedTuple):
    """A wait of a thread.

    Args:
        where (str): name of the operation that it waits in, such as "shutdown".
        workers (Callable): returns the names of those that it waits for.
        since (float): ``time.monotonic()`` when it began.
    """

    where: str
    workers: Callable[[], Iterable[str]]
    since: float


class NotedWaits:
    """The waits of a worker's threads."""

    def __init__(self) -> None:
        self._of: dict[int, NotedWait] = {}

    @contextlib.contextmanager
    def noted(self, where: str, workers: Callable[[], Iterable[str]]) -> Iterator[None]:
        """Note that this thread waits in this context.

        Args:
            where, workers: see ``NotedWait``; other threads may call ``workers``.
        """
        ident = threading.get_ident()
        outer = self._of.get(ident)
        self._of[ident] = NotedWait(where, workers, time.monotonic())
        try:
            yield
        finally:
            if outer is not None:
                self._of[ident] = outer
            else:
                self._of.pop(ident, None)

    def now(self) -> dict[int, NotedWait]:
        """Return the innermost wait of each thread that waits, by the thread's ident."""
        return dict(self._of)
