"""From ``init_rpc``'s arguments to an agent."""

from __future__ import annotations

import contextlib
import functools
import os
import time
import uuid
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

from rayrpc import backend_registry
from rayrpc._autograd.hook import GradContexts, first_number
from rayrpc._observe.call_log import CallLog
from rayrpc._observe.kineto import KinetoHook
from rayrpc._observe.metrics import Metrics
from rayrpc._observe.profiler import ProfilerHook
from rayrpc._observe.report import Inspector
from rayrpc._observe.slow_calls import SlowCalls
from rayrpc._observe.stacks import set_waits
from rayrpc._observe.trace import trace_until_shutdown
from rayrpc._protocol.ids import WorkerInfo
from rayrpc._protocol.membership import GUEST, PROCESS, RESTARTS, Change, Member
from rayrpc._protocol.rendezvous import find_place, is_name, owned_key
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.call_errors import name_of
from rayrpc._runtime.main_identity import main_identity
from rayrpc._runtime.rrefs.handle import make_handle
from rayrpc._runtime.serialization.global_versions import this_process
from rayrpc._runtime.serialization.reducers import add_object_type
from rayrpc._runtime.serialization.shared_globals import forget
from rayrpc._runtime.serialization.stored import decode_stored, encode_stored
from rayrpc._runtime.user_api import UserApi
from rayrpc._transports import open_metrics, open_objects, open_transport, watch_actor
from rayrpc._transports.process_origin import this_origin
from rayrpc.config import Settings
from rayrpc.errors import ArgumentTypeError, RpcError
from rayrpc.futures import extend_futures
from rayrpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions, validate_device_maps

__all__ = [
    "Role",
    "TRACE_VARIABLE",
    "choose_backend",
    "default_options",
    "make_agent",
    "open_backend",
]

#: names the collector of a traced run: its Ray namespace, and its name
TRACE_VARIABLE = "RAYRPC_INTERNAL_TRACE"
# How long the calls of a worker may take to end whose actor Ray ends.
DRAIN_SECONDS = 5.0


class Role(Enum):
    """What a process is in a group."""

    DEFAULT = "the functions of rayrpc mean the group"
    WORKER = "it is a worker of a group beside that one"
    GUEST = "it calls the workers of a group, and is none itself"


def default_options(settings: Settings) -> TensorPipeRpcBackendOptions:
    """Return the options of an ``init_rpc`` that gives none."""
    return TensorPipeRpcBackendOptions(
        num_worker_threads=settings.num_worker_threads, rpc_timeout=settings.rpc_timeout
    )


def choose_backend(backend: Any, options: Any, settings: Settings) -> tuple[Any, Any]:
    """Return the backend and its options, with the defaults filled in.

    Args:
        backend (BackendType | None): None: by the options, else TENSORPIPE, which is rayrpc.
        options (RpcBackendOptions | None): None: the backend's defaults.
        settings: has rayrpc's defaults.

    Raises:
        TypeError: the backend or the options are none.
    """
    if backend is not None and not isinstance(backend, backend_registry.BackendType):
        raise TypeError("Argument backend must be a member of BackendType")
    if options is not None and not isinstance(options, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None and options is not None:
        backend = backend_registry.infer_backend(options)
    if backend is None:
        backend = backend_registry.BackendType.TENSORPIPE
    if options is None:
        if backend_registry.is_ours(backend):
            options = default_options(settings)
        else:
            options = backend_registry.construct_rpc_backend_options(backend)
    return backend, options


def open_backend(
    backend: Any,
    store: Any,
    name: str,
    rank: int,
    world_size: int | None,
    options: Any,
    settings: Settings,
    user_api: UserApi,
) -> Any:
    """Return the agent of a backend: rayrpc's, or another library's.

    Args:
        store (Store | None): for backends of other libraries; None: one is made.
        backend, name, rank, world_size, options, settings, user_api: as for ``make_agent``.

    Raises:
        TypeError: an argument has the wrong type.
        RuntimeError: this process has an agent.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a str, got {name!r}")
    for argument, value in (("rank", rank), ("world_size", world_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ArgumentTypeError(f"`{argument}` must be an integer, got {value!r}")
    if current.is_set():
        raise RpcError(
            "RPC is already initialized. Call shutdown first, or join a second group by "
            "rpc.init_group."
        )
    if backend is None or backend_registry.is_ours(backend):
        return make_agent(name, rank, world_size, options, settings, user_api)
    if store is None:
        store = backend_registry.make_store(options, rank, world_size)
    return backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=options,
    )


def make_agent(
    name: str,
    rank: int,
    world_size: int | None,
    options: TensorPipeRpcBackendOptions,
    settings: Settings,
    user_api: UserApi,
    environ: Mapping[str, str] | None = None,
    role: Role = Role.DEFAULT,
    restarts: int = 0,
) -> Agent:
    """Join the group that the options name, and return the agent, which serves once started.

    Args:
        name (str): of the worker.
        rank (int): -1: from the environment, or any.
        world_size (int | None): None or 0 for a dynamic group.
        options: of the backend.
        settings: where the cluster is, and how long to wait.
        user_api: the functions that RRefs call.
        environ: default ``os.environ``.
        role: of this process in the group.
        restarts: how often the worker is started again if it dies; -1: always.

    Raises:
        TypeError: the options are of another backend.
        ValueError: no rank, group or address is given; in torch's words.
        RuntimeError: the name is invalid, or the group refuses the worker.
    """
    if not isinstance(options, TensorPipeRpcBackendOptions):
        raise TypeError(f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`. {options}")
    environ = os.environ if environ is None else environ
    place = find_place(options.init_method, rank, world_size or None, environ, settings.group)
    WorkerInfo(name, place.rank)  # checks the name before anything is started
    token = uuid.uuid4().hex[:12]
    key = owned_key(place.key, this_origin())
    transport, directory = open_transport(settings, key, name, token)
    try:
        snapshot = directory.join(
            Member(
                token=token,
                name=name,
                id=place.rank,
                world_size=place.world_size,
                address=transport.address,
                node=transport.node,
                pid=os.getpid(),
                main=main_identity(),
                extra={
                    PROCESS: this_process(),
                    **_devices_to_text(options),
                    **({GUEST: True} if role is Role.GUEST else {}),
                    **({RESTARTS: restarts} if restarts else {}),
                },
                origin=this_origin(),  # now: a program starts ranks while the first ones connect
                named=is_name(place.key),
            ),
            settings.init_timeout,
        )
    except BaseException:
        transport.close()
        raise
    try:
        peers = {m.name: _devices_from_text(m.extra) for m in snapshot.members}
        validate_device_maps(peers, is_static=place.world_size is not None)
    except ValueError:
        directory.leave()
        transport.close()
        raise
    extend_futures(_call_of)
    objects = open_objects(name, encode_stored, decode_stored)
    add_object_type(objects.type)
    agent = Agent(
        snapshot,
        transport,
        directory,
        place.key,
        options,
        make_handle,
        user_api,
        objects,
    )
    first = 0 if role is Role.DEFAULT else first_number(place.key)
    agent.hooks += [ProfilerHook(snapshot.me.id), GradContexts(agent, first)]
    agent.observers.add(_forget_globals, "left", "died")
    if settings.cancel_on_interrupt:
        agent.caller.on_interrupted_wait = agent.cancelling.notify
    if settings.profile_calls:
        agent.hooks.append(KinetoHook(agent.callee.around))
    if settings.log_level == "DEBUG":
        agent.hooks.append(CallLog(agent))
    inspector = Inspector(agent, transport.is_hosted)
    agent.callee.inspect = inspector.answer
    if role is Role.DEFAULT:
        set_waits(inspector.waits_in_words)
        agent.on_shutdown(lambda: set_waits(None))
    agent.on_shutdown(watch_actor(functools.partial(_leave_drained, agent)))
    if collector := os.environ.get(TRACE_VARIABLE):
        _trace_run(agent, f"{key}:{snapshot.session}", collector)
    if settings.metrics and (sink := open_metrics(warns=snapshot.me.id == 0)) is not None:
        metrics = Metrics(agent, sink)
        agent.on_shutdown(metrics.close)
        metrics.start()
    if settings.slow_call:
        slow_calls = SlowCalls(agent, settings.slow_call)
        agent.on_shutdown(slow_calls.close)
        slow_calls.start()
    return agent


def _call_of(future: object) -> tuple[str, float] | None:
    """Return which call a Future is of, and for how many seconds it is under way."""
    for agent in current.agents():
        call = agent.cancelling.find(future)
        if call is not None:
            name = name_of(call.request.func, call.request.to.name)
            return (name, time.monotonic() - call.request.since) if name else None
    return None


def _forget_globals(change: Change) -> None:
    """Drop the globals of functions that a process has sent, when it has left all groups."""
    process = change.member.extra.get(PROCESS, "")
    present = (
        each.extra.get(PROCESS) for agent in current.agents() for each in agent.members.all()
    )
    if process not in present:
        forget(process)


def _leave_drained(agent: Agent) -> None:
    """Leave the group, once the calls that are under way have ended, but soon."""
    with contextlib.suppress(RpcError):
        agent.drain(DRAIN_SECONDS)
    current.leave(agent)


def _trace_run(agent: Agent, group: str, collector: str) -> None:
    from rayrpc._transports.ray.trace_collector import give  # as for ``open_transport``

    namespace, _, name = collector.partition(" ")
    trace_until_shutdown(agent, group, functools.partial(give, name, namespace))


# The directory does not import torch: it gets devices as strings.


def _devices_to_text(options: TensorPipeRpcBackendOptions) -> dict[str, Any]:
    maps = {
        to: {str(source): str(target) for source, target in device_map.items()}
        for to, device_map in options.device_maps.items()
    }
    if not maps and not options.devices:
        return {}
    devices = [str(device) for device in options.devices]
    return {"device_maps": maps, "devices": devices, "device_count": torch.cuda.device_count()}


def _devices_from_text(extra: Mapping[str, Any]) -> dict[str, Any]:
    maps = {
        to: {torch.device(source): torch.device(target) for source, target in device_map.items()}
        for to, device_map in extra.get("device_maps", {}).items()
    }
    devices = [torch.device(device) for device in extra.get("devices", ())]
    # a member without devices of its own does not send their count
    count = extra.get("device_count", torch.cuda.device_count())
    return {"device_maps": maps, "devices": devices, "device_count": count}
