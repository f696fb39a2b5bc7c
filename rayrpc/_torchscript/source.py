"""TorchScript's own source, run as Python: for code that was loaded, or has no Python original.

``code`` of a compiled function is Python but for the names in it.  Operators are functions of
``torch``, of which those on numbers, strings, lists and dicts are Python's here: lists are changed
in place.  Classes that are only in an archive cannot be made.
"""

from __future__ import annotations
import __future__

import operator
import typing
from collections.abc import Callable
from typing import Any

import torch

from rayrpc import autograd
from rayrpc._runtime.rrefs.handle import RRef

__all__ = ["compiled_source"]

_jit: Any = torch.jit


def compiled_source(code: Any, name: str, find_function: Callable[[str], Any]) -> Any:
    """Return the Python function that does what compiled code does.

    Args:
        code (torch.jit.ScriptFunction | torch.ScriptMethod): the code.
        name (str): of the function in it.
        find_function (Callable): returns the compiled function of a qualified name, or None.
    """
    constants = getattr(code, "code_with_constants", ("", None))[1]
    names = {
        **vars(typing),
        "CONSTANTS": constants,
        "Device": torch.device,
        "Future": torch.futures.Future,
        "RRef": RRef,
        "Tensor": torch.Tensor,
        "__torch__": _Path("__torch__", find_function),
        "annotate": _value,
        "fork": _jit.fork,
        "inf": float("inf"),
        "nan": float("nan"),
        "ops": _Ops(),
        "torch": _Operators("aten", device=torch.device),
        "unchecked_cast": _value,
        "uninitialized": lambda kind: None,
    }
    flags = __future__.annotations.compiler_flag
    exec(compile(code.code, f"<TorchScript of {name}>", "exec", flags, dont_inherit=True), names)
    return names[name]


def _value(kind: Any, value: Any) -> Any:
    return value


class _Path:
    """A qualified name of TorchScript: a package, a type, or a function."""

    def __init__(self, name: str, find_function: Callable[[str], Any]) -> None:
        self._name = name
        self._find_function = find_function

    def __getattr__(self, name: str) -> Any:
        return _Path(f"{self._name}.{name}", self._find_function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function = self._find_function(self._name)
        if function is None:
            raise RuntimeError(
                f"{self._name} of a loaded module cannot be called outside of torch's native RPC: "
                "code that calls RPC runs in Python, and the archive has no Python class. Import "
                "the module that defines it, and compile the function here."
            )
        return function(*args, **kwargs)


class _Ops:
    """``ops`` of TorchScript's source: operators by their namespace."""

    def __getattr__(self, namespace: str) -> Any:
        return _Operators(namespace)


class _Operators:
    """The operators of a namespace.

    Args:
        namespace (str): of ``torch.ops``; "aten" is ``torch`` in TorchScript's source.
        others (Any): what else is found there.
    """

    def __init__(self, namespace: str, **others: Any) -> None:
        self._natives = getattr(torch.ops, namespace)
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        if name in _ANY:
            return _ANY[name]
        native = getattr(self._natives, name, None)

        def call(*args: Any, **kwargs: Any) -> Any:
            first = args[0] if args else None
            if isinstance(first, (dict, list, str)) and hasattr(first, name):
                result = getattr(first, name)(*args[1:], **kwargs)
                return list(result) if name in ("items", "keys", "values") else result
            if name in _NUMBERS and not any(isinstance(value, torch.Tensor) for value in args):
                return _NUMBERS[name](*args)
            if native is None:
                raise RuntimeError(f"operator {name} of TorchScript has no counterpart in Python")
            return _overload(native, args, kwargs)(*args, **kwargs)

        return call


def _overload(packet: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the overload for arguments; its packet, if only a conversion finds one.

    The compiler takes an int for an int; the packet, at run time, also for a bool or a Tensor.
    """
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        others = arguments[len(args) :]
        if (
            len(args) <= len(arguments)
            and all(map(_is_of, [argument.type for argument in arguments], args))
            and all(other.has_default_value() or other.name in kwargs for other in others)
        ):
            return overload
    return packet


_CLASSES: dict[str, type] = {
    "BoolType": bool,
    "ComplexType": complex,
    "DeviceObjType": torch.device,
    "DictType": dict,
    "FloatType": float,
    "IntType": int,
    "StringType": str,
}


def _is_of(kind: Any, value: Any) -> bool:
    """Tell whether a value needs no conversion to a type."""
    name = kind.kind()
    if name in _CLASSES:
        return type(value) is _CLASSES[name]
    if name == "TensorType":
        return isinstance(value, torch.Tensor)
    if name == "NumberType":
        return isinstance(value, (complex, float, int))
    if name == "OptionalType":
        return value is None or _is_of(kind.getElementType(), value)
    if name == "ListType":
        element = kind.getElementType()
        return isinstance(value, list) and all(_is_of(element, item) for item in value)
    return True


def _slice(items: Any, start: Any = None, end: Any = None, step: int = 1) -> Any:
    return items[start:end:step]


def _tensor(
    data: Any, *, dtype: int | None = None, device: Any = None, requires_grad: bool = False
) -> torch.Tensor:
    kind = None if dtype is None else torch.ops.aten.empty([0], dtype=dtype).dtype
    return torch.tensor(data, dtype=kind, device=device, requires_grad=requires_grad)


def _raise(message: str, class_name: str | None = None) -> Any:
    raise _jit.Error(message)


def _backward(context_id: int, roots: Any, retain_graph: bool = False) -> None:
    autograd.backward(context_id, roots, retain_graph)


# operators by their names, for values of any type
_ANY: dict[str, Callable[..., Any]] = {
    "Delete": operator.delitem,
    "RaiseException": _raise,
    "__contains__": operator.contains,
    "__is__": operator.is_,
    "__isnot__": operator.is_not,
    "__not__": operator.not_,
    "_set_item": operator.setitem,
    "confirmed_by_owner": RRef.confirmed_by_owner,
    "dist_backward": _backward,
    "get_gradients": autograd.get_gradients,
    "is_owner": RRef.is_owner,
    "is_scripting": lambda: True,
    "len": len,
    "local_value": RRef.local_value,
    "owner": RRef.owner,
    "owner_name": RRef.owner_name,
    "tensor": _tensor,
    "to_here": RRef.to_here,
    "wait": lambda future: future.wait(),
}

# the same where no argument is a tensor
_NUMBERS: dict[str, Callable[..., Any]] = {
    "__and__": operator.and_,
    "__or__": operator.or_,
    "__xor__": operator.xor,
    "abs": abs,
    "add": operator.add,
    "add_": operator.iadd,
    "div": operator.truediv,
    "eq": operator.eq,
    "floordiv": operator.floordiv,
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "list": list,
    "lt": operator.lt,
    "max": max,
    "min": min,
    "mul": operator.mul,
    "ne": operator.ne,
    "neg": operator.neg,
    "remainder": operator.mod,
    "slice": _slice,
    "str": str,
    "sub": operator.sub,
}
