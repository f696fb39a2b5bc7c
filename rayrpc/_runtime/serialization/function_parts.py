"""The parts of a function that goes by value, apart from its globals.

The parts are cloudpickle's.  It searches all imported modules for each function that uses one:
milliseconds for a function that uses torch.  Here the result is cached.
"""

from __future__ import annotations

import builtins
import dis
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["Names", "cells_of", "make_function", "names_of", "parts_of", "set_parts"]

_DYNAMIC = frozenset({"eval", "exec", "globals"})  # by which code can use any name
_PARTS = (
    *("__name__", "__qualname__", "__module__", "__doc__"),
    *("__annotations__", "__defaults__", "__kwdefaults__"),
)


class Names(NamedTuple):
    """The global names in the code of a function and of the functions inside of it.

    Args:
        used (tuple[str, ...]): all names.
        stored (tuple[str, ...]): names that it binds or deletes.
        builtin (tuple[str, ...]): names of builtins.
        is_dynamic (bool): it may use others, by ``eval`` and the like.
    """

    used: tuple[str, ...]
    stored: tuple[str, ...]
    builtin: tuple[str, ...]
    is_dynamic: bool


_names: weakref.WeakKeyDictionary[types.CodeType, Names] = weakref.WeakKeyDictionary()


def names_of(code: types.CodeType) -> Names:
    """Return the global names in code."""
    found = _names.get(code)
    if found is None:
        used: dict[str, None] = {}  # in order
        stored: dict[str, None] = {}
        for instruction in dis.get_instructions(code):
            if instruction.opname.endswith("_GLOBAL"):
                used[instruction.argval] = None
                if not instruction.opname.startswith("LOAD"):
                    stored[instruction.argval] = None
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                names = names_of(inner)
                used.update(dict.fromkeys(names.used))
                stored.update(dict.fromkeys(names.stored))
        builtin = tuple(name for name in used if hasattr(builtins, name))
        found = Names(tuple(used), tuple(stored), builtin, not _DYNAMIC.isdisjoint(used))
        _names[code] = found
    return found


def cells_of(func: types.FunctionType) -> list[tuple[Any, ...]]:
    """Return the contents of a function's closure; an empty tuple for an empty cell."""
    return [_contents_of(cell) for cell in func.__closure__ or ()]


def _contents_of(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()


def parts_of(func: types.FunctionType, values: Iterable[Any]) -> tuple[Any, ...]:
    """Return what ``set_parts`` takes.

    Args:
        func: the function.
        values: of its globals.
    """
    cells = cells_of(func)
    used = [each for cell in cells for each in cell]
    packages = [each for each in (*values, *used) if isinstance(each, types.ModuleType)]
    modules = _submodules(func.__code__, packages) if packages else ()
    attributes = {part: getattr(func, part) for part in _PARTS}
    return attributes, dict(func.__dict__), cells, modules


def make_function(code: types.CodeType, values: dict[str, Any]) -> types.FunctionType:
    """Return a function without its parts, since they may refer to it.

    Args:
        code: of the function.
        values: its globals.
    """
    cells = tuple(types.CellType() for _ in code.co_freevars)
    return types.FunctionType(code, values, None, None, cells or None)


def set_parts(func: types.FunctionType, parts: tuple[Any, ...]) -> None:
    """Set the parts of a function that was made; see ``parts_of``."""
    attributes, others, cells, _ = parts  # the modules were imported as they were unpickled
    for part, value in attributes.items():
        setattr(func, part, value)
    func.__dict__.update(others)
    for cell, contents in zip(func.__closure__ or (), cells, strict=True):
        if contents:
            (cell.cell_contents,) = contents


_found: weakref.WeakKeyDictionary[types.CodeType, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _submodules(
    code: types.CodeType, packages: list[types.ModuleType]
) -> tuple[types.ModuleType, ...]:
    """Return the imported modules that code may find in packages, as ``concurrent.futures``.

    The other process must import them, too.
    """
    asked = tuple(each.__name__ for each in packages if getattr(each, "__package__", None))
    state = len(sys.modules), asked
    known = _found.get(code)
    if known is not None and state in known:
        names = known[state]
    else:
        names = _find_submodules(code, asked)
        _found[code] = {state: names}
    modules = (sys.modules.get(name) for name in names)
    return tuple(each for each in modules if each is not None)


def _find_submodules(code: types.CodeType, packages: tuple[str, ...]) -> list[str]:
    used = set(code.co_names)
    prefixes = tuple(f"{package}." for package in packages)
    found = []
    for name in list(sys.modules):
        if name is not None and name.startswith(prefixes):
            for prefix in prefixes:
                if name.startswith(prefix) and used.issuperset(name[len(prefix) :].split(".")):
                    found.append(name)
                    break
    return found
