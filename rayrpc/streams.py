"""Streams: iterate here over what a generator of another worker yields.

    for batch in rpc.stream("loader", batches, args=(path,), window=8):
        train(batch)

The generator runs up to ``window`` values ahead; each value travels as the reply to a call, so
tensors, RRefs, errors and deaths are as with calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar, cast

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.outcome import Error, attempt, fresh
from rayrpc._concurrency.reader import release_reader
from rayrpc._concurrency.waiting import Event
from rayrpc._runtime import current, served_streams
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.call_errors import timed_out
from rayrpc._runtime.invocation import Args, Invocation, Kwargs, To, user_function
from rayrpc._runtime.served_streams import Ended, advance, open_iterator
from rayrpc.api import _prepare
from rayrpc.errors import ConfigError, WorkerDiedError
from rayrpc.options import UNSET_RPC_TIMEOUT
from rayrpc.rref_proxy import RRef

__all__ = ["Stream", "open_stream", "stream"]

T = TypeVar("T")

# How often a wait looks whether the stream was ended meanwhile.
POLL_SECONDS = 0.5


def stream(
    to: To,
    func: Callable[..., Any],
    args: Args = None,
    kwargs: Kwargs = None,
    window: int = 8,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Stream[Any]:
    """Run a generator on a worker, and return an iterator over what it yields, at once.

    The generator begins at once. Each value is a copy, as it was when it was yielded. In a context
    of distributed autograd, open and iterate the stream in the context.

    Args:
        to, func, args, kwargs: as for ``rpc_sync``; the function is a generator, an async
            generator, or returns an iterator. Its steps count as calls: each takes one of the
            worker's ``num_worker_threads`` while it runs.
        window (int): at most so many values are under way: made, and not handed out here yet.
        timeout (float): of the wait for each value, in seconds; 0: none; not given: the default.

    Returns:
        ``Stream``: for ``for`` and ``async for``.

    Raises:
        SerializationError: an argument cannot be sent.
        RuntimeError: RPC is not initialized.

    Example:
        >>> def squares(n):
        ...     for x in range(n):
        ...         yield x * x
        >>> list(rpc.stream("worker1", squares, args=(4,)))
        [0, 1, 4, 9]

    Source: rayrpc's own; Ray's ``num_returns="streaming"``.
    """
    return open_stream(current.initialized_agent(), to, func, args, kwargs, window, timeout)


def open_stream(
    agent: Agent, to: To, func: Any, args: Args, kwargs: Kwargs, window: int, timeout: float
) -> Stream[Any]:
    """Return a stream of a worker of an agent's group; see ``stream``.

    Args:
        agent (Agent): of this process in the group.
        to, func, args, kwargs, window, timeout: as for ``stream``.
    """
    if type(window) is not int or window < 1:
        raise ConfigError(f"window must be a whole number of values, 1 or more, got {window!r}")
    return Stream(agent, to, _prepare(func, args, kwargs), window, timeout)


class Stream(Generic[T]):
    """An iterator over the values of a generator of another worker; ``rpc.stream`` returns it.

    It ends as a generator does: after the last value, after an error, and when it is closed, or
    dropped.  An error of the wait, such as a timeout or Ctrl-C, does not end it.  One thread at a
    time may iterate it.

    Args:
        agent (Agent): makes its calls.
        to (str or WorkerInfo or int): the worker.
        invocation (Invocation): makes the iterator.
        window (int): how many values may be under way.
        timeout (float): of each wait; see ``stream``.
    """

    def __init__(
        self, agent: Agent, to: To, invocation: Invocation, window: int, timeout: float
    ) -> None:
        self._agent = agent
        self._timeout = agent.resolve_timeout(timeout)
        self._to = agent.lookup(to, timeout)
        self._name = user_function(invocation.func)
        self._window = window
        self._burst = max(1, window // 4)  # it asks for so many values at once, for their speed
        self._values: deque[Any] = deque()  # Futures of values to come, in order
        self._asked = itertools.count()
        self._count = 0  # of the values that were handed out
        self._error: BaseException | None = None  # has ended it, and is yet to be raised
        self._iterating = threading.Lock()
        self._to_begin = [True]  # the thread that takes it asks for the first values
        self._begun = Event()  # it has
        # the iterator lives as long as this RRef; None: the stream has ended
        opening = Invocation(open_iterator, tuple(invocation))
        rref = cast(RRef[Any], agent.caller.remote(self._to, opening, None))  # waits have a timeout
        self._rref: Any = rref
        self._id = rref._rref_id
        if rref.is_owner():
            agent.callee.streams.add_own(self._id, rref)
        self._opened = rref._get_future()
        agent.caller.streams.add(self)
        if not any(hook.of_thread and hook.wants() for hook in agent.hooks):
            # else the thread that iterates begins
            self._opened.add_done_callback(functools.partial(_begin, weakref.ref(self)))

    @property
    def has_ended(self) -> bool:
        """Whether it hands out no more values."""
        return self._rref is None

    # -- iteration ----------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        __tracebackhide__ = True
        with _Alone(self._iterating):
            deadline = Deadline(self._timeout)
            while not self._is_next(future := self._awaited()):
                self._wait(future, deadline)
            value = self._take(future)
        if type(value) is Ended:
            raise StopIteration(value.value)
        result: T = value
        return result

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        with _Alone(self._iterating):
            deadline = Deadline(self._timeout)
            while not self._is_next(future := self._awaited()):
                await self._wait_async(future, deadline)
            value = self._take(future)
        if type(value) is Ended:
            raise StopAsyncIteration
        result: T = value
        return result

    def _begin(self) -> None:
        """Have the first values asked for, once: the opening has ended."""
        try:
            self._to_begin.pop()
        except IndexError:
            self._begun.wait()
        else:
            self._ask_first()

    def _ask_first(self) -> None:
        try:
            self._opened.wait()
            self._ask(self._window)
        except BaseException as exc:  # of the opening, or of the shutdown just now; an interrupt
            self.end(exc)
        finally:
            self._begun.set()

    def _ask(self, count: int) -> None:
        """Ask for further values."""
        created_on, local_id = self._id
        for _ in range(count):
            args = created_on, self._name, local_id, next(self._asked)
            future = self._agent.caller.future(self._to, Invocation(advance, args), None)
            self._values.append(future)

    def _awaited(self) -> Any:
        """Return the Future of the next value, or that of the opening; None: it has ended."""
        if self._rref is None:
            return None
        if not self._begun.is_set():
            if not self._opened.done():
                return self._opened
            self._begin()
        try:
            return self._values[0]
        except IndexError:  # it has ended just now
            return None

    def _is_next(self, awaited: Any) -> bool:
        """Tell whether what is awaited is there: the next value, or the end."""
        return awaited is None or (awaited is not self._opened and awaited.done())

    def _take(self, future: Any) -> Any:
        """Return the value of a Future that is done, or ``Ended``.

        Args:
            future: of the next value; None: there is none.
        """
        __tracebackhide__ = True
        if self._rref is None:  # it has ended, perhaps just now by another thread
            error, self._error = self._error, None
            if error is not None:
                raise fresh(error)
            return Ended()
        try:
            value = future.wait()
            with contextlib.suppress(IndexError):  # it has ended just now
                self._values.popleft()
            if type(value) is Ended:
                self.end()
                return value
            self._count += 1
            if len(self._values) + self._burst <= self._window:
                self._ask(self._burst)
        except BaseException:  # an interrupt, too, as the value is lost
            self.end()
            raise
        return value

    def _wait(self, future: Any, deadline: Deadline, closes: bool = False) -> None:
        """Wait until a Future is done, or the stream has ended, unless this thread closes it."""
        done = Event()
        future.add_done_callback(lambda _: done.set())
        release_reader()
        while not done.wait(deadline.within(POLL_SECONDS)):
            if self._rref is None and not closes:
                return
            self._check(deadline)

    async def _wait_async(self, future: Any, deadline: Deadline, closes: bool = False) -> None:
        """Wait as ``_wait`` does, in a coroutine."""
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def wake(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(done.set)

        future.add_done_callback(wake)
        while not done.is_set() and (closes or self._rref is not None):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(done.wait(), deadline.within(POLL_SECONDS))
                return
            self._check(deadline)

    def _check(self, deadline: Deadline) -> None:
        if deadline.expired:
            raise timed_out(self._timeout)

    # -- the end ------------------------------------------------------------------------------

    def end(self, error: BaseException | None = None) -> None:
        """Hand out no more values; the generator is closed soon.

        Args:
            error: raised where the stream is iterated.
        """
        if self._rref is not None:
            self._error = error
        self._rref = None
        self._values.clear()

    def close(self) -> None:
        """Close the generator (``GeneratorExit``), and wait until it is.

        A step that runs ends before; one of an async generator is cancelled.

        Raises:
            CallTimeoutError: it was not closed in time.
            Exception: what the generator raised.
        """
        deadline = Deadline(self._timeout)
        for future in self._closing():
            self._wait(future, deadline, closes=True)

    async def aclose(self) -> None:
        """Close the generator, as ``close`` does, in a coroutine."""
        deadline = Deadline(self._timeout)
        for future in self._closing():
            await self._wait_async(future, deadline, closes=True)

    def _closing(self) -> Iterator[Any]:
        """Close the generator; yield each Future that is to be waited for meanwhile."""
        rref = self._rref
        self.end()
        if rref is None or self._agent.has_left:
            return
        yield self._opened
        if isinstance(attempt(self._opened.wait), Error):
            return  # there is no generator
        created_on, local_id = self._id
        closing = Invocation(served_streams.close, (created_on, self._name, local_id))
        future = self._agent.caller.future(self._to, closing, None)
        yield future
        with contextlib.suppress(WorkerDiedError):
            future.wait()
        del rref  # not before

    def __enter__(self) -> Stream[T]:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Stream[T]:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        state = "ended" if self._rref is None else "open"
        return f"<stream of {self._name} on {self._to.name}: {state}, {self._count} values so far>"


class _Alone:
    """Iterate a stream in this thread alone; ``contextlib`` would change a ``StopIteration``."""

    __slots__ = ("_lock",)

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ValueError("another thread iterates this stream; one at a time may")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _begin(held: weakref.ref[Stream[Any]], _: object) -> None:
    """Have a stream begin, if the program still holds it."""
    stream = held()
    if stream is not None:
        stream._begin()
