"""What pools and workers say to each other, and what a worker does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from multiprocessing.pool import MaybeEncodingError  # type: ignore[attr-defined]
from typing import Any

from rayrpc.errors import CallError

__all__ = ["Result", "Task", "chunks_of", "mapstar", "starmapstar", "work"]

# (job, index, func, args, kwds), and (job, index, (success, value or exception))
Task = tuple[int, int, Any, tuple[Any, ...], dict[str, Any]]
Result = tuple[int, int, tuple[bool, Any]]


def mapstar(func: Callable[..., Any], chunk: Iterable[Any]) -> list[Any]:
    """Call a function with each element; the task of a chunk of ``map``."""
    return [func(element) for element in chunk]


def starmapstar(func: Callable[..., Any], chunk: Iterable[Iterable[Any]]) -> list[Any]:
    """Call a function with the arguments in each element; the task of a chunk of ``starmap``."""
    return [func(*element) for element in chunk]


def chunks_of(elements: list[Any], size: int) -> list[list[Any]]:
    """Return the elements in lists of ``size``, the last one shorter if need be."""
    if size < 1:
        raise ValueError(f"chunksize must be at least 1, got {size}")
    return [elements[start : start + size] for start in range(0, len(elements), size)]


def _unsendable(error: Exception, value: Any) -> Exception:
    """Return the error of a value that cannot be pickled."""
    try:
        return MaybeEncodingError(error, value)  # type: ignore[no-any-return]
    except Exception:  # its repr fails
        return MaybeEncodingError(error, type(value))  # type: ignore[no-any-return]


def work(
    get: Callable[[], Task | None],
    put: Callable[[Result], None],
    initializer: Callable[..., Any] | None,
    initargs: tuple[Any, ...],
    maxtasks: int | None,
) -> None:
    """Do tasks until there are no more; see ``BasePool.worker``."""
    if initializer is not None:
        initializer(*initargs)
    for _ in itertools.count() if maxtasks is None else range(maxtasks):
        task = get()
        if task is None:
            return
        job, index, func, args, kwds = task
        outcome: tuple[bool, Any]
        try:
            outcome = True, func(*args, **kwds)
        except Exception as exc:
            outcome = False, exc
        except SystemExit as exc:  # it would end who asks for the result
            outcome = False, CallError(f"a task of a pool ended by {exc!r}")
        try:
            put((job, index, outcome))
        except Exception as exc:
            put((job, index, (False, _unsendable(exc, outcome[1]))))
        del task, func, args, kwds, outcome
