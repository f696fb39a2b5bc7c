"""Waiting for Futures: torch's helpers, for Futures that fail with Python exceptions.

Futures of rayrpc are plain ``torch.futures.Future``.  Python can only complete one with a value
that raises when it is read, which torch's own ``wait_all`` takes for success until it has all of
them; this one returns with the first error.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from torch.futures import Future, collect_all

__all__ = ["Future", "collect_all", "wait_all"]


def wait_all(futures: Sequence[Any]) -> list[Any]:
    """Return the values of all Futures, or raise the first error as soon as it is there.

    Args:
        futures (list[Future]): to wait for.

    Source: ``torch.futures.wait_all``.
    """
    if not futures:
        return []
    lock = threading.Lock()
    done = threading.Event()
    left = len(futures)
    errors: list[BaseException] = []

    def completed(future: Any) -> None:
        nonlocal left
        try:
            future.value()
        except BaseException as exc:
            errors.append(exc)
        with lock:
            left -= 1
            if errors or not left:
                done.set()

    for future in futures:
        future.add_done_callback(completed)
    done.wait()
    if errors:
        raise errors[0]
    return [future.wait() for future in futures]
