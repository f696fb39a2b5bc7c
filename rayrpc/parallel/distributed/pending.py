"""Operations that are under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar

import torch.distributed as dist

__all__ = ["Handle", "Pending", "then"]

T = TypeVar("T")


class Pending(Generic[T]):
    """Wait for an operation, then finish it once.

    Args:
        finish (Callable): waits, and returns the result of ``wait``.
    """

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish = finish
        self._result: list[T] = []

    def wait(self) -> T:
        """Wait for the operation.

        Returns:
            Its result, the same each time.
        """
        if not self._result:
            self._result.append(self._finish())
        return self._result[0]


Handle: TypeAlias = "dist.Work | Pending[None]"


def then(work: Handle | None, finish: Callable[[], None]) -> Handle | None:
    """Finish an operation that is done, or when its handle is waited for."""
    if work is None:
        finish()
        return None

    def run() -> None:
        work.wait()
        finish()

    return Pending(run)
