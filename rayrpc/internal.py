"""Pickling for libraries with a pickler of their own (``_use_rpc_pickler``).

The names are those of ``torch.distributed.rpc.internal``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple

import torch

from rayrpc._observe.profiler import profiling_key
from rayrpc._runtime import current
from rayrpc._runtime.invocation import Args, Invocation, Kwargs
from rayrpc._runtime.operators import check_operator
from rayrpc._runtime.rrefs.handle import RRef
from rayrpc._runtime.serialization.codec import dump_tables, load_tables
from rayrpc._runtime.serialization.reducers import add_reducer
from rayrpc._runtime.serialization.remote_errors import RemoteException, describe, rebuild
from rayrpc.functions import async_execution

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]


class RPCExecMode(Enum):
    """How a call is made."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A user's function and its arguments."""

    func: Any
    args: Any
    kwargs: Any


class _InternalRPCPickler:
    """Pickle to bytes and a table of tensors.

    A subclass may override ``serialize``; what it sends is read by ``deserialize`` below.
    """

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        add_reducer(obj_class, reducer)

    def _rref_reducer(self, rref: Any) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return self._py_rref_reducer(rref)

    def _py_rref_reducer(self, rref: Any) -> tuple[Callable[[Any], Any], tuple[Any]]:
        return _receive_rref, (rref._serialize(),)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        """Pickle ``obj``; see ``serialize``."""
        return dump_tables(obj, self._rref_reducer)

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Unpickle; see ``deserialize``."""
        return load_tables(binary_data, tensor_table)


def _receive_rref(fork: Any) -> Any:
    return RRef._deserialize(fork)


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Pickle an object, but for its tensors.

    Args:
        obj: any object that RPC can send.

    Returns:
        The bytes, and the tensors in the order in which the bytes refer to them.

    Raises:
        RuntimeError: the object holds an RRef that was deleted.

    Source: ``torch.distributed.rpc.internal.serialize``.
    """
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Unpickle what ``serialize`` returned.

    Args:
        binary_data (bytes): the bytes.
        tensor_table (list[Tensor]): the tensors.

    Returns:
        The object.

    Raises:
        FunctionNotFoundError: it names a function or class that is not here.

    Source: ``torch.distributed.rpc.internal.deserialize``.
    """
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def run_pickled(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Run a ``PythonUDF`` that a user's pickler has pickled.

    Args:
        binary_data (bytes): of the pickler's ``serialize``.
        tensor_table (list[Tensor]): of the pickler's ``serialize``.

    Returns:
        The result of the function.
    """
    func, args, kwargs = deserialize(binary_data, tensor_table)
    return func(*(args or ()), **(kwargs or {}))


run_pickled_async = async_execution(run_pickled)
run_pickled_async.__name__ = run_pickled_async.__qualname__ = "run_pickled_async"


def prepare(pickler: Any, func: Any, args: Args, kwargs: Kwargs) -> Invocation:
    """Return the call that a user makes.

    Args:
        pickler: with ``serialize``; a user's, or ``_internal_rpc_pickler``.
        func, args, kwargs: of the call, as the user gives them.

    Raises:
        TypeError: they are none, or no schema of the operator takes them.
    """
    # the type first: to find out that a tuple is iterable takes longer
    if type(args) is not tuple and (isinstance(args, str) or not isinstance(args or (), Iterable)):
        raise TypeError(f"args must be a tuple of arguments, got {args!r}")
    if not callable(func):
        raise TypeError("function should be callable.")
    check_operator(func, args or (), kwargs or {})
    if pickler is _internal_rpc_pickler:
        return Invocation(func, args or (), kwargs or {})
    return pickled_invocation(pickler, func, args or (), kwargs or {})


def pickled_invocation(pickler: Any, func: Any, args: Any, kwargs: Any) -> Invocation:
    """Return a call whose target unpickles and runs another.

    Args:
        pickler: a user's pickler, with ``serialize``.
        func, args, kwargs: of the other call.
    """
    data, tensors = pickler.serialize(PythonUDF(func, args, kwargs))
    is_async = hasattr(func, "_wrapped_async_rpc_function")
    return Invocation(run_pickled_async if is_async else run_pickled, (data, tensors))


def _run_function(python_udf: PythonUDF) -> Any:
    """Run a function; return its result, or a RemoteException."""
    try:
        return python_udf.func(*python_udf.args, **python_udf.kwargs)
    except Exception as exc:
        return describe(exc, current.get_agent().info, pickle.dumps)


def _handle_exception(result: Any) -> None:
    """Raise the error that a RemoteException describes; do nothing with another result."""
    if isinstance(result, RemoteException):
        raise rebuild(result, keeps_type=True)


def _start_record_function(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dest_worker_name: str
) -> Any:
    """Return a profiler's range, which has begun, with the name of a call's event."""
    key = _build_rpc_profiling_key(exec_type, func_name, current_worker_name, dest_worker_name)
    record = torch.autograd.profiler.record_function(key)
    record.__enter__()
    return record


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Return the name of a call's event in the profiler."""
    return profiling_key(exec_type.value, func_name, current_worker_name, dst_worker_name)


def _get_current_rpc_agent() -> Any:
    return current.get_agent()
