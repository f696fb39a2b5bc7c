"""A task and its result, as pools and workers exchange them, and the loop that runs tasks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from multiprocessing.pool import MaybeEncodingError  # type: ignore[attr-defined]
from typing import Any, TypeVar

from rayrpc.errors import CallError

__all__ = ["Result", "Task", "mapstar", "run_tasks", "split_chunks", "starmapstar"]

T = TypeVar("T")

# (job, index, func, args, kwds), and (job, index, (success, value or exception))
Task = tuple[int, int, Any, tuple[Any, ...], dict[str, Any]]
Result = tuple[int, int, tuple[bool, Any]]


def mapstar(func: Callable[..., T], chunk: Iterable[Any]) -> list[T]:
    """Call a function with each element: the task of a chunk of ``map``."""
    return [func(element) for element in chunk]


def starmapstar(func: Callable[..., T], chunk: Iterable[Iterable[Any]]) -> list[T]:
    """Call a function with each element's values: the task of a chunk of ``starmap``."""
    return [func(*element) for element in chunk]


def split_chunks(elements: list[T], size: int) -> list[list[T]]:
    """Split a list into lists of ``size`` elements, the last one shorter if need be.

    Raises:
        ValueError: ``size`` is less than 1.
    """
    if size < 1:
        raise ValueError(f"chunksize must be at least 1, got {size}")
    return [elements[start : start + size] for start in range(0, len(elements), size)]


def _encoding_error(error: Exception, value: Any) -> Exception:
    """Return the error for a result that cannot be pickled."""
    try:
        return MaybeEncodingError(error, value)  # type: ignore[no-any-return]
    except Exception:  # the value's repr fails
        return MaybeEncodingError(error, type(value))  # type: ignore[no-any-return]


def run_tasks(
    get: Callable[[], Task | None],
    put: Callable[[Result], None],
    initializer: Callable[..., object] | None,
    initargs: tuple[Any, ...],
    maxtasks: int | None,
) -> None:
    """Run tasks until ``get`` returns None; the arguments are those of ``BasePool.worker``."""
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
        except SystemExit as exc:  # raised by get() it would end the caller's process
            outcome = False, CallError(f"a task of a pool ended by {exc!r}")
        try:
            put((job, index, outcome))
        except Exception as exc:
            put((job, index, (False, _encoding_error(exc, outcome[1]))))
        del task, func, args, kwds, outcome
