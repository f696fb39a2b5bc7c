"""Script modules as their Python methods see them: wrappers, and attributes.

Torch keeps the attributes of a module in C++, where an RRef of rayrpc cannot be.  Attributes that
hold RRefs are kept here, as long as the module; the C++ attribute stays empty.

A list or dict that Python reads from a module is a copy.  While a Python method runs, each is
read but once, and written back at the end.  Before a compiled method runs it is written back, too,
and afterwards it is filled again.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.jit._recursive import wrap_cpp_module
from torch.jit._state import _get_python_class, _get_script_class, _python_cu

from rayrpc._runtime.rrefs.handle import RRef

__all__ = [
    "add_wrapper",
    "containers_kept",
    "containers_shared",
    "copying",
    "expect_wrapper",
    "get_attribute",
    "has_containers",
    "held_by",
    "native_method",
    "paths_of",
    "set_attribute",
    "type_with_rrefs",
    "unit_of",
    "wrapper_of",
]

_C: Any = torch._C
native_method: Any = _C.ScriptModule._get_method
_native_get: Any = _C.ScriptModule.getattr
_native_set: Any = _C.ScriptModule.setattr
_native_infer: Any = _C._jit_try_infer_type

# ``torch._C.ScriptModule``s are equal if they are one module in C++
_wrappers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_held: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()
_units: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
# by hash, of modules that are being loaded or copied
_expected: dict[int, tuple[Any, Any, dict[str, Any]]] = {}


class _Containers(threading.local):
    """Lists and dicts that Python methods, which run in this thread, have read."""

    depth = 0

    def __init__(self) -> None:
        self.read: dict[tuple[Any, str], Any] = {}


_containers = _Containers()


# -- wrappers ---------------------------------------------------------------------------------


def add_wrapper(module: Any) -> Any:
    """Note the wrapper of a module, and return it."""
    native = module._c
    _wrappers[hash(native)] = module
    expected = _expected.pop(hash(native), None)
    if expected is not None:
        _, _units[native], _held[native] = expected
    return module


def expect_wrapper(module: Any, unit: Any, held: dict[str, Any]) -> None:
    """Note what belongs to a module that was loaded or copied, whose wrapper is made next.

    Args:
        module (torch._C.ScriptModule): the module.
        unit (torch._C.CompilationUnit): has the functions that its code calls.
        held (dict): by name, its attributes that hold RRefs.
    """
    _expected[hash(module)] = module, unit, held


def unit_of(module: Any) -> Any:
    """Return the ``torch._C.CompilationUnit`` that has the functions of a module's code."""
    return _units.get(module, _python_cu)


def paths_of(module: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a ``torch._C.ScriptModule``, and all modules in it, with their paths."""
    yield path, module
    for name, part in _C.ModuleDict(module).items():
        yield from paths_of(part, f"{path}.{name}")


def copying(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of ``torch._C.ScriptModule`` that copies attributes with RRefs, too."""

    def copy_with_rrefs(self: Any, *args: Any) -> Any:
        copied = copy(self, *args)
        parts = dict(paths_of(copied))
        for path, part in paths_of(self):
            expect_wrapper(parts[path], unit_of(part), dict(held_by(part)))
        return copied

    return copy_with_rrefs


def wrapper_of(module: Any) -> Any:
    """Return the Python wrapper of a ``torch._C.ScriptModule``."""
    found = _wrappers.get(hash(module))
    return wrap_cpp_module(module) if found is None else found


# -- attributes -------------------------------------------------------------------------------


def set_attribute(self: Any, name: str, value: Any) -> None:
    """Set an attribute of a ``torch._C.ScriptModule``, which may hold RRefs."""
    try:
        _native_set(self, name, value)
    except RuntimeError:
        if not _has_rref(value):
            raise
        _held.setdefault(self, {})[name] = value
    else:
        held_by(self).pop(name, None)
    _containers.read.pop((self, name), None)


def get_attribute(self: Any, name: str) -> Any:
    """Return an attribute of a ``torch._C.ScriptModule``."""
    held = held_by(self)
    if name in held:
        return held[name]
    read = _containers.read
    if (self, name) in read:
        return read[self, name]
    value = _native_get(self, name)
    if _containers.depth and isinstance(value, (dict, list)):
        read[self, name] = value
    return value


def held_by(module: Any) -> dict[str, Any]:
    """Return by name the attributes of a module that hold RRefs."""
    return _held.get(module) or {}


@contextlib.contextmanager
def containers_kept() -> Iterator[None]:
    """Keep what Python methods read and change; within, none is read twice."""
    _containers.depth += 1
    try:
        yield
    finally:
        _containers.depth -= 1
        if not _containers.depth:
            read, _containers.read = _containers.read, {}
            _write_back(read)


def has_containers() -> bool:
    """Tell whether Python methods, which run in this thread, have read lists or dicts."""
    return bool(_containers.read)


@contextlib.contextmanager
def containers_shared() -> Iterator[None]:
    """Share with compiled code what Python methods of this thread have read."""
    read = _containers.read
    _write_back(read)
    try:
        yield
    finally:
        for (module, name), value in read.items():
            now = _native_get(module, name)
            if isinstance(value, dict):
                value.clear()
                value.update(now)
            else:
                value[:] = now


def _write_back(read: dict[tuple[Any, str], Any]) -> None:
    for (module, name), value in list(read.items()):
        _native_set(module, name, value)


# -- types ------------------------------------------------------------------------------------


def type_with_rrefs(value: Any) -> Any:
    """Return what TorchScript infers of a value's type, which may hold RRefs."""
    inferred = _native_infer(value)
    if inferred.success() or not _has_rref(value):
        return inferred
    return _C.InferredType(_type_of(value))


def _has_rref(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_rref, value))
    if isinstance(value, dict):
        return any(map(_has_rref, value.values()))
    return isinstance(value, RRef)


def _type_of(value: Any) -> Any:
    if isinstance(value, RRef):
        return _C.RRefType(_type_of_value(value))
    if isinstance(value, list):
        return _C.ListType(_type_of(value[0]))
    if isinstance(value, tuple):
        return _C.TupleType([_type_of(item) for item in value])
    if isinstance(value, dict):
        key, item = next(iter(value.items()))
        return _C.DictType(_type_of(key), _type_of(item))
    inferred = _native_infer(value)
    if not inferred.success():
        raise RuntimeError(inferred.reason())
    return inferred.type()


def _type_of_value(rref: RRef[Any]) -> Any:
    """Return the type of the value of an RRef; ``PyObject`` if TorchScript has none for it."""
    text = rref._get_api().rpc_sync(rref.owner(), _annotation_of_value, args=(rref,))
    if text is None:
        return _C.PyObjectType.get()
    python_class = _get_python_class(text)
    if python_class is not None:
        return _get_script_class(python_class)
    unit: Any = torch.jit.CompilationUnit(f"def same(x: {text}):\n    return x\n")
    return unit.same.schema.arguments[0].type


def _annotation_of_value(rref: RRef[Any]) -> str | None:
    inferred = type_with_rrefs(rref.local_value())
    return inferred.type().annotation_str if inferred.success() else None
