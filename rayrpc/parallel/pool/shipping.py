"""How tasks and results travel between a pool and a worker in another process.

By value, they are the arguments and results of calls.  A function that its module does not name
is sent to each worker once, with a key, and by the key alone afterwards.  By reference, a task is
bytes in which tensors are the places of shared memory that they are in.
"""

from __future__ import annotations

import hashlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.pool import MaybeEncodingError  # type: ignore[attr-defined]
from typing import Any

from rayrpc.parallel.pickle import dumps, loads
from rayrpc.parallel.pool.tasks import Result, Task, mapstar, starmapstar

__all__ = ["Inbound", "Outbound", "Shipped", "prepared"]

KEPT_FUNCTIONS = 64  # by a worker


@dataclass(frozen=True)
class Shipped:
    """A function that workers have to be sent.

    Args:
        key (bytes): differs if the function does.
        data (bytes | None): the function, pickled; None: the worker has it.
        once (bool): what the worker made of it may be called again; else it is made anew for
            each task, because it has a state of its own.
    """

    key: bytes
    data: bytes | None
    once: bool


def prepared(func: Callable[..., Any], recurse: bool) -> Any:
    """Return what stands for a function in the tasks of one call of a pool."""
    if _has_a_name(func):
        return func
    data = dumps(func, recurse=recurse)
    return Shipped(hashlib.sha256(data).digest(), data, isinstance(func, types.FunctionType))


def _has_a_name(func: Any) -> bool:
    module = getattr(func, "__module__", None)
    if module in (None, "__main__", "__mp_main__") or not isinstance(
        func, (types.FunctionType, types.BuiltinFunctionType, type)
    ):
        return False
    found: Any = sys.modules.get(module)
    for part in func.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is func


def _with_function(task: Task, change: Callable[[Any], Any]) -> Task:
    job, index, func, args, kwds = task
    if func in (mapstar, starmapstar):
        return job, index, func, (change(args[0]), *args[1:]), kwds
    return job, index, change(func), args, kwds


class _Recent(OrderedDict[bytes, Any]):
    """What was used last; a pool and its worker each have one, and see the same uses."""

    def use(self, key: bytes, value: Any) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > KEPT_FUNCTIONS:
            self.popitem(last=False)


class Outbound:
    """The pool's side of the way to one worker.

    Args:
        copies (bool): tensors go by value.
    """

    def __init__(self, copies: bool) -> None:
        self._copies = copies
        self._there = _Recent()

    def tasks(self, tasks: list[Task]) -> list[Any]:
        """Return what to send for tasks."""
        if self._copies:
            return [_with_function(task, self._ship) for task in tasks]
        return [(*task[:2], *_by_reference(task[2:])) for task in tasks]

    def _ship(self, func: Any) -> Any:
        if not isinstance(func, Shipped):
            return func
        known = func.key in self._there
        self._there.use(func.key, True)
        return Shipped(func.key, None, func.once) if known else func

    def forget(self) -> None:
        """Expect nothing of what the worker has: the last tasks did not reach it."""
        self._there.clear()

    def results(self, results: list[Any]) -> list[Result]:
        """Return what the worker has sent as results."""
        return results if self._copies else [_opened(each) for each in results]


class Inbound:
    """The worker's side.

    Args:
        copies (bool): tensors go by value.
    """

    def __init__(self, copies: bool) -> None:
        self._copies = copies
        self._here = _Recent()

    def tasks(self, sent: list[Any]) -> list[Any]:
        """Return tasks; for one that cannot be read, the result that says so."""
        read = self._by_value if self._copies else self._by_reference
        tasks: list[Any] = []
        for each in sent:
            try:
                tasks.append(read(each))
            except Exception as exc:
                tasks.append((each[0], each[1], (False, exc)))
        return tasks

    def _by_value(self, task: Task) -> Task:
        return _with_function(task, self._open)

    def _open(self, func: Any) -> Any:
        if not isinstance(func, Shipped):
            return func
        made = func.data if func.data is not None else self._here[func.key]
        self._here.use(func.key, made)
        if isinstance(made, bytes):
            made = loads(made)
            if func.once:
                self._here[func.key] = made
        return made

    def _by_reference(self, sent: Any) -> Task:
        job, index, success, value = sent
        if not success:
            raise value
        func, args, kwds = loads(value)
        return job, index, func, args, kwds

    def result(self, result: Result) -> Any:
        """Return what to send for a result."""
        if self._copies:
            return result
        job, index, (success, value) = result
        return job, index, dumps((success, value), copy_tensor=False)


def _by_reference(rest: tuple[Any, ...]) -> tuple[bool, Any]:
    try:
        return True, dumps(rest, copy_tensor=False)
    except Exception as exc:
        return False, MaybeEncodingError(exc, rest)


def _opened(sent: Any) -> Result:
    job, index, data = sent
    try:
        return job, index, loads(data)
    except Exception as exc:
        return job, index, (False, exc)
