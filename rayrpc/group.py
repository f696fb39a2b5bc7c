"""A group of workers as an object, with the functions of ``rayrpc`` as methods."""

from __future__ import annotations

import fnmatch
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.futures import Future

from rayrpc import api, config
from rayrpc._autograd.leader import run_backward
from rayrpc._concurrency.outcome import Error, Outcome, Value, attempt, complete
from rayrpc._protocol.ids import WorkerInfo
from rayrpc._protocol.membership import Change
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.invocation import Args, Kwargs, To
from rayrpc.autograd import GroupAutograd
from rayrpc.cancellation import combine
from rayrpc.errors import GroupCallError, GroupError
from rayrpc.launch.lifetime import Lifetime
from rayrpc.launch.workers import WorkerGroup, start_beside, wanted_by
from rayrpc.options import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from rayrpc.rref_proxy import RRef
from rayrpc.streams import Stream, open_stream

__all__ = ["Group", "GroupApi"]

# How long the deletion of RRefs may take when a worker leaves.
DELETE_SECONDS = 10.0


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

    @property
    def autograd(self) -> GroupAutograd:
        """Distributed autograd in the group's calls: ``context``, ``backward``, ``get_gradients``.

        Source: ``torch.distributed.autograd``.
        """
        return GroupAutograd(self._agent)

    def workers(self, pattern: str = "*") -> list[WorkerInfo]:
        """Return the workers whose names match a pattern, by id.

        Args:
            pattern (str): as for files: ``*``, ``?``, ``[abc]``.

        Source: rayrpc's own; ``fnmatch``.
        """
        return [
            WorkerInfo(member.name, member.id)
            for member in self._agent.members.all()
            if fnmatch.fnmatchcase(member.name, pattern) and not member.is_guest
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

    def stream(
        self,
        to: To,
        func: Callable[..., Any],
        args: Args = None,
        kwargs: Kwargs = None,
        window: int = 8,
        timeout: float = UNSET_RPC_TIMEOUT,
    ) -> Stream[Any]:
        """Run a generator on a worker of the group; return an iterator over what it yields.

        Args:
            to, func, args, kwargs, window, timeout: as for ``rayrpc.stream``.

        Returns:
            ``Stream``: as that of ``rayrpc.stream``.
        """
        return open_stream(self._agent, to, func, args, kwargs, window, timeout)

    def _call(
        self, mode: str, to: To, func: Any, args: Args, kwargs: Kwargs, timeout: float
    ) -> Any:
        agent = self._agent
        call = getattr(agent.caller, mode)
        return call(
            agent.lookup(to, timeout),
            api._prepare(func, args, kwargs),
            agent.resolve_timeout(timeout),
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
        combine(result, calls.values())
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
        max_restarts: int = 0,
        on_start: Callable[[], object] | None = None,
        restart: bool = False,
    ) -> WorkerGroup:
        """Start workers that join this group, which is their default one.

        Args:
            names, resources, detached, max_restarts, on_start, restart: see
                ``rayrpc.start_workers``.

        Returns:
            WorkerGroup: of the workers, which serve already and end with this process's
            membership.

        Raises:
            PlacementError, GroupError, ConfigError, TypeError: see ``rayrpc.start_workers``.

        Source: rayrpc's own.
        """
        lifetime = Lifetime(detached, max_restarts, on_start)
        settings = config.settings()
        wanted = wanted_by(settings, names, resources)
        return start_beside(self._agent, settings, wanted, lifetime, restart)

    # -- who comes and goes -------------------------------------------------------------------

    def on_join(self, observer: Callable[[WorkerInfo], object]) -> Callable[[], None]:
        """Call a function for each worker that joins the group from now on.

        Args:
            observer (Callable): takes the WorkerInfo; see ``rayrpc.on_join``.

        Returns:
            A function that ends the calls.
        """
        return self._observe(True, lambda worker, cause: observer(worker))

    def on_leave(self, observer: Callable[[WorkerInfo, str], object]) -> Callable[[], None]:
        """Call a function for each worker that leaves the group, or dies, from now on.

        Args:
            observer (Callable): takes the WorkerInfo and the cause; see ``rayrpc.on_leave``.

        Returns:
            A function that ends the calls.
        """
        return self._observe(False, observer)

    def _observe(
        self, joins: bool, observer: Callable[[WorkerInfo, str], object]
    ) -> Callable[[], None]:
        def on_change(change: Change) -> None:
            member = change.member
            if not member.is_guest:
                observer(WorkerInfo(member.name, member.id), change.cause)

        kinds = ("joined",) if joins else ("left", "died")
        return self._agent.observers.add(on_change, *kinds)

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
                joins = agent.members.is_static and not agent.member.is_guest
                wait = functools.partial(agent.join, True) if joins else agent.drain
                wait(timeout=timeout)
                agent.rrefs.delete_all(DELETE_SECONDS)
                wait(timeout=timeout)
        finally:
            agent.shutdown()
            current.remove(agent)

    def __repr__(self) -> str:
        names = ", ".join(info.name for info in self.workers())
        return f"<rayrpc group {self.name!r}: {self.me.name} of {names}>"


class GroupApi:
    """The functions that RRefs of a group call; see ``UserApi``.

    Its ``group`` is set once the agent is made, which has this.
    """

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

    def backward(self, context_id: int, roots: Sequence[Any], retain_graph: bool) -> None:
        run_backward(context_id, roots, retain_graph, self.group._agent)


def _joined(group: str, ended: Mapping[str, Outcome[Any]]) -> Outcome[dict[str, Any]]:
    """Return the outcome of calls, given theirs by name."""
    results = {name: each.value for name, each in ended.items() if isinstance(each, Value)}
    errors = {name: each.error for name, each in ended.items() if isinstance(each, Error)}
    return Error(GroupCallError(group, errors, results)) if errors else Value(results)
