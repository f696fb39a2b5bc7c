"""A context for each worker, which functions get as their first argument."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rayrpc.parallel.pickle import loads
from rayrpc.parallel.pool.tasks import Task, mapstar, starmapstar

__all__ = [
    "CtxPoolStorage",
    "add_context",
    "check_contexts",
    "initialize_context",
    "proxy_ctx_caller",
]


class CtxPoolStorage:
    """Hold the context of a ``CtxPool``'s worker, in the worker's process.

    Attributes:
        storage (Any): the context; None outside of a worker.

    Source: ``machin.parallel.pool.CtxPoolStorage``.
    """

    storage: Any = None


def proxy_ctx_caller(*input_: Any) -> Any:
    """Call a serialized function with the context of this worker.

    Args:
        *input_: a function pickled by ``rayrpc.parallel.pickle.dumps`` (bytes), its arguments
            (tuple) and its keyword arguments (dict); or one tuple of these three.

    Returns:
        What the function returns.

    Raises:
        Exception: what the function raises.

    Source: ``machin.parallel.pool.proxy_ctx_caller``.
    """
    data, args, kwargs = input_[0] if len(input_) == 1 else input_
    return loads(data)(CtxPoolStorage.storage, *args, **kwargs)


def check_contexts(processes: int, contexts: Sequence[Any] | None) -> list[Any]:
    """Return one context for each worker, None where none are given.

    Raises:
        ValueError: the number of contexts is not that of the workers.
    """
    if contexts is None:
        return [None] * processes
    if len(contexts) != processes:
        raise ValueError(
            f"the number of worker_contexts, {len(contexts)}, is not equal to the number of "
            f"workers, {processes}"
        )
    return list(contexts)


def initialize_context(
    context: Any, initializer: Callable[..., object] | None, *initargs: Any
) -> None:
    """Set the context of this worker process, then call the pool's initializer."""
    CtxPoolStorage.storage = context
    if initializer is not None:
        initializer(*initargs)


def add_context(
    context: Callable[[], Any], get: Callable[[], Task | None]
) -> Callable[[], Task | None]:
    """Return a ``get`` whose tasks have the worker's context as the function's first argument."""

    def get_with_context() -> Task | None:
        task = get()
        if task is None:
            return None
        job, index, func, args, kwds = task
        if func is mapstar or func is starmapstar:
            args = (functools.partial(args[0], context()), *args[1:])
        else:
            args = (context(), *args)
        return job, index, func, args, kwds

    return get_with_context
