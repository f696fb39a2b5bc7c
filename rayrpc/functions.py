"""Decorators for functions that are called by RPC."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["async_execution"]

P = ParamSpec("P")
T = TypeVar("T")


def async_execution(fn: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that returns a Future of the call's result.

    The callee sends the reply when the Future completes; no thread waits for it meanwhile.
    Decorate inside of ``staticmethod`` and ``classmethod``, and outside of ``torch.jit.script``.

    Args:
        fn (Callable): returns a ``torch.futures.Future``.

    Returns:
        The same function, marked.

    Raises:
        TypeError: it is no function.

    Source: ``torch.distributed.rpc.functions.async_execution``.

    Example::

        @rpc.functions.async_execution
        def add_chained(to, x, y, z):
            return rpc.rpc_async(to, torch.add, args=(x, y)).then(lambda fut: fut.wait() + z)
    """

    if not callable(fn):
        raise TypeError(f"async_execution decorates a callable, not {fn!r}")

    # the name of a scripted function is its class's; that of its Python code finds it
    @functools.wraps(getattr(fn, "_torchdynamo_inline", fn))
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        return fn(*args, **kwargs)

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper
