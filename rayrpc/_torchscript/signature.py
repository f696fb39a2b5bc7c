"""The checks that TorchScript makes of a call, without a run of the compiled code.

A graph that only returns its inputs is compiled with the same arguments; calling it has torch
count, name, check and convert them, with torch's own errors.  Torch cannot convert RRefs of
rayrpc, nor keep the identity of Futures and modules; these are checked here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.jit._state import _get_python_class

from rayrpc._runtime.rrefs.handle import RRef

__all__ = ["Signature"]

_C: Any = torch._C
_OBJECT = _C.PyObjectType.get()
# of which torch makes copies, or which it cannot convert
_OBJECTS = frozenset(("AnyType", "ClassType", "FutureType", "InterfaceType", "RRefType"))


class Signature:
    """The arguments that a compiled function or method takes.

    Args:
        schema (FunctionSchema): of the function; that of a method has ``self`` first.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._check = _returning_its_inputs(schema)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the values of all arguments, in the order of the schema.

        Raises:
            RuntimeError: the arguments are too many, too few, or of other names or types.
        """
        schema = self._schema
        named = kwargs
        if len(args) + len(kwargs) <= len(schema.arguments):
            named = {}
            for argument in schema.arguments[len(args) :]:
                if argument.name in kwargs:
                    named[argument.name] = kwargs[argument.name]
                elif argument.has_default_value():
                    named[argument.name] = argument.default_value
        try:
            values: tuple[Any, ...] = self._check(*args, **named)
        except RuntimeError as exc:
            text = str(exc).replace(str(self._check.schema), str(schema))
            raise RuntimeError(text) from None
        for name in kwargs.keys() - named.keys():  # torch's texts
            known = any(argument.name == name for argument in schema.arguments)
            raise RuntimeError(
                f"Argument '{name}' specified both as positional and keyword argument. "
                f"Schema: {schema}"
                if known
                else f"Unknown keyword argument '{name}' for operator '{schema.name}'. "
                f"Schema: {schema}"
            )
        for position, (argument, value) in enumerate(zip(schema.arguments, values, strict=True)):
            if not _accepts(argument.type, value):
                raise RuntimeError(
                    f"{schema.name}() Expected a value of type '{argument.type}' for argument "
                    f"'{argument.name}' but instead found type '{type(value).__name__}'.\n"
                    f"Position: {position}\nDeclaration: {schema}"
                )
        return values


def _returning_its_inputs(schema: Any) -> Any:
    graph = _C.Graph()
    inputs = []
    for argument in schema.arguments:
        inputs.append(graph.addInput(argument.name))
        inputs[-1].setType(_checked_type(argument.type))
    result = graph.insertNode(graph.create("prim::TupleConstruct", inputs, 1)).output()
    result.setType(_C.TupleType([value.type() for value in inputs]))
    graph.registerOutput(result)
    return _C._create_function_from_graph(schema.name, graph)


def _checked_type(kind: Any) -> Any:
    """Return the type as which torch checks and converts the values of a type."""
    name = kind.kind()
    if name in _OBJECTS:
        return _OBJECT
    if name == "OptionalType":
        return _C.OptionalType(_checked_type(kind.getElementType()))
    parts = [_checked_type(part) for part in kind.containedTypes()]
    if all(part == whole for part, whole in zip(parts, kind.containedTypes(), strict=True)):
        return kind
    if name == "ListType":
        return _C.ListType(*parts)
    if name == "DictType":
        return _C.DictType(*parts)
    if name == "TupleType" and kind.annotation_str.startswith("Tuple["):
        return _C.TupleType(parts)
    return _OBJECT  # a named tuple, which keeps its class


def _accepts(kind: Any, value: Any) -> bool:
    """Tell whether a value that torch has not checked, or has in part, is of a type."""
    name = kind.kind()
    if name == "RRefType":  # torch, too, does not check of what
        return isinstance(value, RRef)
    if name == "FutureType":
        return isinstance(value, _C.Future)
    if name == "InterfaceType":
        module = getattr(value, "_c", value)  # compiled code makes modules without a wrapper
        return isinstance(module, _C.ScriptModule) and module._type().isSubtypeOf(kind)
    if name == "ClassType":
        python_class = _get_python_class(kind.qualified_name())
        return python_class is None or isinstance(value, python_class)
    if name == "OptionalType":
        return value is None or _accepts(kind.getElementType(), value)
    if name == "ListType":
        return all(_accepts(kind.getElementType(), item) for item in value)
    if name == "DictType":
        return all(_accepts(kind.getValueType(), item) for item in value.values())
    if name == "TupleType":
        elements = kind.elements()
        is_tuple = isinstance(value, tuple) and len(value) == len(elements)
        return is_tuple and all(map(_accepts, elements, value))
    return True
