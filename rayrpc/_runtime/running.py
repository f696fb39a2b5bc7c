"""Run what a call names: a function of Python, one of TorchScript, or an operator of torch."""

from __future__ import annotations

import operator
from types import BuiltinFunctionType
from typing import Any

import torch

from rayrpc._runtime.invocation import Invocation
from rayrpc._runtime.operators import as_schema_says, run_operator
from rayrpc.futures import AnyFuture

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
        value = _run_scripted(inner, invocation)
        if is_async and not isinstance(value, AnyFuture):
            raise RuntimeError(  # torch's text
                "Async functions must return an IValue of Future type, but got "
                f"{type(value).__name__}"
            )
        return value
    if type(func) is BuiltinFunctionType:
        return run_operator(*invocation)
    return as_schema_says(func, invocation())


def _run_scripted(func: Any, invocation: Invocation) -> Any:
    """Run a scripted function, which may get numbers for tensors, as torch's RPC examples do."""
    _, args, kwargs = invocation
    try:
        return func(*args, **kwargs)
    except RuntimeError as exc:
        if "Expected a value of type 'Tensor" not in str(exc):
            raise
        kinds = {argument.name: argument.type.kind() for argument in func.schema.arguments}
        positional = list(map(_as_tensor, kinds.values(), args))
        named = {name: _as_tensor(kinds.get(name), value) for name, value in kwargs.items()}
        if not any(map(operator.is_not, [*positional, *named.values()], [*args, *kwargs.values()])):
            raise  # the function has run
        return func(*positional, *args[len(positional) :], **named)


def _as_tensor(kind: str | None, value: Any) -> Any:
    is_number = isinstance(value, (bool, complex, float, int))
    return torch.tensor(value) if is_number and kind == "TensorType" else value
