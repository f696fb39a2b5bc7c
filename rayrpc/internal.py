"""Pickling by hand, for libraries that bring a pickler of their own (``_use_rpc_pickler``).

The names are those of ``torch.distributed.rpc.internal``.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch

from rayrpc._observe.profiler import profiling_key
from rayrpc._runtime import current
from rayrpc._runtime.invocation import Invocation
from rayrpc._runtime.rrefs.handle import RRef
from rayrpc._runtime.serialization.codec import add_reducer, dump_tables, load_tables
from rayrpc._runtime.serialization.remote_errors import RemoteException
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
        """Return ``obj`` as bytes, and the tensors in it."""
        return dump_tables(obj, self._rref_reducer)

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Return the object that ``serialize`` took."""
        return load_tables(binary_data, tensor_table)


def _receive_rref(fork: Any) -> Any:
    return RRef._deserialize(fork)


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Return ``obj`` as bytes, and the tensors in it.

    Raises:
        RuntimeError: it holds an RRef that was deleted.
    """
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Return the object that ``serialize`` took."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def run_pickled(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Run a ``PythonUDF`` that a user's pickler made; the target of such calls."""
    func, args, kwargs = deserialize(binary_data, tensor_table)
    return func(*(args or ()), **(kwargs or {}))


run_pickled_async = async_execution(run_pickled)
run_pickled_async.__name__ = run_pickled_async.__qualname__ = "run_pickled_async"


def pickled_invocation(pickler: Any, func: Any, args: Any, kwargs: Any) -> Invocation:
    """Return the call of ``run_pickled`` that stands for a call pickled by a user's pickler."""
    data, tensors = pickler.serialize(PythonUDF(func, args, kwargs))
    is_async = hasattr(func, "_wrapped_async_rpc_function")
    return Invocation(run_pickled_async if is_async else run_pickled, (data, tensors))


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """Return the name of a call's event in the profiler."""
    return profiling_key(exec_type.value, func_name, current_worker_name, dst_worker_name)


def _get_current_rpc_agent() -> Any:
    return current.get_agent()
