"""The backends that ``init_rpc`` accepts, under torch's names.

TENSORPIPE is accepted and means RAY: programs that name it run unchanged.  A library may
register one more, with handlers that make its options and its agent.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable, Sequence
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
    """The handlers of a backend.

    Args:
        construct_rpc_backend_options_handler (Callable): makes its options.
        init_backend_handler (Callable, optional): makes its agent; None: rayrpc's own.

    Source: ``torch.distributed.rpc.backend_registry.BackendValue``.
    """

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any] | None


def _options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
    _transports: Sequence[str] | None = None,
    _channels: Sequence[str] | None = None,
    **kwargs: object,
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
    """Return whether a backend of this name is registered.

    Args:
        backend_name (str): a name in ``BackendType``; case counts.

    Source: ``torch.distributed.rpc.backend_registry.backend_registered``.
    """
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> enum.Enum:
    """Add a backend.

    Args:
        backend_name (str): its name in ``BackendType``.
        construct_rpc_backend_options_handler (Callable): called with ``rpc_timeout`` (seconds),
            ``init_method`` and keywords; returns its options.
        init_backend_handler (Callable): called with ``store``, ``name``, ``rank``,
            ``world_size`` and ``rpc_backend_options``; returns its agent.

    Returns:
        The new member of ``BackendType``, which is a new enumeration from now on.

    Raises:
        RuntimeError: the name is taken.

    Source: ``torch.distributed.rpc.backend_registry.register_backend``.
    """
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    value = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _make({backend_name: value, **{m.name: m.value for m in BackendType}})
    backend: enum.Enum = BackendType[backend_name]
    return backend


def is_ours(backend: enum.Enum) -> bool:
    """Return whether a backend's agent is rayrpc's own.

    Args:
        backend (BackendType): a member.
    """
    return backend.value.init_backend_handler is None


def infer_backend(options: object) -> enum.Enum:
    """Return the first backend whose options are of this type.

    Args:
        options (RpcBackendOptions): of some backend.

    Raises:
        TypeError: there is no such backend.
    """
    candidate: enum.Enum
    for candidate in BackendType:
        if isinstance(options, type(construct_rpc_backend_options(candidate))):
            return candidate
    raise TypeError(f"Could not infer backend for options {options}")


def make_store(options: Any, rank: int, world_size: int | None) -> Any:
    """Return the store that torch would give to the agent of a library's own backend.

    Args:
        options (RpcBackendOptions): ``init_method`` names the rendezvous.
        rank (int): of this process.
        world_size (int, optional): number of processes; None: dynamic.

    Returns:
        torch.distributed.Store: of ``torch.distributed.rendezvous``.

    Raises:
        ValueError: torch's, for a rendezvous that it does not accept.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    store, _, _ = next(
        distributed.rendezvous(options.init_method, rank=rank, world_size=world_size)
    )
    return store


def construct_rpc_backend_options(
    backend: enum.Enum,
    rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC,
    init_method: str = DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Return options for a backend.

    Args:
        backend (BackendType): a member.
        rpc_timeout (float): default timeout of calls in seconds; 0: none.
        init_method (str): names the group, see ``RpcBackendOptions``.
        kwargs: further ones of the backend's own handler.

    Returns:
        What the backend's handler returns; for TENSORPIPE and RAY, TensorPipeRpcBackendOptions.

    Source: ``torch.distributed.rpc.backend_registry.construct_rpc_backend_options``.
    """
    handler = backend.value.construct_rpc_backend_options_handler
    return handler(rpc_timeout, init_method, **kwargs)


def init_backend(backend: enum.Enum, *args: Any, **kwargs: Any) -> Any:
    """Return the agent of a backend that a library has registered.

    Args:
        backend (BackendType): a member with an ``init_backend_handler``.
        args, kwargs: handed to that.

    Source: ``torch.distributed.rpc.backend_registry.init_backend``.
    """
    return backend.value.init_backend_handler(*args, **kwargs)
