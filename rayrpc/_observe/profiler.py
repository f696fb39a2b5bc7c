"""Calls as events of torch's legacy autograd profiler, under torch's names.

Torch's newer profiler, Kineto, records no events of calls; neither does this.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from rayrpc._runtime.hooks import Hook, OutgoingCall

__all__ = ["ProfilerHook", "profiling_key"]

_autograd: Any = torch.autograd
_profiler_enabled = _autograd._profiler_enabled  # bound once: it runs on every call


def profiling_key(mode: str, func_name: str, src: str, dst: str) -> str:
    """Return the name of a call's event: ``rpc_sync#aten::add(worker0 -> worker1)``.

    Args:
        mode: "sync", "async" or "remote".
        func_name: of the function that the call runs.
        src: name of the caller.
        dst: name of the callee.
    """
    return f"rpc_{mode}#{func_name}({src} -> {dst})"


def _name_of(func: Any) -> str:
    builtin = torch.jit._builtins._find_builtin(func)
    if builtin is not None:
        return str(builtin)
    if isinstance(func, torch.jit.ScriptFunction):
        return str(torch._jit_internal._qualified_name(func))
    return str(getattr(func, "__qualname__", type(func).__qualname__))


class ProfilerHook(Hook):
    """Record the calls of a thread that runs the legacy profiler."""

    name = "profiler"
    needs_future = True

    def wants(self) -> bool:
        return _profiler_enabled() and not torch.autograd.profiler._is_profiler_enabled

    def before_send(self, call: OutgoingCall) -> AbstractContextManager[Any]:
        if call.mode == "fetch":
            return contextlib.nullcontext()
        key = profiling_key(call.mode, _name_of(call.invocation.func), call.src.name, call.to.name)
        record = call.notes[self.name] = torch.autograd.profiler.record_function(key)
        return record

    def after_send(self, call: OutgoingCall, future: Any) -> Any:
        return call.notes[self.name]._call_end_callbacks_on_future(future)
