"""A context for each worker, which functions get as their first argument."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from rayrpc.parallel.pickle import loads
from rayrpc.parallel.pool.tasks import Task, mapstar, starmapstar

__all__ = ["CtxPoolStorage", "checked", "enter", "proxy_ctx_caller", "with_context"]


class CtxPoolStorage:
    """Where a worker process of a ``CtxPool`` has its context.

    Source: ``machin.parallel.pool.CtxPoolStorage``.
    """

    storage: Any = None


def proxy_ctx_caller(*input_: Any) -> Any:
    """Call a serialized function with the context of this worker.

    Args:
        *input_: bytes that ``rayrpc.parallel.pickle.dumps`` made of a function, its arguments and
            its keyword arguments; or one tuple of these three.

    Returns:
        What the function returns.

    Source: ``machin.parallel.pool.proxy_ctx_caller``.
    """
    data, args, kwargs = input_[0] if len(input_) == 1 else input_
    return loads(data)(CtxPoolStorage.storage, *args, **kwargs)


def checked(processes: int, contexts: Sequence[Any] | None) -> list[Any]:
    """Return a context for each worker.

    Raises:
        ValueError: they are not as many.
    """
    if contexts is None:
        return [None] * processes
    if len(contexts) != processes:
        raise ValueError(
            f"the number of worker_contexts, {len(contexts)}, is not equal to the number of "
            f"workers, {processes}"
        )
    return list(contexts)


def enter(context: Any, initializer: Callable[..., Any] | None, *initargs: Any) -> None:
    """Be the initializer of a worker process with a context."""
    CtxPoolStorage.storage = context
    if initializer is not None:
        initializer(*initargs)


def with_context(context: Callable[[], Any], get: Callable[[], Any]) -> Callable[[], Any]:
    """Return what gets tasks with a context as the functions' first argument."""

    def get_one() -> Task | None:
        task = get()
        if task is None:
            return None
        job, index, func, args, kwds = task
        if func is mapstar or func is starmapstar:
            args = (functools.partial(args[0], context()), *args[1:])
        else:
            args = (context(), *args)
        return job, index, func, args, kwds

    return get_one
