"""Decorators for functions that are called by RPC."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["async_execution"]

F = TypeVar("F", bound=Callable[..., Any])


def async_execution(fn: F) -> F:
    """Mark a function that returns a Future, whose value is the result of the call.

    The callee sends the reply when the Future completes; no thread waits for it meanwhile.
    Combined with ``staticmethod`` or ``classmethod`` this decorator is the inner one; combined
    with ``torch.jit.script`` it is the outer one.

    Args:
        fn (Callable): returns a ``torch.futures.Future``.

    Returns:
        A function that does the same and that RPC recognizes.

    Source: ``torch.distributed.rpc.functions.async_execution``.

    Example::

        @rpc.functions.async_execution
        def add_chained(to, x, y, z):
            return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda fut: fut.wait() + z)
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]
