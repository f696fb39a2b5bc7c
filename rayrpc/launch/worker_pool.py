"""Workers that one object of this process has for itself, beside any group it is in."""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ray

from rayrpc import api, config, startup
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.invocation import Invocation
from rayrpc._transports.ray.cluster import connect, through_client
from rayrpc.config import WorkerResources
from rayrpc.errors import PlacementError
from rayrpc.launch.placement import check_placeable, demands, placed_options, this_node
from rayrpc.launch.workers import start_into

__all__ = ["OWNER", "WorkerPool", "count_cpus"]

OWNER = "owner"  # the name by which workers know the process that started them
LEAVE_SECONDS = 5.0


def count_cpus() -> int:
    """Return how many CPUs the cluster has."""
    connect(config.settings())
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


class _Membership:
    """This process in the group of its worker_pools, as long as there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker_pools = 0
        self._agent: Any = None
        self._names = itertools.count()

    def enter(self, settings: config.Settings) -> Agent:
        """Return the agent, for one worker_pool more."""
        with self._lock:
            if self._agent is None:
                options = startup.default_options(settings)
                options.init_method = f"ray://worker_pool-{uuid.uuid4().hex[:8]}"
                self._agent = startup.make_agent(OWNER, -1, None, options, settings, api.user_api)
                self._agent.start()
            self._worker_pools += 1
            agent: Agent = self._agent
            return agent

    def leave(self) -> None:
        """Take note that a worker_pool has ended."""
        with self._lock:
            self._worker_pools -= 1
            if self._worker_pools:
                return
            agent, self._agent = self._agent, None
        agent.shutdown()

    def new_name(self) -> str:
        """Return a name that no worker has had."""
        return f"worker-{next(self._names)}"


_membership = _Membership()


def _after_fork() -> None:
    global _membership
    _membership = _Membership()  # a child has neither the agent's threads nor its connections


os.register_at_fork(after_in_child=_after_fork)


class WorkerPool:
    """Start workers, call them, end them; they end with this process at the latest.

    All pools of a process share one group, which the process joins without any call to
    ``init_rpc``; for the workers it is the group that they are in.

    Args:
        here (bool): start workers on this process's node only.
        at_exit (Callable, optional): called when the program ends, to ``stop``; default: that.

    Raises:
        PlacementError: ``here``, but this process is on no node of the cluster.
    """

    def __init__(self, here: bool = False, at_exit: Callable[[], None] | None = None) -> None:
        self._settings = config.settings()
        connect(self._settings)
        if here and through_client():
            raise PlacementError(
                "workers that share memory with this process must be on its node, but it is "
                "outside of the cluster (Ray Client): run it on a node, or send copies"
            )
        self._node = this_node() if here else None
        self._actors: dict[str, Any] = {}
        self._node_of: dict[str, str] = {}
        self._stopped = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._at_exit = at_exit or self.stop
        self._agent = _membership.enter(self._settings)
        atexit.register(self._end_with_program)

    def start(self, count: int) -> list[str]:
        """Start workers, wait until they serve, and return their names.

        Raises:
            PlacementError: the cluster has not what the setting ``workers`` asks for.
        """
        settings = self._settings
        names = [_membership.new_name() for _ in range(count)]
        wanted = {name: settings.resources_for(name) for name in names}
        check_placeable(wanted)
        placed = placed_options(wanted, None, settings.placement_timeout)
        for name, options in placed.items():
            options["scheduling_strategy"] = self._strategy(name, wanted[name])
        actors = start_into(self._agent, settings, wanted, placed)
        with self._lock:
            if not self._stopped:
                self._actors.update(actors)
                return names
        for actor in actors.values():
            ray.kill(actor)
        raise PlacementError("the workers that were being started are not needed any more")

    def _strategy(self, name: str, want: WorkerResources) -> Any:
        """Return where a worker is to run: here, or where there are most CPUs for each worker."""
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        if self._node is not None:
            return affinity(self._node, soft=False)
        cpus = {
            node["NodeID"]: node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]
        }
        if demands(want) or not any(cpus.values()):
            return "SPREAD"
        # Ray itself puts workers that ask for nothing anywhere
        there = Counter(self._node_of.values())
        node = min((each for each in cpus if cpus[each]), key=lambda n: (there[n] + 1) / cpus[n])
        self._node_of[name] = node
        return affinity(node, soft=True)

    def call(self, name: str, func: Any, args: tuple[Any, ...]) -> Any:
        """Call a worker, without a timeout; return a Future, which fails if the worker dies."""
        member = self._agent.lookup(name)
        return self._agent.caller.future(member, Invocation(func, args), None)

    def end(self, names: Sequence[str]) -> None:
        """End workers when what they have printed is here."""
        actors = [self._actors.pop(name) for name in names if name in self._actors]
        for name in names:
            self._node_of.pop(name, None)
        if not ray.is_initialized():  # any more: they ended with it
            return
        refs = [actor.leave_group.remote() for actor in actors]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=LEAVE_SECONDS)
        for actor in actors:
            ray.kill(actor)

    def _end_with_program(self) -> None:
        if os.getpid() == self._pid:  # a fork has none of this
            self._at_exit()

    def stop(self) -> None:
        """End all workers at once."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            actors, self._actors = self._actors, {}
        atexit.unregister(self._end_with_program)
        if ray.is_initialized():
            for actor in actors.values():
                ray.kill(actor)
        _membership.leave()
