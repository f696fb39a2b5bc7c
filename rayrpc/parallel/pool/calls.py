"""The calls of a pool: each becomes tasks, and returns what their results come to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeVar, overload

from rayrpc.parallel.pool.results import (
    AsyncResult,
    Cache,
    Callback,
    IMapIterator,
    IMapUnorderedIterator,
    MapResult,
)
from rayrpc.parallel.pool.tasks import mapstar, split_chunks, starmapstar

__all__ = ["PoolCalls", "PoolResult"]

T = TypeVar("T")

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]  # of a task: func, args, kwds


class PoolResult(Protocol):
    """What a pool knows of the result of a call."""

    def set_outcome(self, index: int, outcome: tuple[bool, Any]) -> None:
        """Accept the outcome of one task."""

    def fail(self, error: BaseException) -> None:
        """Complete with an error."""


R = TypeVar("R", bound=PoolResult)


class PoolCalls:
    """Make tasks of calls; a subclass runs them.

    It overrides ``_submit``, and has ``_cache`` and ``_processes``.
    """

    _cache: Cache
    _processes: int

    def apply(
        self,
        func: Callable[..., T],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
    ) -> T:
        """Call a function in a worker and wait for its result.

        Args:
            func (Callable): to call.
            args (tuple): its arguments.
            kwds (dict, optional): its keyword arguments.

        Returns:
            What ``func`` returns.

        Raises:
            ValueError: the pool is closed or terminated.
            Exception: what ``func`` raises.

        Source: ``machin.parallel.pool.BasePool.apply``.
        """
        return self.apply_async(func, args, kwds).get()

    def apply_async(
        self,
        func: Callable[..., T],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        callback: Callback = None,
        error_callback: Callback = None,
    ) -> AsyncResult[T]:
        """Call a function in a worker, without waiting.

        Args:
            func, args, kwds: as for ``apply``.
            callback (Callable, optional): called with the result, in a thread of the pool, before
                the result is ready.
            error_callback (Callable, optional): called with the exception, likewise.

        Returns:
            AsyncResult: of what ``func`` returns.

        Raises:
            ValueError: the pool is closed or terminated.
            TypeError: ``func`` is no callable.

        Source: ``machin.parallel.pool.BasePool.apply_async``.
        """
        task = (self._prepare(func), tuple(args), dict(kwds or {}))

        def make(job: int) -> AsyncResult[T]:
            return AsyncResult(job, self._cache, callback, error_callback)

        return self._submit(make, [task])

    def map(
        self, func: Callable[..., T], iterable: Iterable[Any], chunksize: int | None = None
    ) -> list[T]:
        """Call a function with each element, and wait for the results.

        Args:
            func (Callable): takes an element.
            iterable (Iterable): of elements; read to its end first.
            chunksize (int, optional): number of elements in a task; default: a fourth of each
                worker's share.

        Returns:
            list: of results, in the order of the elements.

        Raises:
            ValueError: ``chunksize`` is less than 1, or the pool is closed or terminated.
            Exception: what the first task to fail raised, once all have ended.

        Source: ``machin.parallel.pool.BasePool.map``.
        """
        return self.map_async(func, iterable, chunksize).get()

    def map_async(
        self,
        func: Callable[..., T],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: Callback = None,
        error_callback: Callback = None,
    ) -> MapResult[T]:
        """Call a function with each element, without waiting.

        Args:
            func, iterable, chunksize: as for ``map``.
            callback (Callable, optional): called with the list of results, in a thread of the
                pool, before it is ready.
            error_callback (Callable, optional): called with the first exception, likewise.

        Returns:
            MapResult: of the list of results.

        Raises:
            ValueError: ``chunksize`` is less than 1, or the pool is closed or terminated.

        Source: ``machin.parallel.pool.BasePool.map_async``.
        """
        return self._map(mapstar, func, iterable, chunksize, callback, error_callback)

    def starmap(
        self,
        func: Callable[..., T],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
    ) -> list[T]:
        """Call a function with the values in each element, and wait for the results.

        Args:
            func (Callable): takes the values in an element as its arguments.
            iterable (Iterable[tuple]): of elements; read to its end first.
            chunksize (int, optional): as for ``map``.

        Returns:
            list: of results, in the order of the elements.

        Raises:
            ValueError: ``chunksize`` is less than 1, or the pool is closed or terminated.
            Exception: what the first task to fail raised, once all have ended.

        Source: ``machin.parallel.pool.BasePool.starmap``.
        """
        return self.starmap_async(func, iterable, chunksize).get()

    def starmap_async(
        self,
        func: Callable[..., T],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: Callback = None,
        error_callback: Callback = None,
    ) -> MapResult[T]:
        """Call a function with the values in each element, without waiting.

        Args:
            func, iterable, chunksize: as for ``starmap``.
            callback, error_callback: as for ``map_async``.

        Returns:
            MapResult: of the list of results.

        Raises:
            ValueError: ``chunksize`` is less than 1, or the pool is closed or terminated.

        Source: ``machin.parallel.pool.BasePool.starmap_async``.
        """
        return self._map(starmapstar, func, iterable, chunksize, callback, error_callback)

    @overload
    def imap(
        self, func: Callable[..., T], iterable: Iterable[Any], chunksize: Literal[1] = 1
    ) -> IMapIterator[T]: ...
    @overload
    def imap(
        self, func: Callable[..., T], iterable: Iterable[Any], chunksize: int
    ) -> IMapIterator[T] | list[T]: ...
    def imap(
        self, func: Callable[..., T], iterable: Iterable[Any], chunksize: int = 1
    ) -> IMapIterator[T] | list[T]:
        """Call a function with each element, and iterate over the results as they come.

        Args:
            func, iterable: as for ``map``.
            chunksize (int): number of elements in a task.

        Returns:
            IMapIterator: over the results in the order of the elements.  If ``chunksize`` is more
            than 1, a list of all results, as in machin.

        Raises:
            ValueError: ``chunksize`` is less than 1, or the pool is closed or terminated.

        Source: ``machin.parallel.pool.BasePool.imap``.
        """
        found: IMapIterator[T] | list[T] = self._imap(IMapIterator, func, iterable, chunksize)
        return found

    @overload
    def imap_unordered(
        self, func: Callable[..., T], iterable: Iterable[Any], chunksize: Literal[1] = 1
    ) -> IMapUnorderedIterator[T]: ...
    @overload
    def imap_unordered(
        self, func: Callable[..., T], iterable: Iterable[Any], chunksize: int
    ) -> IMapUnorderedIterator[T] | list[T]: ...
    def imap_unordered(
        self, func: Callable[..., T], iterable: Iterable[Any], chunksize: int = 1
    ) -> IMapIterator[T] | list[T]:
        """Call a function with each element, and iterate over the results in any order.

        Args:
            func, iterable: as for ``map``.
            chunksize (int): number of elements in a task.

        Returns:
            IMapUnorderedIterator: over the results in the order in which tasks end.  If
            ``chunksize`` is more than 1, a list of all results, as in machin.

        Raises:
            ValueError: ``chunksize`` is less than 1, or the pool is closed or terminated.

        Source: ``machin.parallel.pool.BasePool.imap_unordered``.
        """
        kind = IMapUnorderedIterator
        found: IMapIterator[T] | list[T] = self._imap(kind, func, iterable, chunksize)
        return found

    def _map(
        self,
        run_chunk: Callable[..., Any],
        func: Callable[..., T],
        iterable: Iterable[Any],
        chunksize: int | None,
        callback: Callback,
        error_callback: Callback,
    ) -> MapResult[T]:
        elements = list(iterable)
        size = chunksize
        if size is None:
            size = max(1, -(-len(elements) // (4 * self._processes)))
        chunks = split_chunks(elements, size)
        prepared = self._prepare(func)

        def make(job: int) -> MapResult[T]:
            return MapResult(job, self._cache, size, len(elements), callback, error_callback)

        return self._submit(make, [(run_chunk, (prepared, chunk), {}) for chunk in chunks])

    def _imap(
        self,
        kind: type[IMapIterator[Any]],
        func: Callable[..., T],
        iterable: Iterable[Any],
        chunksize: int,
    ) -> Any:
        elements = list(iterable)
        prepared = self._prepare(func)
        tasks: list[Call] = [(prepared, (each,), {}) for each in elements]
        if chunksize != 1:
            chunks = split_chunks(elements, chunksize)
            tasks = [(mapstar, (prepared, chunk), {}) for chunk in chunks]

        def make(job: int) -> IMapIterator[Any]:
            return kind(job, self._cache, len(tasks))

        result = self._submit(make, tasks)
        return result if chunksize == 1 else list(itertools.chain.from_iterable(result))

    def _submit(self, make: Callable[[int], R], tasks: list[Call]) -> R:
        """Run tasks; return their result, which ``make`` makes from the number of the call."""
        raise NotImplementedError

    def _prepare(self, func: Callable[..., Any]) -> Any:
        """Return what stands for a function in tasks.

        Raises:
            TypeError: it is no callable.
        """
        if not callable(func):
            raise TypeError(f"func must be a callable, got {func!r}")
        return func
