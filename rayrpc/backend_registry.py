"""The backends that ``init_rpc`` can be told to use, under torch's names.

TENSORPIPE is accepted and means RAY: programs that name it run unchanged.  A library may
register one more, with handlers that make its options and its agent.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from rayrpc.options import (
    DEFAULT_INIT_METHOD,
    DEFAULT_NUM_WORKER_THREADS,
    DEFAULT_RPC_TIMEOUT_SEC,
    TensorPipeRpcBackendOptions,
)

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "infer_backend",
    "init_backend",
    "is_ours",
    "make_store",
    "register_backend",
]


class BackendValue(NamedTuple):
    """What a backend is made of.

    Args:
        construct_rpc_backend_options_handler (Callable): makes its options.
        init_backend_handler (Callable | None): makes its agent; None: rayrpc's own.
    """

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any] | None


def _options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
    _transports: Any = None,
    _channels: Any = None,
    **kwargs: Any,
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        _transports=_transports,
        _channels=_channels,
    )


def _backend_repr(self: enum.Enum) -> str:
    return "BackendType." + self.name


def _make(members: dict[str, BackendValue]) -> Any:
    functional: Any = enum.Enum
    made: Any = functional("BackendType", members)
    made.__repr__ = _backend_repr
    made.__doc__ = "The available backends."
    return made


# Two members of equal value would be one; RAY's handler is a function of its own.
_ray_options = lambda *args, **kwargs: _options(*args, **kwargs)  # noqa: E731

BackendType: Any = _make(
    {"TENSORPIPE": BackendValue(_options, None), "RAY": BackendValue(_ray_options, None)}
)


def backend_registered(backend_name: str) -> bool:
    """Tell whether a backend of this name is known."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend.

    Args:
        backend_name (str): its name in ``BackendType``.
        construct_rpc_backend_options_handler (Callable): called with ``rpc_timeout``,
            ``init_method`` and keywords; returns its options.
        init_backend_handler (Callable): called with ``store``, ``name``, ``rank``,
            ``world_size`` and ``rpc_backend_options``; returns its agent.

    Returns:
        The new member of ``BackendType``, which is a new enumeration from now on.

    Raises:
        RuntimeError: the name is taken.
    """
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _make({backend_name: value, **{m.name: m.value for m in BackendType}})
    return BackendType[backend_name]


def is_ours(backend: Any) -> bool:
    """Tell whether a backend's agent is rayrpc's own."""
    return backend.value.init_backend_handler is None


def infer_backend(options: Any) -> Any:
    """Return the backend whose options these are.

    Raises:
        TypeError: there is none.
    """
    for candidate in BackendType:
        if isinstance(options, type(construct_rpc_backend_options(candidate))):
            return candidate
    raise TypeError(f"Could not infer backend for options {options}")


def make_store(options: Any, rank: int, world_size: int | None) -> Any:
    """Return the store that torch would give to the agent of a library's own backend."""
    distributed: Any = importlib.import_module("torch.distributed")
    store, _, _ = next(
        distributed.rendezvous(options.init_method, rank=rank, world_size=world_size)
    )
    return store


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Return options for a backend."""
    handler = backend.value.construct_rpc_backend_options_handler
    return handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the agent of a registered backend."""
    return backend.value.init_backend_handler(*args, **kwargs)
