"""Run what a call names: a function of Python, one of TorchScript, or an operator of torch."""

from __future__ import annotations

import functools
from types import BuiltinFunctionType
from typing import Any

import torch

from rayrpc._runtime.invocation import Invocation
from rayrpc._runtime.operators import as_schema_says, run_operator

__all__ = ["run"]


def run(invocation: Invocation, is_async: bool) -> Any:
    """Run a function, and return its value.

    Args:
        invocation: the function and its arguments.
        is_async: it returns a Future (``async_execution``), and may wrap a scripted function.
    """
    func: Any = invocation.func
    inner = getattr(func, "_wrapped_async_rpc_function", func) if is_async else func
    if isinstance(inner, torch.jit.ScriptFunction):
        return _run_scripted(inner, invocation)
    if type(func) is BuiltinFunctionType:
        return run_operator(*invocation)
    return as_schema_says(func, invocation())


def _run_scripted(func: Any, invocation: Invocation) -> Any:
    """Run a scripted function, or the Python function that it was made from.

    The original runs where the compiled one cannot: compiled RPC operators need a native agent,
    and compiled code takes no number for a tensor, as torch's own RPC examples pass it.
    """
    _, args, kwargs = invocation
    original = getattr(func, "_torchdynamo_inline", None)
    if original is not None and _calls_rpc(func):
        return original(*args, **kwargs)
    try:
        return func(*args, **kwargs)
    except RuntimeError as exc:
        if original is None or "Expected a value of type" not in str(exc):
            raise
        return original(*args, **kwargs)


@functools.lru_cache(maxsize=1024)
def _calls_rpc(func: Any) -> bool:
    return "prim::rpc_" in str(func.inlined_graph)
