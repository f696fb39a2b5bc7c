"""How tasks and results travel between a pool and a worker in another process.

Each is pickled by itself, though several may go in one message: they share no objects.  By value,
tensors are buffers beside the pickle.  By reference, they are the places of shared memory that
they are in.  A function that its module does not name is sent to each worker once, with a key, and
by the key alone afterwards.
"""

from __future__ import annotations

import hashlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from rayrpc._runtime.serialization.codec import Codec
from rayrpc.errors import SerializationError
from rayrpc.parallel.pickle import dumps, loads
from rayrpc.parallel.pool.globals import dumps_sharing_globals
from rayrpc.parallel.pool.tasks import Result, Task, mapstar, starmapstar

__all__ = ["Inbound", "Outbound", "Shipped", "opened", "packed", "prepared", "unpacked"]

KEPT_FUNCTIONS = 64  # by a worker
PLAIN = frozenset({type(None), bool, int, float, str, bytes})


# -- objects --------------------------------------------------------------------------------------


class _NoRRefs:
    """What the codec asks about RRefs: they belong to a group, a pool's worker to another."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise SerializationError(
            "an RRef cannot be sent to a worker of a pool, or from there: the worker is not in the "
            "group of its owner. Send its value."
        )

    share = lend = borrow = unshare = receive = discard = _refuse


_codec = Codec(_NoRRefs())


@dataclass(frozen=True)
class _Packed:
    """An object, pickled.

    Args:
        data (bytes): the pickle.
        buffers (list | None): the memory of its tensors; None: they go by reference.
    """

    data: bytes
    buffers: list[Any] | None


def packed(obj: Any, copies: bool, at_once: bool = True) -> Any:
    """Return what to send for an object.

    Args:
        obj: to send.
        copies (bool): tensors go by value.
        at_once (bool): nobody changes it before it is sent.

    Raises:
        Exception: it cannot be pickled.
    """
    if type(obj) in PLAIN:
        return obj
    if not copies:
        return _Packed(dumps(obj, copy_tensor=False), None)
    payload = _codec.encode(obj, None, shares_main=False)
    buffers = payload.buffers if at_once else [bytearray(each) for each in payload.buffers]
    return _Packed(payload.data, buffers)


def unpacked(sent: Any) -> Any:
    """Return the object that was ``packed``."""
    if not isinstance(sent, _Packed):
        return sent
    if sent.buffers is None:
        return loads(sent.data)
    return _codec.decode(sent.data, sent.buffers, ())


# -- functions ------------------------------------------------------------------------------------


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


def prepared(func: Callable[..., Any] | None) -> Any:
    """Return what stands for a function in the tasks of one call of a pool."""
    if func is None or _has_a_name(func):
        return func
    data = dumps_sharing_globals(func)
    return Shipped(hashlib.sha256(data).digest(), data, isinstance(func, types.FunctionType))


def opened(func: Any) -> Any:
    """Return the function that was ``prepared``, in a worker that has it for the first time."""
    if not isinstance(func, Shipped):
        return func
    assert func.data is not None
    return loads(func.data)


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


class _Recent(OrderedDict[bytes, Any]):
    """What was used last; a pool and its worker each have one, and see the same uses."""

    def use(self, key: bytes, value: Any) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > KEPT_FUNCTIONS:
            self.popitem(last=False)


# -- tasks ----------------------------------------------------------------------------------------


def _split(task: Task) -> tuple[Any, Any]:
    """Return a task's function, and what it is called with."""
    _, _, func, args, kwds = task
    if func is mapstar or func is starmapstar:
        return args[0], (func, args[1])
    return func, (args, kwds)


def _joined(job: int, index: int, func: Any, rest: Any) -> Task:
    if rest[0] is mapstar or rest[0] is starmapstar:
        return job, index, rest[0], (func, rest[1]), {}
    return job, index, func, *rest


def _is_plain(rest: Any) -> bool:
    args, kwds = rest
    return type(args) is tuple and not kwds and all(type(each) in PLAIN for each in args)


class Outbound:
    """The pool's side of the way to one worker.

    Args:
        copies (bool): tensors go by value.
    """

    def __init__(self, copies: bool) -> None:
        self._copies = copies
        self._there = _Recent()

    def tasks(self, tasks: list[Task]) -> list[Any]:
        """Return what to send for tasks; for one that cannot be sent, the result that says so."""
        return [self._task(task) for task in tasks]

    def _task(self, task: Task) -> Any:
        job, index, *_ = task
        func, rest = _split(task)
        try:
            if not self._copies:
                return job, index, None, packed((func, rest), copies=False)
            sent = rest if _is_plain(rest) else packed(rest, copies=True)
        except Exception as exc:
            return job, index, (False, exc)
        return job, index, self._function(func), sent

    def _function(self, func: Any) -> Any:
        if not isinstance(func, Shipped):
            return func
        known = func.key in self._there
        self._there.use(func.key, True)
        return Shipped(func.key, None, func.once) if known else func

    def forget(self) -> None:
        """Expect nothing of what the worker has: a message to it was lost."""
        self._there.clear()


class Inbound:
    """The worker's side."""

    def __init__(self) -> None:
        self._here = _Recent()

    def tasks(self, sent: list[Any]) -> list[Task | Result]:
        """Return tasks; for one that cannot be sent or read, the result that says so."""
        return [each if len(each) == 3 else self._task(*each) for each in sent]

    def _task(self, job: int, index: int, func: Any, sent: Any) -> Task | Result:
        try:
            func = self._function(func)
            rest = unpacked(sent)
            if func is None:
                func, rest = rest
        except Exception as exc:
            return job, index, (False, exc)
        return _joined(job, index, func, rest)

    def _function(self, func: Any) -> Any:
        if not isinstance(func, Shipped):
            return func
        made = func.data if func.data is not None else self._here[func.key]
        self._here.use(func.key, made)
        if isinstance(made, bytes):
            made = loads(made)
            if func.once:
                self._here[func.key] = made
        return made
