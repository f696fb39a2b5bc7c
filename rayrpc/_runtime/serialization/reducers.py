"""The reducers of all picklers: what instances of a class are pickled to, in calls."""

from __future__ import annotations

import importlib
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from rayrpc._runtime.serialization.recording import reduce_parameter
from rayrpc._runtime.serialization.sessions import (
    ArgumentObject,
    object_types,
    reduce_argument,
    reduce_object,
    session,
)
from rayrpc._runtime.serialization.tensors import reduce_array, reduce_tensor

__all__ = ["REDUCERS", "Reducer", "add_object_type", "add_reducer"]

Reducer = Callable[[Any], Any]


def _reduce_script_module(module: Any) -> tuple[Callable[[bytes], Any], tuple[bytes]]:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return _load_script_module, (file.getvalue(),)


def _load_script_module(data: bytes) -> Any:
    return torch.jit.load(io.BytesIO(data))


def _reduce_script_function(function: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    original = getattr(function, "_torchdynamo_inline", None)
    if original is None:
        file = io.BytesIO()
        torch.jit.save(function, file)
        return _load_script_module, (file.getvalue(),)
    if session.encoding is not None and session.encoding.by_value:
        # compiled code names functions of this process; the Python original is pickled with them
        return _itself, (original,)
    if "<locals>" in original.__qualname__:
        raise pickle.PicklingError(f"{original.__qualname__} cannot be found by its name")
    return _find_script_function, (original.__module__, original.__qualname__)


def _itself(obj: Any) -> Any:
    return obj


def _find_script_function(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for name in qualname.split("."):
        found = getattr(found, name)
    while hasattr(found, "_wrapped_async_rpc_function"):
        found = found._wrapped_async_rpc_function
    return found


def _reduce_builtin(function: Any) -> Any:
    name = function.__name__
    if getattr(torch, name, None) is function:
        return _torch_function, (name,)
    return function.__reduce_ex__(4)


def _torch_function(name: str) -> Any:
    return getattr(torch, name)


_jit: Any = torch.jit

REDUCERS: dict[type, Reducer] = {
    np.ndarray: reduce_array,
    torch.Tensor: reduce_tensor,
    torch.nn.Parameter: reduce_parameter,
    _jit.ScriptModule: _reduce_script_module,
    _jit.RecursiveScriptModule: _reduce_script_module,
    _jit.ScriptFunction: _reduce_script_function,
    types.BuiltinFunctionType: _reduce_builtin,
    ArgumentObject: reduce_argument,
}


def add_reducer(cls: type, reducer: Reducer) -> None:
    """Pickle instances of exactly ``cls`` with ``reducer`` in all calls from now on."""
    REDUCERS[cls] = reducer


def add_object_type(cls: type) -> None:
    """Send instances of exactly ``cls`` as references to objects of the cluster's store."""
    object_types.add(cls)
    add_reducer(cls, reduce_object)
