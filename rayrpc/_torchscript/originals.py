"""The Python code of compiled functions and methods, and how it runs in their place."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch.jit._recursive import concrete_type_store
from torch.jit._state import _python_cu

from rayrpc._runtime.rrefs.creation_site import users_frame
from rayrpc._torchscript import modules
from rayrpc._torchscript.source import compiled_source

__all__ = ["add_compiled", "calls_now", "is_scripting", "of_function", "of_method", "run"]

_ScriptError: Any = torch.jit.Error

# texts of rayrpc's errors, and what compiled code says instead
_TEXTS = {
    "can't call localValue() on user": "Can't call RRef.local_value() on a non-owner RRef",
    "Can not pickle rref in python pickler": "RRef jit pickling is only allowed inside RPC calls",
}

# of Python functions and methods that were compiled
_compiled_code: set[CodeType] = set()


class _Running(threading.local):
    """How many originals this thread is in."""

    depth = 0


_running = _Running()


def add_compiled(function: Any) -> None:
    """Note that a Python function or method was compiled; see ``is_scripting``."""
    code = getattr(function, "__code__", None)
    if code is not None:
        _compiled_code.add(code)


def is_scripting() -> bool:
    """Return whether the caller runs in the place of compiled code (``torch.jit.is_scripting``)."""
    return _running.depth > 0 and sys._getframe(1).f_code in _compiled_code


def calls_now() -> bool:
    """Return whether the call that this thread sends just now is one of compiled code."""
    frame = users_frame() if _running.depth > 0 else None
    return frame is not None and frame.f_code in _compiled_code


def run(original: Callable[..., Any], values: tuple[Any, ...]) -> Any:
    """Run Python code in the place of compiled code.

    Raises:
        RuntimeError: as it is raised.
        torch.jit.Error: another Exception is raised, as compiled code reports it.
    """
    __tracebackhide__ = True
    _running.depth += 1
    try:
        return original(*values)
    except RuntimeError as exc:
        for text, compiled_text in _TEXTS.items():
            if text in str(exc):
                raise RuntimeError(f"{compiled_text}: {exc}") from exc
        raise
    except Exception as exc:
        if isinstance(exc, _ScriptError):
            raise
        raise _ScriptError(
            "The following operation failed in the TorchScript interpreter.\n"
            f"{type(exc).__name__}: {exc}"
        ) from exc
    finally:
        _running.depth -= 1


def of_function(function: Any) -> Any:
    """Return the Python code of a ``torch.jit.ScriptFunction``."""
    found = getattr(function, "_torchdynamo_inline", None)
    add_compiled(found)
    return _from_source(function, _python_cu) if found is None else found


def of_method(method: Any) -> Callable[..., Any]:
    """Return the Python code of a ``torch.ScriptMethod``, which takes ``self`` first."""
    wrapped = getattr(method, "__wrapped__", None)
    if wrapped is None:
        wrapped = _method_of_class(method.owner._type(), method.name)
    if wrapped is None:
        return _from_source(method, modules.unit_of(method.owner))
    found: Callable[..., Any] = getattr(wrapped, "__func__", wrapped)
    add_compiled(found)
    return found


def _from_source(code: Any, unit: Any) -> Callable[..., Any]:
    made: Callable[..., Any] = compiled_source(code, code.name, unit.find_function)
    return made


def _method_of_class(module_type: Any, name: str) -> Any:
    """Return a function of the Python class that a module's type was compiled from, or None."""
    store: dict[Any, list[Any]] = concrete_type_store.type_store
    for python_class, concrete_types in store.copy().items():  # other threads compile, too
        if any(concrete.jit_type == module_type for concrete in concrete_types):
            stub = getattr(python_class, "_methods", {}).get(name)
            if stub is not None:
                return stub.original_method
            found = inspect.getattr_static(python_class, name, None)
            is_inherited = found is inspect.getattr_static(torch.nn.Module, name, None)
            return found if inspect.isfunction(found) and not is_inherited else None
    return None
