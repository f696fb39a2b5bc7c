"""Cancel calls: ``rpc.cancel(future)``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.futures import Future

from rayrpc._runtime import current
from rayrpc.errors import ArgumentTypeError
from rayrpc.futures import AnyFuture

__all__ = ["cancel", "combine"]

_CALLS = "_rayrpc_calls"  # attribute of a Future of several calls


def cancel(future: Future[Any], force: bool = False) -> bool:
    """Cancel a call, and the calls that its function has made; return at once.

    The Future raises a ``CancelledError``.  A function that is queued does not run; a coroutine is
    cancelled; a function that runs gets an ``asyncio.CancelledError`` at its next bytecode, which
    in a call of C code, such as ``time.sleep``, is when that returns.  (Until then, in Python 3.11,
    no thread of the worker that has a tracer or a profiler begins a function.)

    Args:
        future (torch.futures.Future): of ``rpc_async``; or of ``rpc_all``, which is all its calls.
        force (bool): end the process of the worker that was called, too, if it is hosted: all other
            calls to it fail, and its RRefs are lost.

    Returns:
        True: it was cancelled. False: it has ended before, or is the Future of something else.

    Raises:
        TypeError: ``future`` is none.

    Example:
        >>> future = rpc.rpc_async("worker1", time.sleep, args=(0.5,))
        >>> rpc.cancel(future)
        True
        >>> future.wait()
        Traceback (most recent call last):
        rayrpc.errors.CancelledError: the call of sleep on RPC worker 'worker1' was cancelled
        >>> rpc.cancel(future)
        False

    Source: rayrpc's own; ``ray.cancel``, ``asyncio.Task.cancel``.
    """
    if not isinstance(future, AnyFuture):
        raise ArgumentTypeError(f"cancel takes a torch.futures.Future, got {future!r}")
    calls = getattr(future, _CALLS, [future])
    agents = current.agents()
    ended = [any(agent.cancelling.cancel(each, force) for agent in agents) for each in calls]
    return any(ended)


def combine(future: Future[Any], calls: Iterable[Future[Any]]) -> None:
    """Have the cancellation of a Future cancel several calls."""
    setattr(future, _CALLS, [*calls])
