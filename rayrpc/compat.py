"""Put rayrpc in the place of ``torch.distributed.rpc``.

``install()`` changes attributes of torch's modules in place, so that programs which import them
later, in any form, get rayrpc; ``uninstall()`` restores them.  ``TABLE`` lists what is replaced
by what.  Where torch has no RPC at all, the modules are made.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["install", "is_installed", "uninstall"]

RPC = "torch.distributed.rpc"
NATIVE = "torch._C._distributed_rpc"

# Modules of torch that a module of rayrpc stands for.
MODULES = {
    f"{RPC}.api": "rayrpc.api",
    f"{RPC}.backend_registry": "rayrpc.backend_registry",
    f"{RPC}.constants": "rayrpc.options",
    f"{RPC}.functions": "rayrpc.functions",
    f"{RPC}.internal": "rayrpc.internal",
    f"{RPC}.options": "rayrpc.options",
    f"{RPC}.rref_proxy": "rayrpc.rref_proxy",
}

# The same for modules that copy names when they are imported; programs usually import them late.
# ``_Finder`` gives them to the import system, which then sets them on their packages, too.
LATE_MODULES = {
    "torch.distributed.nn.api.remote_module": "rayrpc.nn",
    "torch.distributed.optim.optimizer": "rayrpc.optim",
}

# (module of torch, name in it, module of rayrpc, name in it or None for the module itself)
TABLE: list[tuple[str, str, str, str | None]] = [
    *[
        (RPC, name, "rayrpc.api", name)
        for name in (
            "AllGatherStates",
            "PyRRef",
            "RRef",
            "WorkerInfo",
            "_delete_all_user_and_unforked_owner_rrefs",
            "_destroy_rref_context",
            "_get_current_rpc_agent",
            "_get_debug_info",
            "_init_rpc_backend",
            "_is_current_rpc_agent_set",
            "_reset_current_rpc_agent",
            "_rref_context_get_debug_info",
            "_set_and_start_rpc_agent",
            "_set_rpc_timeout",
            "_wait_all",
            "get_rpc_timeout",
            "get_worker_info",
            "init_rpc",
            "remote",
            "rpc_async",
            "rpc_sync",
            "shutdown",
        )
    ],
    *[
        (RPC, name, "rayrpc.backend_registry", name)
        for name in (
            "BackendType",
            "BackendValue",
            "backend_registered",
            "construct_rpc_backend_options",
            "init_backend",
            "register_backend",
        )
    ],
    *[
        (RPC, name, "rayrpc.options", source)
        for name, source in (
            ("RpcBackendOptions", "RpcBackendOptions"),
            ("TensorPipeRpcBackendOptions", "TensorPipeRpcBackendOptions"),
            ("_DEFAULT_INIT_METHOD", "DEFAULT_INIT_METHOD"),
            ("_DEFAULT_NUM_WORKER_THREADS", "DEFAULT_NUM_WORKER_THREADS"),
            ("_DEFAULT_RPC_TIMEOUT_SEC", "DEFAULT_RPC_TIMEOUT_SEC"),
            ("_UNSET_RPC_TIMEOUT", "UNSET_RPC_TIMEOUT"),
        )
    ],
    (RPC, "RpcAgent", "rayrpc._runtime.agent", "Agent"),
    (RPC, "TensorPipeAgent", "rayrpc._runtime.agent", "Agent"),
    (RPC, "_cleanup_python_rpc_handler", "rayrpc.api", "_cleanup_python_rpc_handler"),
    (RPC, "enable_gil_profiling", "rayrpc.api", "enable_gil_profiling"),
    *[
        (
            module,
            f"_{step}_server_process_global_profiler",
            "rayrpc._observe.server_profile",
            f"_{step}_server_process_global_profiler",
        )
        for module in (RPC, NATIVE, f"{RPC}.server_process_global_profiler")
        for step in ("enable", "disable")
    ],
    # the native classes, which programs ask isinstance with, and getters
    *[
        (NATIVE, name, "rayrpc.api", name)
        for name in (
            "PyRRef",
            "WorkerInfo",
            "_cleanup_python_rpc_handler",
            "_delete_all_user_and_unforked_owner_rrefs",
            "_destroy_rref_context",
            "_get_current_rpc_agent",
            "_is_current_rpc_agent_set",
            "_reset_current_rpc_agent",
            "_rref_context_get_debug_info",
            "_set_and_start_rpc_agent",
            "_set_rpc_timeout",
            "enable_gil_profiling",
            "get_rpc_timeout",
        )
    ],
    (NATIVE, "RpcAgent", "rayrpc._runtime.agent", "Agent"),
    (NATIVE, "TensorPipeAgent", "rayrpc._runtime.agent", "Agent"),
    (NATIVE, "RpcBackendOptions", "rayrpc.options", "RpcBackendOptions"),
    (
        NATIVE,
        "_TensorPipeRpcBackendOptionsBase",
        "rayrpc.options",
        "_TensorPipeRpcBackendOptionsBase",
    ),
    (RPC, "is_available", "rayrpc.compat", "is_available"),
    *[(RPC, name.rpartition(".")[2], module, None) for name, module in MODULES.items()],
    # modules of torch that copied names when they were imported
    ("torch._jit_internal", "PyRRef", "rayrpc.api", "PyRRef"),
    ("torch._jit_internal", "RRef", "rayrpc.api", "RRef"),
    ("torch.jit.annotations", "RRef", "rayrpc.api", "RRef"),
    # gradients across calls
    *[
        ("torch.distributed.autograd", name, "rayrpc.autograd", name)
        for name in (
            "DistAutogradContext",
            "_current_context",
            "_get_debug_info",
            "_get_max_id",
            "_init",
            "_is_valid_context",
            "_new_context",
            "_release_context",
            "_retrieve_context",
            "backward",
            "context",
            "get_gradients",
            "is_available",
        )
    ],
    ("torch.distributed.nn", "RemoteModule", "rayrpc.nn", "RemoteModule"),
    ("torch.distributed.optim", "DistributedOptimizer", "rayrpc.optim", "DistributedOptimizer"),
    ("torch.futures", "wait_all", "rayrpc.futures", "wait_all"),
    # ranks that a Ctrl-C ends
    *[
        (module, name, "rayrpc.launch.child_ranks", name)
        for module in ("torch.multiprocessing", "torch.multiprocessing.spawn")
        for name in ("spawn", "start_processes")
    ],
    # names that torch lacks
    (RPC, "as_completed", "rayrpc.futures", "as_completed"),
    (RPC, "lazy", "rayrpc.jit", "lazy"),
]

_MISSING = object()
_undo: list[tuple[Any, str, Any]] = []


def is_available() -> bool:
    """Return True: RPC can be used.

    TorchScript's compiler calls it before it compiles anything that could be RPC.

    Source: ``torch.distributed.rpc.is_available``.
    """
    if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.jit."):
        _load_torchscript()
    return True


def is_installed() -> bool:
    """Return whether rayrpc is in the place of ``torch.distributed.rpc`` in this process."""
    return bool(_undo)


def install(jit: bool = False) -> None:
    """Put rayrpc in the place of ``torch.distributed.rpc``.

    Call it before anything imports names from there; no process is started.  Ranks that
    ``rayrpc.spawn`` starts from then on have rayrpc in place, too.  Calling it again does nothing.

    Args:
        jit (bool): replace ``torch.jit.fork``, ``wait`` and ``script`` by those of ``rayrpc.jit``,
            too: tasks run on the cluster, and functions that fork them are not compiled.

    Example:
        >>> import rayrpc
        >>> rayrpc.install()
        >>> import torch.distributed.rpc as rpc
        >>> rpc.init_rpc("worker0", rank=0, world_size=1)

    Source: rayrpc's own.
    """
    if not _undo:
        from rayrpc import futures
        from rayrpc.launch.process import set_install

        _install_rpc()
        futures.extend_futures()
        set_install(install)
        if _has_compiled():
            _load_torchscript()
    if jit:
        torchs, ours = map(importlib.import_module, ("torch.jit", "rayrpc.jit"))
        for name in ("fork", "script", "wait"):
            if getattr(torchs, name) is not getattr(ours, name):
                _set(torchs, name, getattr(ours, name))


def _install_rpc() -> None:
    rpc = _rpc_package()
    for name, home in MODULES.items():
        _set(sys.modules, name, importlib.import_module(home))
    for name, home in LATE_MODULES.items():
        if name in sys.modules:
            module = importlib.import_module(home)
            _set(sys.modules, name, module)
            package, _, last = name.rpartition(".")
            _set(sys.modules[package], last, module)
    sys.meta_path.insert(0, _finder)
    for module_name, name, source, source_name in TABLE:
        target = rpc if module_name == RPC else sys.modules.get(module_name)
        # a module that was never imported has copied nothing
        if target is None or (module_name != RPC and not hasattr(target, name)):
            continue
        module = importlib.import_module(source)
        _set(target, name, module if source_name is None else getattr(module, source_name))
    _set(importlib.import_module("rayrpc.api").RRef, "_jit_override_qualname", _InferredType())
    for name in ("import_ir_module", "import_ir_module_from_buffer"):
        _set(sys.modules["torch._C"], name, _loading_archive(name))


def uninstall() -> None:
    """Restore what ``install()`` replaced; without it, do nothing.

    Futures can still be awaited, and interrupted: see ``futures.extend_futures``.

    Source: rayrpc's own.
    """
    if _undo:
        from rayrpc.launch.process import set_install

        set_install(None)
        sys.meta_path.remove(_finder)
        _finder.unload()
    while _undo:
        target, name, old = _undo.pop()
        if isinstance(target, dict):
            if old is _MISSING:
                target.pop(name, None)
            else:
                target[name] = old
        elif old is _MISSING:
            delattr(target, name)
        else:
            setattr(target, name, old)


_script_lock = threading.RLock()
_script_is_loaded = False


def _load_torchscript(infers_types: bool = False) -> None:
    """Have TorchScript code that calls RPC run in Python; see ``rayrpc._torchscript``."""
    with _script_lock:
        if _undo and not _script_is_loaded:
            _set(sys.modules[__name__], "_script_is_loaded", True)
            importlib.import_module("rayrpc._torchscript.patches").load(_set, infers_types)


def _has_compiled() -> bool:
    """Return whether this process has compiled functions or modules by TorchScript."""
    state, recursive = map(sys.modules.get, ("torch.jit._state", "torch.jit._recursive"))
    functions = getattr(state, "_jit_caching_layer", None)
    return bool(functions or (recursive and recursive.concrete_type_store.type_store))


def _loading_archive(name: str) -> Callable[..., Any]:
    """Return a function that loads a TorchScript archive, and marks a program that does."""
    natives: Any = sys.modules["torch._C"]

    @functools.wraps(getattr(natives, name))
    def load(*args: Any) -> Any:
        _load_torchscript()
        return getattr(natives, name)(*args)

    return load


class _InferredType:
    """What TorchScript reads of the class of a value whose type it infers.

    It marks a program that compiles a module with RRefs in it.
    """

    def __get__(self, instance: Any, owner: Any) -> Any:
        _load_torchscript(infers_types=True)
        raise AttributeError


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of rayrpc under torch's names for them."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self._spec: Any = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        """Return the spec of a module in ``LATE_MODULES``."""
        if fullname not in LATE_MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: Any) -> Any:
        """Return rayrpc's module."""
        module = importlib.import_module(LATE_MODULES[spec.name])
        self._spec = module.__spec__, module.__loader__
        return module

    def exec_module(self, module: Any) -> None:
        """Restore what the import system wrote into the module."""
        self.loaded.append(module.__spec__.name)
        module.__spec__, module.__loader__ = self._spec

    def unload(self) -> None:
        """Remove the modules that were loaded, so that torch's are from then on."""
        for name in self.loaded:
            package, _, last = name.rpartition(".")
            if vars(sys.modules[package]).get(last) is sys.modules.pop(name, None):
                delattr(sys.modules[package], last)
        self.loaded.clear()


_finder = _Finder()


def _set(target: Any, name: str, value: Any) -> None:
    if isinstance(target, dict):
        _undo.append((target, name, target.get(name, _MISSING)))
        target[name] = value
    else:
        find = inspect.getattr_static if isinstance(target, type) else getattr
        _undo.append((target, name, find(target, name, _MISSING)))
        setattr(target, name, value)


def _rpc_package() -> Any:
    """Return the module ``torch.distributed.rpc``, made if torch has none."""
    try:
        return importlib.import_module(RPC)
    except ImportError:
        pass
    made = types.ModuleType(RPC, "Remote procedure calls, by rayrpc.")
    made.__path__ = []
    made.__all__ = sorted(_public_names())  # type: ignore[attr-defined]
    _set(sys.modules, RPC, made)
    distributed = importlib.import_module("torch.distributed")
    _set(distributed, "rpc", made)
    return made


def _public_names() -> Iterator[str]:
    for module, name, _, source in TABLE:
        if module == RPC and source is not None and not name.startswith("_"):
            yield name
