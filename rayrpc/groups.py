"""Groups beside the default one: a process may be in several at once.

``init_rpc`` joins the default group, which the functions of ``rayrpc`` mean; ``init_group`` joins
another, as an object with the same functions.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Mapping, Sequence

from rayrpc import config
from rayrpc._protocol.ids import WorkerInfo
from rayrpc._protocol.rendezvous import key_of, owned_key
from rayrpc._runtime import current
from rayrpc._transports import has_workers
from rayrpc._transports.process_origin import this_origin
from rayrpc.errors import ArgumentTypeError, ConfigError, GroupError
from rayrpc.group import Group, GroupApi
from rayrpc.launch.lifetime import Lifetime
from rayrpc.launch.workers import WorkerGroup, start_beside, start_with, wanted_by
from rayrpc.options import TensorPipeRpcBackendOptions
from rayrpc.startup import Role, default_options, make_agent

__all__ = ["connect", "get_group", "init_group", "on_join", "on_leave", "start_workers"]


def init_group(
    group: str,
    name: str,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: TensorPipeRpcBackendOptions | None = None,
) -> Group:
    """Join a group of workers beside the default one, to call them and serve their calls.

    Args:
        group (str): its name; all that join by it on a cluster meet, as by
            ``init_method="ray://NAME"`` of ``init_rpc``.
        name (str): of this process in the group, unique there.
        rank (int): unique in the group, from 0; not given: any.
        world_size (int, optional): size of the group; not given, members come and go.
        rpc_backend_options (TensorPipeRpcBackendOptions, optional): timeout, threads and device
            maps; their ``init_method`` has no effect.

    Returns:
        Group: with the functions of ``rayrpc`` as methods.

    Raises:
        TypeError: an argument has the wrong type.
        RuntimeError: this process is in the group, or the group refuses it or stays incomplete.

    Example:
        >>> samplers = rpc.init_group("samplers", "me")
        >>> samplers.start_workers(["sampler0", "sampler1"])
        WorkerGroup(sampler0, sampler1)
        >>> sums = samplers.rpc_all("sampler*", torch.add, args=(torch.ones(1), 1)).wait()
        >>> sums["sampler0"], sums["sampler1"]
        (tensor([2.]), tensor([2.]))
        >>> samplers.shutdown()

    Source: rayrpc's own.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a str, got {name!r}")
    return _join(group, name, rank, world_size, rpc_backend_options, Role.WORKER)


def connect(group: str, rpc_backend_options: TensorPipeRpcBackendOptions | None = None) -> Group:
    """Call the workers of a group, from a process that is not to be one of them.

    Another program may have made the group, on any host of the cluster, of fixed size or not.
    ``workers`` and ``rpc_all`` leave this process out, and the group's shutdown does not wait for
    it, but for its calls.

    Args:
        group (str): its name, or the address that it is formed with, as ``"localhost:29500"``.
        rpc_backend_options (TensorPipeRpcBackendOptions, optional): see ``init_group``.

    Returns:
        Group: ``shutdown`` ends the connection.

    Raises:
        TypeError: ``group`` is no text.
        RuntimeError: there is no such group on the cluster, or several have that name or address,
            or this process is in it.

    Example:
        >>> samplers = rpc.connect("samplers")
        >>> samplers.rpc_sync("sampler0", torch.add, args=(torch.ones(1), 1))
        tensor([2.])
        >>> samplers.shutdown()

    Source: rayrpc's own.
    """
    if not isinstance(group, str):
        raise ArgumentTypeError(f"group must be a str, got {group!r}")
    group = key_of(group)
    known = current.find(group) is not None  # that is an error, too
    if not known and not has_workers(config.settings(), owned_key(group, this_origin())):
        raise GroupError(
            f"no group {group!r} with workers is on the cluster: start it, or give the address of "
            "its cluster (rpc.configure(address=...)); `rayrpc status` shows the groups"
        )
    return _join_as_guest(group, rpc_backend_options)


def start_workers(
    names: Sequence[str],
    resources: Mapping[str, float | Mapping[str, float]] | None = None,
    me: str = "driver",
    group: str | None = None,
    detached: bool = False,
    max_restarts: int = 0,
    on_start: Callable[[], object] | None = None,
    restart: bool = False,
) -> WorkerGroup:
    """Start workers that serve calls, as Ray actors, and join their group.

    If RPC is not initialized in this process, it becomes a member of a new dynamic group; the
    workers join that, or the dynamic group that this process is in. Called again with the same
    names, as when the cell of a notebook runs again, it returns the workers that are there.

    Args:
        names (list[str]): of the workers, unique in the group.
        resources (dict, optional): what each asks Ray for: any of ``num_cpus``, ``num_gpus``,
            ``memory`` (bytes) and ``resources`` (amounts by name); None: what the setting
            ``workers`` says.
        me (str): name of this process, if it is not in a group yet.
        group (str, optional): name of the group that the workers join; this process connects to it
            (see ``connect``) if it is not in it. Not given: the default group.
        detached (bool): the workers outlive this program: others find them by ``connect``, and
            ``rayrpc stop GROUP`` ends them. What they print is in Ray's logs.
        max_restarts (int): how often each worker is started again under its name if it dies; -1:
            always. What was pending on it fails with ``WorkerDiedError``, and so does what uses the
            RRefs that it owned; other calls wait until it is there, for their timeout, but a minute
            at most.
        on_start (Callable, optional): runs on each worker, without arguments, whenever it is
            started; calls to the worker wait until it has returned. It may call other workers.
        restart (bool): end the workers that this process has started under these names, and start
            new ones.

    Returns:
        WorkerGroup: of the workers, which serve already.

    Raises:
        PlacementError: a worker asks for resources that no node has, or that did not become free
            in the seconds of the setting ``placement_timeout``.
        GroupError: this process is in a group of fixed size, or a name is there twice, or taken:
            by workers that others have started, or with other ``resources``, or by only some of
            those that were started together. No worker is started then.
        ConfigError: ``resources`` or ``max_restarts`` has a value that is not valid, or detached
            workers have no group, or are to be started again.
        TypeError: ``names`` is one string, or ``resources`` has an unknown key.
        Exception: what ``on_start`` raised.

    Example:
        >>> rpc.start_workers(["sampler0", "sampler1"], group="samplers", detached=True)
        WorkerGroup(sampler0, sampler1)

    Source: rayrpc's own.
    """
    lifetime = Lifetime(detached, max_restarts, on_start)
    settings = config.settings()
    if group is None:
        if detached:
            raise ConfigError(
                "detached workers need a group that they are found by: give group=NAME"
            )
        return start_with(settings, names, resources, me, lifetime, restart)
    wanted = wanted_by(settings, names, resources)
    if current.find(group) is not None:
        return start_beside(get_group(group)._agent, settings, wanted, lifetime, restart)
    guest = _join_as_guest(group)
    try:
        return start_beside(guest._agent, settings, wanted, lifetime)
    except BaseException:
        guest.shutdown(graceful=False)
        raise


def _join_as_guest(group: str, given: TensorPipeRpcBackendOptions | None = None) -> Group:
    return _join(group, f"guest-{uuid.uuid4().hex[:12]}", -1, None, given, Role.GUEST)


def _join(
    group: str,
    name: str,
    rank: int,
    world_size: int | None,
    given: TensorPipeRpcBackendOptions | None,
    role: Role,
) -> Group:
    if not isinstance(group, str):
        raise ArgumentTypeError(f"group must be a str, got {group!r}")
    if current.find(group) is not None:
        raise GroupError(f"this process is in group {group!r}: rpc.get_group({group!r}) returns it")
    settings = config.settings()
    options = copy.copy(given or default_options(settings))
    options.init_method = f"ray://{group}"
    users = GroupApi()
    agent = make_agent(name, rank, world_size, options, settings, users, role=role)
    made = users.group = Group(agent)
    current.add(agent)  # in this order: the first call may come at once, and use the group itself
    agent.start()
    return made


def get_group(group: str | None = None) -> Group:
    """Return a group that this process is in.

    Args:
        group (str, optional): its name; not given: the default group.

    Raises:
        RuntimeError: this process is not in it.

    Source: rayrpc's own.
    """
    if group is None:
        return Group(current.initialized_agent())
    agent = current.find(group)
    if agent is None:
        inside = ", ".join(map(repr, current.names())) or "none"
        raise GroupError(
            f"this process is not in group {group!r}, but in {inside}: call rpc.init_group first"
        )
    return Group(agent)


def on_join(observer: Callable[[WorkerInfo], object]) -> Callable[[], None]:
    """Call a function for each worker that joins the default group from now on.

    Args:
        observer (Callable): takes the WorkerInfo. It runs in a thread of rayrpc, where it may call
            workers; one call at a time, in the order of the changes. Its errors are logged.

    Returns:
        A function that ends the calls.

    Raises:
        RuntimeError: RPC is not initialized.

    Example:
        >>> stop = rpc.on_join(lambda worker: print(worker.name, "is there"))
        >>> stop()  # calls it no more

    Source: rayrpc's own.
    """
    return get_group().on_join(observer)


def on_leave(observer: Callable[[WorkerInfo, str], object]) -> Callable[[], None]:
    """Call a function for each worker that leaves the default group, or dies, from now on.

    Args:
        observer (Callable): takes the WorkerInfo, and the cause as a clause; see ``on_join``.

    Returns:
        A function that ends the calls.

    Raises:
        RuntimeError: RPC is not initialized.

    Example:
        >>> stop = rpc.on_leave(lambda worker, cause: print(f"{worker.name} is gone: {cause}"))
        >>> stop()

    Source: rayrpc's own.
    """
    return get_group().on_leave(observer)
