"""Calls of finalizers, and of handlers of signals, that interrupt this package.

Python collects garbage in whatever thread allocates an object, and runs the handlers of signals in
the main thread, both between any two instructions: also while the thread holds a lock of this
package, or reads a connection for others, or has just been started to do so.  A call from there
would wait for that lock for ever, or for a reply that no thread reads.  So another thread makes
it, and the thread that was interrupted cannot wait for it.

A finalizer also runs as soon as the last reference to its object is dropped.  This package drops no
such reference while it holds a lock.
"""

from __future__ import annotations

import functools
import gc
import logging
import queue
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from torch.futures import Future

from rayrpc._concurrency.outcome import Error, attempt, complete
from rayrpc._protocol.membership import Member
from rayrpc._runtime.call_errors import shut_down
from rayrpc.errors import RpcError

__all__ = ["InterruptingCalls", "guarded", "is_in_function"]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class _Caller(Protocol):
    interrupting: InterruptingCalls


C = TypeVar("C", bound=_Caller)

# Interrupted code of these packages may hold a lock, or read.
_PACKAGES = (
    "rayrpc._autograd",
    "rayrpc._concurrency",
    "rayrpc._protocol",
    "rayrpc._runtime",
    "rayrpc._transports",
)
# ... but not that of these modules, which run users' code.
_FREE = (
    "rayrpc._concurrency.outcome",
    "rayrpc._runtime.awaitable",
    "rayrpc._runtime.coroutines",
    "rayrpc._runtime.invocation",
    "rayrpc._runtime.operators",
    "rayrpc._runtime.running",
    "rayrpc._runtime.serialization",
)


# ... and these run users' functions, nothing else.
_FUNCTIONS = (
    "rayrpc._runtime.awaitable",
    "rayrpc._runtime.invocation",
    "rayrpc._runtime.operators",
    "rayrpc._runtime.running",
)


class _Here(threading.local):
    calls = False


_here = _Here()
# The thread that collects garbage; 0: none.
_collector = 0


def _on_collection(phase: str, _: object) -> None:
    global _collector
    _collector = threading.get_ident() if phase == "start" else 0


def _is_interrupting() -> bool:
    """Return whether the code that makes this call has interrupted code of this package."""
    if not _here.calls and _collector != threading.get_ident():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _module(frame).startswith("rayrpc."):
        is_finalizer = frame.f_code.co_name == "__del__"
        frame = frame.f_back
        if is_finalizer:
            break
    while frame is not None:
        module = _module(frame)
        if module.startswith(_PACKAGES):
            return not module.startswith(_FREE)
        if frame.f_code.co_name == "_bootstrap" and _is_ours(frame.f_locals.get("self")):
            return True
        frame = frame.f_back
    return False


def is_in_function(frame: FrameType | None) -> bool:
    """Tell whether a thread that serves a call is in the user's function, and not in this package.

    Args:
        frame: the thread's innermost frame; code of libraries counts as part of its caller.
    """
    while frame is not None:
        module = _module(frame)
        if module.startswith(_PACKAGES):
            return module.startswith(_FUNCTIONS)
        frame = frame.f_back
    return False  # it serves no call any more


def _is_ours(thread: Any) -> bool:
    """Tell whether a thread, which has not begun or has ended, is one of this package."""
    target = getattr(thread, "_target", None)
    return str(getattr(target, "__module__", "")).startswith(_PACKAGES)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def guarded(
    instead: Callable[..., Any],
) -> Callable[[Callable[Concatenate[C, P], T]], Callable[Concatenate[C, P], T]]:
    """Decorate a method that makes a call.

    Args:
        instead (Callable): a method of ``InterruptingCalls`` to be called while this package is
            interrupted; takes the method and its arguments.
    """

    def decorate(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
        @functools.wraps(method)
        def call(self: C, /, *args: P.args, **kwargs: P.kwargs) -> T:
            __tracebackhide__ = True
            if (_here.calls or _collector) and _is_interrupting():
                made = functools.partial(method, self)
                return cast(T, instead(self.interrupting, made, *args, **kwargs))
            outer = _here.calls
            _here.calls = True
            try:
                return method(self, *args, **kwargs)
            finally:
                _here.calls = outer

        return call

    return decorate


class InterruptingCalls:
    """Make calls of code that has interrupted this package, in another thread.

    Args:
        submit (Callable): runs a task in a thread.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], None]) -> None:
        self._submit = submit
        # ``put`` takes no lock that the interrupted thread may hold
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._left: dict[Callable[[], None], Any] = {}  # tasks, and their Futures
        self._closed = False
        if _on_collection not in gc.callbacks:
            gc.callbacks.append(_on_collection)
        threading.Thread(target=self._run, name="rayrpc-interrupting", daemon=True).start()

    def __len__(self) -> int:
        """Return how many calls have not been made yet."""
        return len(self._left)

    def make(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call that returns a Future; return a Future of its value at once."""
        future: Any = Future()

        def task() -> None:
            try:
                made = call(*args, **kwargs)
            except BaseException as exc:
                complete(future, Error(exc))
            else:
                made.add_done_callback(lambda done: complete(future, attempt(done.value)))
            finally:
                self._left.pop(task, None)

        self._put(task, future)
        return future

    def make_and_drop(self, call: Callable[..., Any], to: Member, *args: Any) -> Any:
        """Make a call and drop its value; raise an error, as this thread cannot wait for it."""

        def task() -> None:
            try:
                call(to, *args)
            except Exception as exc:
                logger.warning("A call of a finalizer to %r has failed: %s", to.name, exc)
            finally:
                self._left.pop(task, None)

        self._put(task, None)
        raise RpcError(
            f"A finalizer, or a handler of signals, calls RPC worker {to.name!r} while its thread "
            "makes another call, and cannot wait for the reply. The function runs all the same, "
            "and its value is dropped. Use rpc_async there, and do not wait for its Future."
        )

    def refuse(self, call: Callable[..., Any], to: Member, *args: Any, **kwargs: Any) -> Any:
        """Raise the error of a call that cannot be made in another thread."""
        raise RpcError(
            f"A finalizer, or a handler of signals, uses an RRef with RPC worker {to.name!r} while "
            "its thread makes another call, and cannot wait. Use rpc_async there."
        )

    def close(self) -> None:
        """End the thread; the calls that were not made fail."""
        self._closed = True
        self._tasks.put(None)
        self._fail()

    def _put(self, task: Callable[[], None], future: Any) -> None:
        self._left[task] = future
        self._tasks.put(task)
        if self._closed:
            self._fail()

    def _fail(self) -> None:
        for task in list(self._left):
            future = self._left.pop(task, None)
            if future is not None:
                complete(future, Error(shut_down()))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._submit(task)
