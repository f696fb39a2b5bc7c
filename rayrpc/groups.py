"""Groups beside the default one: a process may be in several at once.

``init_rpc`` joins the default group, which the functions of ``rayrpc`` mean; ``init_group`` joins
another, as an object with the same functions.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.futures import Future

from rayrpc import api, config
from rayrpc._concurrency.outcome import Error, Outcome, Value, attempt, complete
from rayrpc._jit.lazy import LazyRemote
from rayrpc._protocol.ids import WorkerInfo
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.invocation import Args, Kwargs, To
from rayrpc.errors import ArgumentTypeError, GroupCallError, GroupError, RpcError
from rayrpc.launch.workers import WorkerGroup, start_beside, wanted_by
from rayrpc.options import (
    DEFAULT_SHUTDOWN_TIMEOUT,
    UNSET_RPC_TIMEOUT,
    TensorPipeRpcBackendOptions,
)
from rayrpc.rref_proxy import RRef
from rayrpc.startup import default_options, make_agent

__all__ = ["Group", "get_group", "init_group"]

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
    for what, text in (("group", group), ("name", name)):
        if not isinstance(text, str):
            raise ArgumentTypeError(f"{what} must be a str, got {text!r}")
    settings = config.settings()
    options = copy.copy(rpc_backend_options or default_options(settings))
    options.init_method = f"ray://{group}"
    if current.find(group) is not None:
        raise GroupError(f"this process is in group {group!r}: rpc.get_group({group!r}) returns it")
    users = _GroupApi()
    agent = make_agent(name, rank, world_size, options, settings, users, is_default=False)
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
        infos = self._agent.get_worker_infos()
        return [info for info in infos if fnmatch.fnmatchcase(info.name, pattern)]

    def get_worker_info(self, worker: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """Return the WorkerInfo of a worker, or of this one; see ``rayrpc.get_worker_info``."""
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
        """Run a function on a worker and return its result; see ``rayrpc.rpc_sync``."""
        return self._call("sync", to, func, args, kwargs, timeout)

    def rpc_async(
        self,
        to: To,
        func: Any,
        args: Args = None,
        kwargs: Kwargs = None,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Future[Any]:
        """Run a function on a worker and return a Future at once; see ``rayrpc.rpc_async``."""
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
        """Run a function on a worker, which keeps the result; see ``rayrpc.remote``."""
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
    ) -> WorkerGroup:
        """Start workers that join this group, which is their default one.

        Args:
            names, resources: see ``rayrpc.start_workers``.

        Returns:
            WorkerGroup: of the new workers, which serve already and end with this process's
            membership.

        Raises:
            PlacementError, GroupError, ConfigError, TypeError: see ``rayrpc.start_workers``.

        Source: rayrpc's own.
        """
        settings = config.settings()
        return start_beside(self._agent, settings, wanted_by(settings, names, resources))

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
