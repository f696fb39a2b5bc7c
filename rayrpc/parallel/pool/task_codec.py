"""How tasks and results are encoded between a pool and a worker in another process.

Each is pickled by itself, though several may be in one message, so that tasks share no objects.
By value, tensors are buffers beside the pickle; by reference, names of shared memory in it.  A
function that cannot be imported is sent to each worker once, with a key, and by its key afterwards.
"""

from __future__ import annotations

import hashlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rayrpc._concurrency.outcome import without_frames
from rayrpc._protocol.messages import PLAIN_TYPES
from rayrpc._runtime.serialization.codec import Codec
from rayrpc._runtime.serialization.sessions import NoRRefs
from rayrpc._runtime.serialization.shared_globals import SharesGlobals, dumps_by_value
from rayrpc.parallel.pickle import Pickler, dumps, loads
from rayrpc.parallel.pool.tasks import Result, Task, mapstar, starmapstar

__all__ = [
    "SentFunction",
    "TaskDecoder",
    "TaskEncoder",
    "decode_object",
    "encode_object",
    "load_function",
    "prepare_function",
]

MAX_FUNCTIONS = 64  # that a worker keeps


# -- objects --------------------------------------------------------------------------------------


_codec = Codec(
    NoRRefs(
        "an RRef cannot be sent to a worker of a pool, or from there: the worker is not in the "
        "group of its owner. Send its value."
    )
)


@dataclass(frozen=True)
class _EncodedObject:
    """A pickled object.

    Args:
        data (bytes): the pickle.
        buffers (list | None): the memory of its tensors; None: they are references in ``data``.
        refs (tuple): the ObjectRefs in it.
    """

    data: bytes
    buffers: list[Any] | None
    refs: tuple[Any, ...] = ()


def encode_object(obj: Any, copy_tensors: bool, copy_buffers: bool = False) -> Any:
    """Return what to send for an object.

    Args:
        obj: to send.
        copy_tensors (bool): send tensors by value, else by reference to shared memory.
        copy_buffers (bool): copy the memory of tensors, which may change before it is sent.

    Raises:
        Exception: ``obj`` cannot be pickled.
    """
    if type(obj) in PLAIN_TYPES:
        return obj
    if not copy_tensors:
        return _EncodedObject(dumps(obj, copy_tensor=False), None)
    payload = _codec.encode(obj, None, shares_main=False)
    buffers = [bytearray(each) for each in payload.buffers] if copy_buffers else payload.buffers
    return _EncodedObject(payload.data, buffers, payload.objects.refs if payload.objects else ())


def decode_object(sent: Any) -> Any:
    """Return the object that ``encode_object`` was given."""
    if not isinstance(sent, _EncodedObject):
        return sent
    if sent.buffers is None:
        return loads(sent.data)
    return _codec.decode(sent.data, sent.buffers, (), objects=sent.refs)


# -- functions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SentFunction:
    """A function that workers cannot import.

    Args:
        key (bytes): digest of its pickle.
        data (bytes | None): the pickle; None: the worker has it.
        is_reusable (bool): tasks may share what it is unpickled to; else it is unpickled for each
            task, because it has a state of its own.
    """

    key: bytes
    data: bytes | None
    is_reusable: bool


def prepare_function(func: Callable[..., Any] | None) -> Any:
    """Return what stands for a function in tasks: itself if workers can import it."""
    if func is None or _is_importable(func):
        return func
    data = dumps_by_value(lambda file: _FunctionPickler(file, copy_tensor=True), func)
    return SentFunction(hashlib.sha256(data).digest(), data, isinstance(func, types.FunctionType))


class _FunctionPickler(SharesGlobals, Pickler):
    """Pickles functions that share the globals of their program in each worker."""


def load_function(func: Any) -> Any:
    """Return the function that ``prepare_function`` was given, where it is sent but once."""
    if not isinstance(func, SentFunction):
        return func
    assert func.data is not None
    return loads(func.data)


def _is_importable(func: Any) -> bool:
    module = getattr(func, "__module__", None)
    if module in (None, "__main__", "__mp_main__") or not isinstance(
        func, (types.FunctionType, types.BuiltinFunctionType, type)
    ):
        return False
    found: Any = sys.modules.get(module)
    for part in func.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is func


class _RecentFunctions(OrderedDict[bytes, Any]):
    """The functions used last.

    The pool and its worker each have one.  They see the same uses in the same order, so that the
    worker has every function that the pool believes it has.
    """

    def use(self, key: bytes, value: Any) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > MAX_FUNCTIONS:
            self.popitem(last=False)


# -- tasks ----------------------------------------------------------------------------------------


def _split(task: Task) -> tuple[Any, Any]:
    """Return the user's function in a task, and the rest of the task's call."""
    _, _, func, args, kwds = task
    if func is mapstar or func is starmapstar:
        return args[0], (func, args[1])
    return func, (args, kwds)


def _join(job: int, index: int, func: Any, rest: Any) -> Task:
    if rest[0] is mapstar or rest[0] is starmapstar:
        return job, index, rest[0], (func, rest[1]), {}
    return job, index, func, *rest


def _is_plain(rest: Any) -> bool:
    args, kwds = rest
    return type(args) is tuple and not kwds and all(type(each) in PLAIN_TYPES for each in args)


class TaskEncoder:
    """Encode the tasks for one worker; in the pool's process.

    Args:
        copy_tensors (bool): send tensors by value.
    """

    def __init__(self, copy_tensors: bool) -> None:
        self._copy_tensors = copy_tensors
        self._sent = _RecentFunctions()

    def encode(self, tasks: list[Task]) -> list[Any]:
        """Return what to send for tasks; for one that cannot be pickled, its failed result."""
        return [self._encode(task) for task in tasks]

    def _encode(self, task: Task) -> Any:
        job, index, *_ = task
        func, rest = _split(task)
        try:
            if not self._copy_tensors:
                return job, index, None, encode_object((func, rest), copy_tensors=False)
            sent = rest if _is_plain(rest) else encode_object(rest, copy_tensors=True)
        except Exception as exc:
            return job, index, (False, without_frames(exc))
        return job, index, self._encode_function(func), sent

    def _encode_function(self, func: Any) -> Any:
        if not isinstance(func, SentFunction):
            return func
        known = func.key in self._sent
        self._sent.use(func.key, True)
        return SentFunction(func.key, None, func.is_reusable) if known else func

    def forget(self) -> None:
        """Send every function again: a message to the worker was lost."""
        self._sent.clear()


class TaskDecoder:
    """Decode tasks; in the worker."""

    def __init__(self) -> None:
        self._functions = _RecentFunctions()

    def decode(self, sent: list[Any]) -> list[Task | Result]:
        """Return tasks; for one that could not be pickled or unpickled, its failed result."""
        return [each if len(each) == 3 else self._decode(*each) for each in sent]

    def _decode(self, job: int, index: int, func: Any, sent: Any) -> Task | Result:
        try:
            func = self._decode_function(func)
            rest = decode_object(sent)
            if func is None:
                func, rest = rest
        except Exception as exc:
            return job, index, (False, exc)
        return _join(job, index, func, rest)

    def _decode_function(self, func: Any) -> Any:
        if not isinstance(func, SentFunction):
            return func
        made = func.data if func.data is not None else self._functions[func.key]
        self._functions.use(func.key, made)
        if isinstance(made, bytes):
            made = loads(made)
            if func.is_reusable:
                self._functions[func.key] = made
        return made
