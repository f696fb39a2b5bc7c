"""The functions of ``torch.distributed.rpc``: validate, and delegate to the agent.

After ``install()`` this module is ``torch.distributed.rpc.api``.  Programs replace some of its
private names (``_ignore_rref_leak``, ``_wait_all_workers``, ...), so this module looks them up at
each use, and other workers find the targets of its calls here.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeVar, cast, overload

from torch.futures import Future

from rayrpc import config
from rayrpc._autograd.leader import run_backward
from rayrpc._protocol.ids import WorkerInfo
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.all_gather import (  # noqa: F401  torch's api has these names
    AllGatherStates,
    Calls,
    _all_gather_dict_lock,
    _all_gather_sequence_id,
    _all_gather_sequence_id_to_states,
    forget_gatherings,
    gather,
    receive_all,
    receive_one,
)
from rayrpc._runtime.current import get_agent as _get_current_rpc_agent
from rayrpc._runtime.current import initialized_agent as _initialized
from rayrpc._runtime.current import is_set as _is_current_rpc_agent_set
from rayrpc._runtime.current import require_initialized as _require_initialized
from rayrpc._runtime.invocation import Args, AsyncFunction, Function, Invocation, Kwargs, To, prompt
from rayrpc._runtime.native_names import (  # noqa: F401  torch's api has these names
    _cleanup_python_rpc_handler,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _get_debug_info,
    _reset_current_rpc_agent,
    _rref_context_get_debug_info,
    _set_and_start_rpc_agent,
    _set_rpc_timeout,
    enable_gil_profiling,
    get_rpc_timeout,
)
from rayrpc._runtime.torch_names import (  # noqa: F401  torch's api has these names
    _invoke_rpc,
    _rref_typeof_on_owner,
    _rref_typeof_on_user,
    _to_worker_info,
)
from rayrpc._runtime.user_api import ModuleApi
from rayrpc.futures import wait_all as _wait_for_futures
from rayrpc.internal import (  # noqa: F401  torch's api has these names
    PythonUDF,
    RPCExecMode,
    _build_rpc_profiling_key,
    _internal_rpc_pickler,
    prepare,
)
from rayrpc.options import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT, RpcBackendOptions
from rayrpc.rref_proxy import PyRRef, RRef
from rayrpc.startup import choose_backend, open_backend

__all__ = [
    "AllGatherStates",
    "PyRRef",
    "RRef",
    "WorkerInfo",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = logging.getLogger(__name__)
T = TypeVar("T")

# RRefs that are alive at shutdown are an error only if this is False.
_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_ALL_WORKER_NAMES: set[str] = set()
_thread_local_var = threading.local()


@contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Pickle calls with ``rpc_pickler`` inside this context."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


# -- joining and leaving ------------------------------------------------------------------------


def init_rpc(
    name: str,
    backend: Enum | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Join a group of workers, to call them and serve their calls.

    Args:
        name (str): unique in the group; letters, digits, ``_``, ``-`` and ``:``, shorter than
            128 characters.
        backend (BackendType, optional): TENSORPIPE (the default) and RAY mean the same.
        rank (int): unique in the group, from 0.
        world_size (int, optional): size of the group; not given, members come and go.
        rpc_backend_options (RpcBackendOptions, optional): timeout, threads, group and device
            maps; not given, the settings' (see ``rayrpc.configure``).

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: rank, MASTER_ADDR, ... is missing.
        RuntimeError: RPC is initialized, or the group refuses the worker or stays incomplete.

    Source: ``torch.distributed.rpc.init_rpc``.
    """
    backend, rpc_backend_options = choose_backend(backend, rpc_backend_options, config.settings())
    _init_rpc_backend(backend, None, name, rank, world_size, rpc_backend_options)


def _init_rpc_backend(
    backend: Any = None,
    store: Any = None,
    name: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
) -> None:
    """Make the agent; ``store`` is for backends of other libraries."""
    options = rpc_backend_options
    agent = open_backend(
        backend, store, name, rank, world_size, options, config.settings(), user_api
    )
    _init_rpc_states(agent)


def _init_rpc_states(agent: Any) -> None:
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    forget_gatherings()
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the group.

    Args:
        graceful (bool): in a group of fixed size, wait until every living member calls this too
            and no call is under way; else leave at once.
        timeout (float): of the wait, in seconds; 0: none.

    Raises:
        RuntimeError: a member did not call this in time (the message names it), or RRefs are in
            use and ``_ignore_rref_leak`` is False.

    Source: ``torch.distributed.rpc.shutdown``.
    """
    agent = _get_current_rpc_agent()
    try:
        if graceful and not current.has_left():
            if not isinstance(agent, Agent):
                _wait_all_workers(timeout)
            elif agent.members.is_static:
                _wait_all_workers(timeout)
                _delete_all_user_and_unforked_owner_rrefs()
                agent.join(shutdown=True, timeout=timeout)
            else:
                agent.drain(timeout)
                _delete_all_user_and_unforked_owner_rrefs()
    finally:
        _finalize_shutdown()


def _finalize_shutdown() -> None:
    """Release the RRefs and stop the agent."""
    try:
        _destroy_rref_context(_ignore_rref_leak)
    finally:
        _get_current_rpc_agent().shutdown()
        _cleanup_python_rpc_handler()
        _reset_current_rpc_agent()


# -- calls --------------------------------------------------------------------------------------

user_api = ModuleApi(sys.modules[__name__], run_backward)


def _prepare(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Invocation:
    return prepare(_default_pickler, func, args, kwargs)


@overload
def rpc_sync(
    to: To, func: AsyncFunction[T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...
) -> T: ...
@overload
def rpc_sync(
    to: To, func: Function[T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...
) -> T: ...
def rpc_sync(
    to: To, func: Any, args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Any:
    """Run a function on a worker and return its result.

    Args:
        to (str or WorkerInfo or int): name, WorkerInfo or rank of the callee.
        func (Callable): a Python callable, builtin operator or TorchScript function; sent by
            reference if the callee can import it, else by value.
        args (tuple): its arguments.
        kwargs (dict): its keyword arguments.
        timeout (float): in seconds; 0: none; not given: the default.

    Returns:
        The result of the function; tensors belong to the caller alone.

    Raises:
        CallTimeoutError: the result did not arrive in time.
        WorkerDiedError: the callee died or left.
        SerializationError: an argument or the result cannot be sent.
        Exception: the function raised it; of its own type.

    Source: ``torch.distributed.rpc.rpc_sync``.
    """
    __tracebackhide__ = True
    agent = _initialized()
    return agent.caller.sync(
        agent.lookup(to, timeout), _prepare(func, args, kwargs), agent.resolve_timeout(timeout)
    )


@overload
def rpc_async(
    to: To, func: AsyncFunction[T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...
) -> Future[T]: ...
@overload
def rpc_async(
    to: To, func: Function[T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...
) -> Future[T]: ...
def rpc_async(
    to: To, func: Any, args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> Future[Any]:
    """Run a function on a worker and return a Future of its result at once.

    Args:
        to, func, args, kwargs, timeout: as for ``rpc_sync``.

    Returns:
        ``torch.futures.Future``: its callbacks run in a thread of rayrpc. Errors of the call are
        raised by ``wait`` and ``value``.

    Raises:
        SerializationError: an argument cannot be sent.

    Source: ``torch.distributed.rpc.rpc_async``.
    """
    agent = _initialized()
    future: Future[Any] = agent.caller.future(
        agent.lookup(to, timeout), _prepare(func, args, kwargs), agent.resolve_timeout(timeout)
    )
    futures = getattr(_thread_local_var, "future_list", None)
    if futures is not None:
        futures.append(future)
    return future


@overload
def remote(
    to: To, func: AsyncFunction[T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...
) -> RRef[T]: ...
@overload
def remote(
    to: To, func: Function[T], args: Args = ..., kwargs: Kwargs = ..., timeout: float = ...
) -> RRef[T]: ...
def remote(
    to: To, func: Any, args: Args = None, kwargs: Kwargs = None, timeout: float = UNSET_RPC_TIMEOUT
) -> RRef[Any]:
    """Run a function on a worker, which keeps the result, and return an RRef to it at once.

    Args:
        to, func, args, kwargs: as for ``rpc_sync``.
        timeout (float): of the creation of the result, in seconds; 0: none; not given: the
            default.

    Returns:
        ``RRef``: errors of the call are raised where it is used.

    Raises:
        SerializationError: an argument cannot be sent.

    Source: ``torch.distributed.rpc.remote``.
    """
    agent = _initialized()
    rref = agent.caller.remote(
        agent.lookup(to, timeout), _prepare(func, args, kwargs), agent.resolve_timeout(timeout)
    )
    return cast(RRef[Any], rref)


@contextmanager
def _wait_all() -> Iterator[None]:
    """Wait at the end of this context for the calls made by ``rpc_async`` in it."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            _wait_for_futures(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


# -- looking ------------------------------------------------------------------------------------


@_require_initialized
def get_worker_info(worker_name: str | int | WorkerInfo | None = None) -> WorkerInfo:
    """Return the WorkerInfo of a worker, or of this one.

    Args:
        worker_name (str, optional): the worker's name; not given: this worker.

    Returns:
        ``WorkerInfo``: the name and the id.

    Raises:
        RuntimeError: the group has no such worker.

    Source: ``torch.distributed.rpc.get_worker_info``.
    """
    return _get_current_rpc_agent().get_worker_info(worker_name)


# -- gathering ----------------------------------------------------------------------------------


@prompt
def _gather_to_leader(
    sequence_id: str, worker_name: str, obj: Any, worker_names: Any = None
) -> dict[str, Any] | None:
    return receive_one(sequence_id, worker_name, obj)


@prompt
def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    receive_all(sequence_id, objects_map)


@_require_initialized
def _all_gather(
    obj: Any, worker_names: Any = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Return the objects of all named workers, by name; see ``all_gather.gather``."""
    return _gather(obj, set(worker_names or _ALL_WORKER_NAMES), timeout, survivors=False)


def _gather(obj: Any, names: set[str], timeout: float, survivors: bool) -> dict[str, Any]:
    # looked up at each use: programs replace the last two functions
    calls = Calls(rpc_sync, rpc_async, _gather_to_leader, _broadcast_to_followers)
    return gather(_get_current_rpc_agent(), calls, obj, names, timeout, survivors)


@_require_initialized
def _barrier(worker_names: Iterable[str]) -> None:
    """Wait until all of these workers call this."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all living workers call this; RuntimeError if one does not in time."""
    try:
        _gather(None, set(_ALL_WORKER_NAMES), timeout, survivors=True)
    except RuntimeError:
        logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise
