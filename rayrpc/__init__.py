"""rayrpc: ``torch.distributed.rpc`` on Ray.

``import rayrpc as rpc`` gives torch's API; ``rayrpc.install()`` puts it in torch's own place.
Importing has no side effect, and loads torch and Ray only when a name needs them.

What programs import:

    api               ``init_rpc``, ``rpc_sync``, ``rpc_async``, ``remote``, ``shutdown``
    rref_proxy        ``RRef``
    functions         ``async_execution``
    futures           ``wait_all``, ``as_completed``; ``await`` for Futures
    options           the backend's options, with torch's checks
    backend_registry  the backends that ``init_rpc`` accepts
    internal          picklers of libraries
    autograd          distributed autograd
    optim             distributed optimizers
    nn                ``RemoteModule``
    jit               ``fork``, ``wait``, ``Await``
    groups            joins, connects to and finds groups; ``group`` has the ``Group`` itself
    streams           generators of other workers
    cancellation      ``cancel``
    objects           ObjectRefs of Ray
    reloading         edited modules
    observe           ``status``, ``rrefs``, ``profile``
    parallel          the API of ``machin.parallel``
    config            the settings
    errors            every error, with its words
    compat            ``install``: rayrpc in torch's place
    cli               the command ``rayrpc``, its options and exit codes

How it is made, from the top:

    _torchscript      compiled code that calls RPC
    launch            workers as Ray actors
    startup           from ``init_rpc``'s arguments to an agent
    _jit              tasks of ``fork``
    _autograd         backward passes over several workers
    _observe          profiles, traces and reports of calls
    _runtime          one worker: its calls, its RRefs, its members
    _transports       how frames and membership travel: connections, Ray
    _protocol         messages and state machines, pure
    _concurrency      threads, waits and deadlines
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayrpc import errors, functions, futures
    from rayrpc._protocol.ids import WorkerInfo
    from rayrpc.api import (
        get_rpc_timeout,
        get_worker_info,
        init_rpc,
        remote,
        rpc_async,
        rpc_sync,
        shutdown,
    )
    from rayrpc.backend_registry import BackendType
    from rayrpc.cancellation import cancel
    from rayrpc.compat import install, uninstall
    from rayrpc.config import Settings, configure, settings
    from rayrpc.futures import as_completed
    from rayrpc.group import Group
    from rayrpc.groups import (
        connect,
        get_group,
        init_group,
        on_join,
        on_leave,
        start_workers,
    )
    from rayrpc.jit import lazy
    from rayrpc.launch.spawning import spawn
    from rayrpc.launch.workers import WorkerGroup
    from rayrpc.objects import as_future, object_ref, rref
    from rayrpc.observe import profile, rrefs, status
    from rayrpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
    from rayrpc.reloading import reload
    from rayrpc.rref_proxy import PyRRef, RRef
    from rayrpc.streams import Stream, stream

__all__ = [
    "BackendType",
    "Group",
    "PyRRef",
    "RRef",
    "RpcBackendOptions",
    "Settings",
    "Stream",
    "TensorPipeRpcBackendOptions",
    "WorkerGroup",
    "WorkerInfo",
    "__version__",
    "as_completed",
    "as_future",
    "cancel",
    "configure",
    "connect",
    "errors",
    "functions",
    "futures",
    "get_group",
    "get_rpc_timeout",
    "get_worker_info",
    "init_group",
    "init_rpc",
    "install",
    "lazy",
    "object_ref",
    "on_join",
    "on_leave",
    "profile",
    "reload",
    "remote",
    "rpc_async",
    "rpc_sync",
    "rref",
    "rrefs",
    "settings",
    "shutdown",
    "spawn",
    "start_workers",
    "status",
    "stream",
    "uninstall",
]

__version__ = "0.1.0"

_HOMES = {
    "rayrpc.api": (
        "_all_gather",
        "_barrier",
        "_get_current_rpc_agent",
        "_get_debug_info",
        "_is_current_rpc_agent_set",
        "_rref_context_get_debug_info",
        "_set_rpc_timeout",
        "_use_rpc_pickler",
        "_wait_all",
        "get_rpc_timeout",
        "get_worker_info",
        "init_rpc",
        "remote",
        "rpc_async",
        "rpc_sync",
        "shutdown",
    ),
    "rayrpc.rref_proxy": ("PyRRef", "RRef"),
    "rayrpc._protocol.ids": ("WorkerInfo",),
    "rayrpc.options": ("RpcBackendOptions", "TensorPipeRpcBackendOptions"),
    "rayrpc.cancellation": ("cancel",),
    "rayrpc.compat": ("install", "uninstall"),
    "rayrpc.config": ("Settings", "configure", "settings"),
    "rayrpc.futures": ("as_completed",),
    "rayrpc.group": ("Group",),
    "rayrpc.groups": (
        "connect",
        "get_group",
        "init_group",
        "on_join",
        "on_leave",
        "start_workers",
    ),
    "rayrpc.jit": ("lazy",),
    "rayrpc.launch.spawning": ("spawn",),
    "rayrpc.launch.workers": ("WorkerGroup",),
    "rayrpc.objects": ("as_future", "object_ref", "rref"),
    "rayrpc.observe": ("profile", "rrefs", "status"),
    "rayrpc.reloading": ("reload",),
    "rayrpc.streams": ("Stream", "stream"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_MODULES = (
    "api",
    "autograd",
    "backend_registry",
    "errors",
    "functions",
    "futures",
    "jit",
    "nn",
    "optim",
)


def __getattr__(name: str) -> Any:
    if name == "BackendType":  # registering a backend makes a new one
        return importlib.import_module("rayrpc.backend_registry").BackendType
    if name in _MODULES:
        return importlib.import_module(f"rayrpc.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rayrpc' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
