"""The context that a thread is in; calls and callbacks that run in a context, or in none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.futures import Future

from rayrpc._autograd.context import DistAutogradContext
from rayrpc._concurrency.outcome import attempt, complete
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.invocation import Invocation
from rayrpc._runtime.started_call import StartedCall

__all__ = [
    "ContextFuture",
    "UseContext",
    "call_without_context",
    "start_without_context",
    "thread",
]

_T = TypeVar("_T")


class _ThreadState(threading.local):
    context: DistAutogradContext | None = None


thread = _ThreadState()


def _call_in(context: DistAutogradContext | None, function: Callable[..., _T], *args: Any) -> _T:
    """Call a function in a context, or in none; restore this thread's also after an interrupt."""
    outer = thread.context
    try:
        thread.context = context
        result = function(*args)
    finally:
        thread.context = outer
    return result


class UseContext:
    """Set the context of a thread that serves a call, and restore it at the end."""

    __slots__ = ("_context", "_outer")

    def __init__(self, context: DistAutogradContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._outer = thread.context
        thread.context = self._context

    def __exit__(self, *exc: object) -> None:
        thread.context = self._outer


class ContextFuture(Future):  # type: ignore[type-arg]
    """A Future whose callbacks run in the autograd context of its call."""

    def __init__(self, context: DistAutogradContext) -> None:
        super().__init__()
        self._context = context

    def then(self, callback: Any) -> Any:
        """Return a Future of the result of ``callback``, which is called with this Future."""
        result = ContextFuture(self._context)

        def run(done: Any) -> None:
            complete(result, attempt(lambda: callback(done)))

        self.add_done_callback(run)
        return result

    def add_done_callback(self, callback: Any) -> None:
        """Call ``callback`` with this Future once it is done."""
        context = self._context

        def run(done: Any) -> None:
            _call_in(context, callback, done)

        super().add_done_callback(run)


def call_without_context(
    agent: Agent,
    worker: int,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float | None,
) -> Any:
    """Call a worker in no context, even if this thread is in one; return the Future.

    Args:
        agent: the agent that makes the call.
        worker: the callee's id.
        func, args: the function to run at the callee, and its arguments.
        timeout: how long the call may take, in seconds; None: no limit.
    """
    call = Invocation(func, args)
    return _call_in(None, agent.caller.future, agent.lookup(worker), call, timeout)


def start_without_context(
    agent: Agent,
    worker: int,
    func: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float | None,
) -> StartedCall:
    """Start a call in no context; return it, to wait for it or abandon it.

    Args:
        agent, worker, func, args, timeout: as for ``call_without_context``.
    """
    call = Invocation(func, args)
    started: StartedCall = _call_in(None, agent.caller.start, agent.lookup(worker), call, timeout)
    return started
