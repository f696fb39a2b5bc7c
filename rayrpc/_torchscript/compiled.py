"""Functions and methods that are compiled, while they may call RPC.

A function of torch gets ``CompiledFunction`` as its class when it is compiled, a method
``CompiledMethod`` when it is looked up.  Its first call reads the graph.  A function without RPC
gets torch's own class back, and costs nothing more from then on; a method does not, since Python
methods of other modules may share lists and dicts with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from rayrpc._torchscript import modules, originals
from rayrpc._torchscript.graphs import calls_interface, calls_rpc
from rayrpc._torchscript.signature import Signature

__all__ = ["CompiledFunction", "CompiledMethod"]

_C: Any = torch._C
_ScriptModule: Any = torch.jit.ScriptModule
_NATIVE_FUNCTION: Any = _C.ScriptFunction.__call__
_NATIVE_METHOD: Any = _C.ScriptMethod.__call__

_RUN = "_rayrpc_run"  # attribute: what runs the function or method
_Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class CompiledFunction(_C.ScriptFunction):  # type: ignore[misc]
    """A compiled function that calls RPC, or was not called yet."""

    __slots__ = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        run = vars(self).get(_RUN)
        if run is None:
            run = _choose_for_function(self)
        return run(self, args, kwargs)


class CompiledMethod(_C.ScriptMethod):  # type: ignore[misc]
    """A compiled method of a module."""

    __slots__ = ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        run = vars(self).get(_RUN)
        if run is None:
            run = _choose_for_method(self)
        return run(self, args, kwargs)


def _choose_for_function(function: Any) -> _Run:
    graph = function.inlined_graph
    run: _Run
    if calls_rpc(graph):
        run = _PythonFunction(function)
    elif calls_interface(graph):
        run = _Either(_call_function, _PythonFunction(function))
    else:
        function.__class__ = _C.ScriptFunction
        return _call_function
    setattr(function, _RUN, run)
    return run


def _choose_for_method(method: Any) -> _Run:
    graph = method.inlined_graph
    run: _Run = _call_method
    if calls_rpc(graph):
        run = _PythonMethod(method)
    elif calls_interface(graph):
        run = _Either(_call_method, _PythonMethod(method))
    setattr(method, _RUN, run)
    return run


def _call_function(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _NATIVE_FUNCTION(function, *args, **kwargs)


def _call_method(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if modules.has_containers():
        with modules.containers_shared():
            return _NATIVE_METHOD(method, *args, **kwargs)
    return _NATIVE_METHOD(method, *args, **kwargs)


class _PythonFunction:
    """Runs the Python code of a function."""

    def __init__(self, function: Any) -> None:
        self._signature = Signature(function.schema)
        self._original = originals.of_function(function)

    def __call__(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = self._signature.bind(args, kwargs)
        return originals.run(self._original, values)


class _PythonMethod:
    """Runs the Python code of a method."""

    def __init__(self, method: Any) -> None:
        self._signature = Signature(method.schema)
        self._original = originals.of_method(method)

    def __call__(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = modules.wrapper_of(method.owner)
        values = self._signature.bind((module, *args), kwargs)
        with modules.containers_kept():
            return originals.run(self._original, values)


class _Either:
    """Runs code that calls interfaces: compiled, unless a module that it gets calls RPC."""

    def __init__(self, compiled: _Run, python: _Run) -> None:
        self._compiled = compiled
        self._python = python

    def __call__(self, code: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, _ScriptModule)]
        owned = [code.owner] if isinstance(code, CompiledMethod) else []
        run = self._compiled
        if any(map(_module_calls_rpc, [*owned, *(module._c for module in given)])):
            run = self._python
        return run(code, args, kwargs)


def _module_calls_rpc(module: Any) -> bool:
    return any(_methods_call_rpc(part) for _, part in modules.paths_of(module))


_known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _methods_call_rpc(module: Any) -> bool:
    result = _known.get(module)
    if result is None:
        methods = [modules.native_method(module, name) for name in module._method_names()]
        result = any(calls_rpc(method.inlined_graph) for method in methods)
        _known[modules.wrapper_of(module)._c] = result  # lives as long as the module
    return result
