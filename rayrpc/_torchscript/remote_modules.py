"""A ``RemoteModule`` as ``torch.jit.script`` compiles it.

Its compiled methods have the arguments and the type of the interface's ``forward``, so that
compiled code can call it by the interface.  They call Python methods, which call RPC.
"""

from __future__ import annotations

import itertools
import linecache
import re
import typing
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.jit._state import _get_python_class, _python_cu

from rayrpc._runtime.rrefs.handle import RRef
from rayrpc.nn import RemoteModule

__all__ = ["SCRIPTED_CLASS", "scriptable"]

SCRIPTED_CLASS = "ScriptedRemoteModule"

_jit: Any = torch.jit
_internal: Any = torch._jit_internal
_counter = itertools.count()
_METHODS = ("forward", "forward_async", "__getstate__", "__setstate__")

_SOURCE = """\
def call_forward({types}) -> {result}:
    return remote_module.forward({names})

def call_forward_async({types}) -> Future[{result}]:
    return remote_module.forward_async({names})

def forward(self, {types}) -> {result}:
    return call_forward({names})

def forward_async(self, {types}) -> Future[{result}]:
    return call_forward_async({names})

def __getstate__(self):
    raise RuntimeError(
        "Cannot pickle RemoteModule in python pickler. "
        "RemoteModule can only be pickled when using RPC"
    )

def __setstate__(self, state):
    raise RuntimeError(
        "Cannot unpickle RemoteModule in python pickler. "
        "RemoteModule can only be unpickled when using RPC"
    )
"""


def scriptable(prepare: Callable[[RemoteModule], torch.nn.Module]) -> Callable[..., Any]:
    """Return ``RemoteModule.__prepare_scriptable__`` for modules with an interface, too.

    Args:
        prepare (Callable): does it for modules without an interface.
    """

    def __prepare_scriptable__(self: RemoteModule) -> torch.nn.Module:
        interface = self._module_interface_cls
        if not getattr(interface, "__torch_script_interface__", False):
            return prepare(self)
        name = _internal._qualified_name(interface)
        names = _functions(self, _python_cu.get_interface(name).getMethod("forward"))
        for ignored in ("call_forward", "call_forward_async"):
            _jit.ignore(names[ignored])
        methods = {name: names[name] for name in _METHODS}
        for exported in _METHODS[1:]:
            _jit.export(methods[exported])
        scripted_class: Any = type(SCRIPTED_CLASS, (torch.nn.Module,), methods)
        return cast(torch.nn.Module, scripted_class())

    return __prepare_scriptable__


def _functions(remote_module: RemoteModule, schema: Any) -> dict[str, Any]:
    names: dict[str, Any] = {
        **vars(typing),
        "Future": torch.futures.Future,
        "RRef": RRef,
        "Tensor": torch.Tensor,
        "__name__": __name__,
        "remote_module": remote_module,
    }

    def text(kind: Any) -> str:
        """Return a type as an annotation; Python's classes are found by new names."""

        def new_name(found: re.Match[str]) -> str:
            name = f"_{found.group().replace('.', '_')}"
            names[name] = _get_python_class(found.group())
            return name

        return re.sub(r"__torch__\.[\w.]+", new_name, kind.annotation_str)

    arguments = schema.arguments[1:]
    source = _SOURCE.format(
        types=", ".join(f"{argument.name}: {text(argument.type)}" for argument in arguments),
        names=", ".join(argument.name for argument in arguments),
        result=text(schema.returns[0].type),
    )
    file = f"<methods of a scripted RemoteModule {next(_counter)}>"
    exec(compile(source, file, "exec", dont_inherit=True), names)
    # where torch reads the source of functions
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    return names
