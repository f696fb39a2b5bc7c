"""What pools and workers say to each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Result", "Task", "chunks_of", "mapstar", "starmapstar"]

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
