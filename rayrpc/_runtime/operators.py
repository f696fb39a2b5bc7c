"""Calls of torch's operators, which torch sends by their names and runs by their schemas.

Here they are sent as other functions are.  What a schema decides is as in torch: arguments that no
schema takes are an error where the call is made (at the callee, if an ObjectRef stands for one), an
operator of numbers returns a number, and several tensors are a list.  What torch cannot send works,
too: ``ones(2, 2)``, ``max(x, 0)``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.jit._builtins import _find_builtin

from rayrpc._runtime.serialization.sessions import object_types

__all__ = ["as_schema_says", "check_operator", "run_operator"]

# Types whose values do not matter to a schema; the schema of such a call is looked up once.
_SIMPLE = frozenset({torch.Tensor, int, float, bool, type(None), torch.nn.Parameter})
_MAX_KNOWN = 1024

_SCHEMA_TYPES = {int: "int", float: "float", bool: "bool", complex: "complex"}
_NUMBERS = frozenset(_SCHEMA_TYPES)

# torch's words
NO_SCHEMA = "Overloaded torch operator invoked from Python failed to match any schema"

_known: set[Any] = set()


def check_operator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise an error if ``func`` is an operator of torch that cannot take these arguments.

    Args:
        func (Callable): what the call runs; nothing is done if it is another function.
        args (Sequence): positional arguments.
        kwargs (Mapping): keyword arguments.

    Raises:
        RuntimeError: neither a schema nor the operator's Python function takes the arguments.
    """
    if type(func) is not types.BuiltinFunctionType:
        return
    kinds = tuple(map(type, args))
    key = func, kinds, tuple([(name, type(each)) for name, each in kwargs.items()])
    if key in _known:
        return
    name = _find_builtin(func)
    if name is None:
        return
    try:
        torch._C._jit_resolve_packet(name, *args, **kwargs)
    except RuntimeError as exc:
        if not object_types.isdisjoint((*kinds, *map(type, kwargs.values()))):
            return  # their values are known at the callee
        if not _runs(func, args, kwargs):
            raise RuntimeError(str(exc)) from None
    else:
        if _SIMPLE.issuperset(kinds) and _SIMPLE.issuperset(map(type, kwargs.values())):
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known.add(key)


def _runs(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether Python's function takes arguments that no schema does, as ``ones(2, 2)``."""

    def on_meta(value: Any) -> Any:
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    try:
        with torch.device("meta"), torch.no_grad():
            func(*map(on_meta, args), **{name: on_meta(each) for name, each in kwargs.items()})
    except TypeError:
        return False
    except Exception:
        return True  # an error of the values: the callee raises it
    return True


def run_operator(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a function that is written in C; of an operator return what its schema says.

    Args:
        func (Callable): an operator, or another such function.
        args (Sequence): positional arguments.
        kwargs (Mapping): keyword arguments.

    Raises:
        RuntimeError: it is an operator that does not take the arguments.
    """
    kinds = tuple(map(type, args))
    name = _find_builtin(func) if _NUMBERS.issuperset(kinds) and not kwargs else None
    if name is not None and (overload := _overload_of_numbers(name, kinds)) is not None:
        return overload(*args)
    try:
        value = func(*args, **kwargs)
    except TypeError as exc:
        if _find_builtin(func) is None:
            raise
        raise RuntimeError(f"{NO_SCHEMA}:\n{exc}") from exc
    return as_schema_says(func, value)


def as_schema_says(func: Any, value: Any) -> Any:
    """Return the result of a function, tensors of an operator as a list."""
    if type(value) is tuple and (name := _find_builtin(func)) is not None:
        return list(value) if _has_one_result(name) else value
    return value


@functools.lru_cache(1024)
def _overload_of_numbers(name: str, kinds: tuple[type, ...]) -> Any:
    """Return the overload of an operator for numbers of these types; None if it has none."""
    wanted = [_SCHEMA_TYPES[kind] for kind in kinds]
    for schema in torch._C._jit_get_schemas_for_operator(name):
        if wanted and [str(each.type) for each in schema.arguments] == wanted:
            found: Any = torch._C._get_operation_overload(name, schema.overload_name)
            return found[0]
    return None


@functools.lru_cache(1024)
def _has_one_result(name: str) -> bool:
    schemas = torch._C._jit_get_schemas_for_operator(name)
    return all(len(schema.returns) == 1 for schema in schemas)
