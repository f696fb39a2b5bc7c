"""Groups beside the default one: a process may be in several at once.

``init_rpc`` joins the default group, which the functions of ``rayrpc`` mean; ``init_group`` joins
another, as an object with the same functions.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.futures import Future

from rayrpc import api, config
from rayrpc._concurrency.outcome import Error, Outcome, Value, attempt, complete
from rayrpc._jit.lazy import LazyRemote
from rayrpc._protocol.ids import WorkerInfo
from rayrpc._protocol.rendezvous import owned_key
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.invocation import Args, Kwargs, To
from rayrpc._transports import has_members
from rayrpc._transports.process_origin import this_origin
from rayrpc.errors import ArgumentTypeError, ConfigError, GroupCallError, GroupError, RpcError
from rayrpc.launch.workers import WorkerGroup, start_beside, start_with, wanted_by
from rayrpc.options import (
    DEFAULT_SHUTDOWN_TIMEOUT,
    UNSET_RPC_TIMEOUT,
    TensorPipeRpcBackendOptions,
)
from rayrpc.rref_proxy import RRef
from rayrpc.startup import GUEST, Role, default_options, make_agent

__all__ = ["Group", "connect", "get_group", "init_group", "start_workers"]

# How long the deletion of RRefs may take when a worker leaves.
DELETE_SECONDS = 10.0


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
        >>> keepers = rpc.init_group("keepers", "me")
        >>> keepers.start_workers(["keeper0", "keeper1"])
        >>> keepers.rpc_all("keeper*", torch.add, args=(torch.ones(1), 1)).wait()
        {'keeper0': tensor([2.]), 'keeper1': tensor([2.])}
        >>> keepers.shutdown()

    Source: rayrpc's own.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"name must be a str, got {name!r}")
    return _join(group, name, rank, world_size, rpc_backend_options, Role.WORKER)


def connect(group: str, rpc_backend_options: TensorPipeRpcBackendOptions | None = None) -> Group:
    """Call the workers of a group, from a process that is not to be one of them.

    The group's members come and go, and another program may have made it, on any host of the
    cluster.  ``workers`` and ``rpc_all`` leave this process out.

    Args:
        group (str): its name.
        rpc_backend_options (TensorPipeRpcBackendOptions, optional): see ``init_group``.

    Returns:
        Group: ``shutdown`` ends the connection.

    Raises:
        TypeError: ``group`` is no text.
        RuntimeError: there is no such group on the cluster, or it is of fixed size, or this process
            is in it.

    Example:
        >>> keepers = rpc.connect("keepers")
        >>> keepers.rpc_sync("keeper0", torch.add, args=(torch.ones(1), 1))
        tensor([2.])
        >>> keepers.shutdown()

    Source: rayrpc's own.
    """
    if not isinstance(group, str):
        raise ArgumentTypeError(f"group must be a str, got {group!r}")
    known = current.find(group) is not None  # that is an error, too
    if not known and not has_members(config.settings(), owned_key(group, this_origin())):
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
) -> WorkerGroup:
    """Start workers that serve calls, as Ray actors, and join their group.

    If RPC is not initialized in this process, it becomes a member of a new dynamic group; the
    workers join that, or the dynamic group that this process is in.

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

    Returns:
        WorkerGroup: of the new workers, which serve already.

    Raises:
        PlacementError: a worker asks for resources that no node has, or that did not become free
            in the seconds of the setting ``placement_timeout``.
        GroupError: this process is in a group of fixed size, or a name is taken.
        ConfigError: ``resources`` has a value that is not valid, or detached workers have no group.
        TypeError: ``names`` is one string, or ``resources`` has an unknown key.

    Example:
        >>> rpc.start_workers(["keeper0", "keeper1"], group="keepers", detached=True)
        WorkerGroup(keeper0, keeper1)

    Source: rayrpc's own.
    """
    settings = config.settings()
    if group is None:
        if detached:
            raise ConfigError(
                "detached workers need a group that they are found by: give group=NAME"
            )
        return start_with(settings, names, resources, me)
    wanted = wanted_by(settings, names, resources)
    if current.find(group) is not None:
        return start_beside(get_group(group)._agent, settings, wanted, detached)
    guest = _join_as_guest(group)
    try:
        return start_beside(guest._agent, settings, wanted, detached)
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
    users = _GroupApi()
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


class Group:
    """A group that this process is in; ``init_group`` and ``get_group`` return it.

    Its methods ``rpc_sync``, ``rpc_async`` and ``remote`` are those of ``rayrpc``, on the workers
    of this group.  RRefs of a group can be sent in its calls alone.

    Args:
        agent (Agent): of this process in the group.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    @property
    def name(self) -> str:
        """The group's name."""
        return self._agent.key

    @property
    def me(self) -> WorkerInfo:
        """This process, as a worker of the group."""
        return self._agent.info

    def workers(self, pattern: str = "*") -> list[WorkerInfo]:
        """Return the workers whose names match a pattern, by id.

        Args:
            pattern (str): as for files: ``*``, ``?``, ``[abc]``.

        Source: rayrpc's own; ``fnmatch``.
        """
        return [
            WorkerInfo(member.name, member.id)
            for member in self._agent.members()
            if fnmatch.fnmatchcase(member.name, pattern) and not member.extra.get(GUEST)
        ]

    def get_worker_info(self, worker: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """Return the WorkerInfo of a worker of the group, or of this one.

        Args:
            worker (str, optional): as for ``rayrpc.get_worker_info``.

        Returns:
            ``WorkerInfo``: the name and the id.
        """
        return self._agent.get_worker_info(worker)

    # -- calls --------------------------------------------------------------------------------

    def rpc_sync(
        self,
        to: To,
        func: Any,
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Any:
        """Run a function on a worker of the group and return its result.

        Args:
            to, func, args, kwargs, timeout: as for ``rayrpc.rpc_sync``.

        Returns:
            The result of the function.
        """
        return self._call("sync", to, func, args, kwargs, timeout)

    def rpc_async(
        self,
        to: To,
        func: Any,
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Future[Any]:
        """Run a function on a worker of the group and return a Future of its result at once.

        Args:
            to, func, args, kwargs, timeout: as for ``rayrpc.rpc_async``.

        Returns:
            ``torch.futures.Future``: as that of ``rayrpc.rpc_async``.
        """
        future: Future[Any] = self._call("future", to, func, args, kwargs, timeout)
        return future

    def remote(
        self,
        to: To,
        func: Any,
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> RRef[Any]:
        """Run a function on a worker of the group, which keeps the result.

        Args:
            to, func, args, kwargs, timeout: as for ``rayrpc.remote``.

        Returns:
            ``RRef``: its methods call in this group.
        """
        rref: RRef[Any] = self._call("remote", to, func, args, kwargs, timeout)
        return rref

    def _call(
        self, mode: str, to: To, func: Any, args: Args, kwargs: Kwargs, timeout: float
    ) -> Any:
        agent = self._agent
        call = getattr(agent.caller, mode)
        return call(
            agent.lookup(to), api._prepare(func, args, kwargs), agent.resolve_timeout(timeout)
        )

    def rpc_all(
        self,
        pattern: str,
        func: Callable[..., Any],
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Future[dict[str, Any]]:
        """Run a function on all workers whose names match, and return a Future of the results.

        Args:
            pattern (str): see ``workers``; this worker is called, too, if it matches.
            func, args, kwargs, timeout: of each call; see ``rayrpc.rpc_sync``.

        Returns:
            ``torch.futures.Future``: of a dict, by name, once all calls have ended. If any has
            failed, ``wait`` raises a ``GroupCallError``, which has the errors by name, and the
            results of the others.

        Raises:
            GroupError: no worker matches.
            SerializationError: an argument cannot be sent.

        Source: rayrpc's own.
        """
        names = [info.name for info in self.workers(pattern)]
        if not names:
            there = ", ".join(info.name for info in self.workers())
            raise GroupError(
                f"no worker of group {self.name!r} matches {pattern!r}; it has {there}"
            )
        calls = {name: self.rpc_async(name, func, args, kwargs, timeout) for name in names}
        result: Future[dict[str, Any]] = Future()
        ended: dict[str, Outcome[Any]] = {}
        count = itertools.count(1).__next__  # one step for Python: no lock is needed

        def on_end(name: str, done: Future[Any]) -> None:
            ended[name] = attempt(done.value)
            if count() == len(calls):
                complete(result, _joined(self.name, {each: ended[each] for each in names}))

        for name, call in calls.items():
            call.add_done_callback(functools.partial(on_end, name))
        return result

    def rref(self, value: Any) -> RRef[Any]:
        """Return an RRef of this group to a value of this process.

        Args:
            value (object): the value.

        Source: ``torch.distributed.rpc.RRef``.
        """
        return RRef._of(self._agent, value)

    # -- workers ------------------------------------------------------------------------------

    def start_workers(
        self,
        names: Sequence[str],
        resources: Mapping[str, float | Mapping[str, float]] | None = None,
        detached: bool = False,
    ) -> WorkerGroup:
        """Start workers that join this group, which is their default one.

        Args:
            names, resources, detached: see ``rayrpc.start_workers``.

        Returns:
            WorkerGroup: of the new workers, which serve already and end with this process's
            membership.

        Raises:
            PlacementError, GroupError, ConfigError, TypeError: see ``rayrpc.start_workers``.

        Source: rayrpc's own.
        """
        settings = config.settings()
        wanted = wanted_by(settings, names, resources)
        return start_beside(self._agent, settings, wanted, detached)

    def shutdown(self, graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
        """Leave the group; see ``rayrpc.shutdown``.

        Args:
            graceful (bool): wait for calls under way, in a group of fixed size those of all
                members, which have to call this, too; else leave at once.
            timeout (float): of the wait, in seconds; 0: none.

        Raises:
            RuntimeError: calls did not end in time, or a member did not call this.
        """
        agent = self._agent
        if agent is current.default():
            api.shutdown(graceful, timeout)
            return
        try:
            if graceful and not agent.has_left:
                wait = agent.join if agent.is_static_group else agent.drain
                wait(timeout=timeout)
                agent.rrefs.delete_all(DELETE_SECONDS)
                wait(timeout=timeout)
        finally:
            agent.shutdown()
            current.remove(agent)

    def __repr__(self) -> str:
        names = ", ".join(info.name for info in self.workers())
        return f"<rayrpc group {self.name!r}: {self.me.name} of {names}>"


class _GroupApi:
    """The functions that RRefs of a group call; see ``UserApi``."""

    group: Group

    @property
    def rpc_sync(self) -> Callable[..., Any]:
        return self.group.rpc_sync

    @property
    def rpc_async(self) -> Callable[..., Any]:
        return self.group.rpc_async

    @property
    def remote(self) -> Callable[..., Any]:
        return self.group.remote

    def lazy(self, rref: Any, timeout: float) -> Any:
        return LazyRemote(rref, timeout)

    def backward(self, context_id: int, roots: Sequence[Any], retain_graph: bool) -> None:
        raise RpcError(
            f"contexts of distributed autograd are of the default group, not of {self.group.name!r}"
        )


def _joined(group: str, ended: Mapping[str, Outcome[Any]]) -> Outcome[dict[str, Any]]:
    """Return the outcome of calls, given theirs by name."""
    results = {name: each.value for name, each in ended.items() if isinstance(each, Value)}
    errors = {name: each.error for name, each in ended.items() if isinstance(each, Error)}
    return Error(GroupCallError(group, errors, results)) if errors else Value(results)
