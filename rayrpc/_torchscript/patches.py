"""What of torch is replaced once a program compiles something."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins, _recursive, _script

import rayrpc.autograd
from rayrpc._observe import profiler
from rayrpc._runtime.serialization.reducers import REDUCERS, add_reducer
from rayrpc._torchscript import archives, modules, originals, remote_modules
from rayrpc._torchscript.compiled import CompiledFunction, CompiledMethod
from rayrpc.nn import RemoteModule

__all__ = ["load"]

_C: Any = torch._C
_RecursiveScriptModule: Any = torch.jit.RecursiveScriptModule

_RPC_MODULES = ("torch.distributed.rpc", "torch._C._distributed_rpc")
_Replace = Callable[[Any, Any, Any], None]


def load(replace: _Replace, infers_types: bool) -> None:
    """Have TorchScript code that calls RPC run in Python.

    Args:
        replace (Callable): sets a name of an object, or a key of a dict, until ``uninstall()``.
        infers_types (bool): the compiler infers types of a module's attributes just now.
    """
    _adopt_what_is_compiled()
    add_reducer(CompiledFunction, REDUCERS[_C.ScriptFunction])
    for kind in (torch.jit.ScriptModule, _RecursiveScriptModule):
        replace(REDUCERS, kind, archives.reducing(REDUCERS[kind]))
    replace(REDUCERS, _C.ScriptModule, archives.reduce_native_module)
    # functions, when they are compiled and when they are found again
    set_cache: Any = _script._set_jit_function_cache
    get_cached: Any = _script._try_get_jit_cached_function

    def set_jit_function_cache(key: Any, function: Any) -> None:
        originals.add_compiled(key)
        set_cache(key, _function(function))

    def try_get_jit_cached_function(key: Any) -> Any:
        return _function(get_cached(key))

    replace(_script, "_set_jit_function_cache", set_jit_function_cache)
    replace(_script, "_try_get_jit_cached_function", try_get_jit_cached_function)
    # modules: their methods, their attributes, and their wrappers
    replace(_C.ScriptModule, "_get_method", _get_method)
    replace(_C.ScriptModule, "getattr", modules.get_attribute)
    replace(_C.ScriptModule, "setattr", modules.set_attribute)
    for name in ("__copy__", "__deepcopy__"):
        replace(_C.ScriptModule, name, modules.copying(getattr(_C.ScriptModule, name)))
    replace(_C, "_jit_try_infer_type", modules.type_with_rrefs)
    # archives
    for name in ("save", "save_to_buffer"):
        replace(_C.ScriptModule, name, archives.saving(getattr(_C.ScriptModule, name)))
    for name in ("import_ir_module", "import_ir_module_from_buffer"):
        replace(_C, name, archives.loading(inspect.unwrap(getattr(_C, name))))
    for module in filter(None, map(sys.modules.get, _RPC_MODULES)):
        replace(module, "_enable_jit_rref_pickle", archives.allow_rrefs)
        replace(module, "_disable_jit_rref_pickle", archives.refuse_rrefs)
    construct = _RecursiveScriptModule._construct
    replace(
        _RecursiveScriptModule,
        "_construct",
        staticmethod(lambda *args: modules.add_wrapper(construct(*args))),
    )
    if infers_types:
        _infer_again(replace)
    prepare = RemoteModule.__prepare_scriptable__
    replace(RemoteModule, "__prepare_scriptable__", remote_modules.scriptable(prepare))
    for module in (torch.jit, torch._jit_internal):
        replace(module, "is_scripting", originals.is_scripting)
    replace(profiler, "compiled_code_calls", originals.calls_now)
    # what the compiler knows by its identity
    table = _builtins._get_builtin_table()
    replace(table, id(rayrpc.autograd.backward), "aten::dist_backward")
    replace(table, id(rayrpc.autograd.get_gradients), "aten::get_gradients")
    replace(table, id(originals.is_scripting), "aten::is_scripting")


def _adopt_what_is_compiled() -> None:
    for found in gc.get_objects():
        if type(found) is _C.ScriptFunction:
            _function(found)
        elif issubclass(type(found), _RecursiveScriptModule) and "_c" in vars(found):
            modules.add_wrapper(found)
        elif type(found) is _C.ScriptMethod:
            found.__class__ = CompiledMethod


def _function(function: Any) -> Any:
    if type(function) is _C.ScriptFunction:
        function.__class__ = CompiledFunction
    return function


def _get_method(self: Any, name: str) -> Any:
    method = modules.native_method(self, name)
    method.__class__ = CompiledMethod
    return method


def _infer_again(replace: _Replace) -> None:
    """Have the types of the module inferred again that is being compiled just now."""
    create: Any = _recursive.create_script_module_impl
    is_first = True

    def create_script_module_impl(module: Any, concrete_type: Any, stubs_fn: Any) -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            infer: Any = _recursive.get_module_concrete_type
            concrete_type = infer(module)
        return create(module, concrete_type, stubs_fn)

    replace(_recursive, "create_script_module_impl", create_script_module_impl)
