"""Workers for one object of this process, independent of any group that the process is in."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle
from torch.futures import Future

from rayrpc import api, config, startup
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.invocation import Invocation
from rayrpc._transports.ray.cluster import connect, through_client
from rayrpc.config import WorkerResources
from rayrpc.errors import PlacementError
from rayrpc.launch.ahead import connect_for_workers
from rayrpc.launch.hosted import HostedWorker
from rayrpc.launch.output import Output
from rayrpc.launch.placement import check_placeable, demands, placed_options, this_node
from rayrpc.launch.starting import end_hosted
from rayrpc.launch.workers import start_into

__all__ = ["OWNER", "WorkerPool", "count_cpus"]

OWNER = "owner"  # name, in the pools' group, of the process that started the workers


def count_cpus() -> int:
    """Return how many CPUs the cluster has, in whole ones, and at least 1."""
    connect(config.settings())
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


class _Membership:
    """This process's membership in the group of its pools, which lasts as long as one of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools = 0
        self._agent: Agent | None = None
        self._names = itertools.count()

    def enter(self, settings: config.Settings) -> Agent:
        """Return the agent, started with the first pool; each pool calls ``leave`` at its end."""
        with self._lock:
            if self._agent is None:
                options = startup.default_options(settings)
                options.init_method = f"ray://pools-{uuid.uuid4().hex[:8]}"
                self._agent = startup.make_agent(OWNER, -1, None, options, settings, api.user_api)
                self._agent.start()
            self._pools += 1
            return self._agent

    def leave(self) -> None:
        """Count one pool less; after the last one, leave the group."""
        with self._lock:
            self._pools -= 1
            if self._pools:
                return
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.shutdown()

    def new_name(self) -> str:
        """Return a name that no worker of this process has had."""
        return f"worker-{next(self._names)}"


_membership = _Membership()


@functools.cache
def _handle_forks() -> None:
    """Give forked children a membership of their own; only the first call does something."""

    def after_fork() -> None:
        global _membership
        _membership = _Membership()  # a child has neither the agent's threads nor its connections

    os.register_at_fork(after_in_child=after_fork)


class WorkerPool:
    """Start workers, call them, end them; they end with this process at the latest.

    All pools of a process share one group, which the process joins without any call to
    ``init_rpc``; for the workers it is the group that they are in.

    Args:
        here (bool): start workers on this process's node only.
        at_exit (Callable, optional): called when the program ends; it must call ``stop``.
            Default: ``stop``.

    Raises:
        PlacementError: ``here``, but this process is on no node of the cluster.
        GroupError: this process could not join the group.
    """

    def __init__(self, here: bool = False, at_exit: Callable[[], None] | None = None) -> None:
        self._settings = config.settings()
        connect_for_workers(self._settings)
        if here and through_client():
            raise PlacementError(
                "workers that share memory with this process must be on its node, but it is "
                "outside of the cluster (Ray Client): run it on a node, or send copies"
            )
        self._node = this_node() if here else None
        self._actors: dict[str, ActorHandle[HostedWorker]] = {}
        self._outputs: dict[str, Output] = {}
        self._node_of: dict[str, str] = {}
        self._stopped = False
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._at_exit = at_exit or self.stop
        _handle_forks()
        self._agent = _membership.enter(self._settings)
        atexit.register(self._end_with_program)

    def start(self, count: int) -> list[str]:
        """Start workers, and wait until they serve.

        Args:
            count (int): how many.

        Returns:
            Their names, unique in this process.

        Raises:
            PlacementError: no node has what the setting ``workers`` asks for, it did not become
                free in time, or the pool was stopped meanwhile.
        """
        settings = self._settings
        names = [_membership.new_name() for _ in range(count)]
        wanted = {name: settings.resources_for(name) for name in names}
        check_placeable(wanted)
        placed = placed_options(wanted, None, settings.placement_timeout)
        for name, options in placed.items():
            options["scheduling_strategy"] = self._strategy(name, wanted[name])
        actors, output = start_into(self._agent, settings, wanted, placed)
        assert output is not None  # as they are not detached
        with self._lock:
            if not self._stopped:
                self._actors.update(actors)
                self._outputs.update(dict.fromkeys(names, output))
                return names
        for actor in actors.values():
            ray.kill(actor)
        output.close()
        raise PlacementError("the pool was ended while its workers were being started")

    def _strategy(self, name: str, want: WorkerResources) -> Any:
        """Return a worker's node: this one, or that with the most CPUs for each worker."""
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        if self._node is not None:
            return affinity(self._node, soft=False)
        cpus = {
            node["NodeID"]: node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]
        }
        if demands(want) or not any(cpus.values()):
            return "SPREAD"
        # Ray may put all that ask for nothing on one node, and ignores their soft affinities
        there = Counter(self._node_of.values())
        node = min((each for each in cpus if cpus[each]), key=lambda n: (there[n] + 1) / cpus[n])
        self._node_of[name] = node
        return affinity(node, soft=False)

    def call(self, name: str, func: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any]:
        """Call ``func(*args)`` on a worker, without a timeout.

        Args:
            name (str): the worker.
            func (Callable): runs there.
            args (tuple): its arguments.

        Returns:
            Future: of the result; it fails if the worker dies.
        """
        member = self._agent.lookup(name)
        future: Future[Any] = self._agent.caller.future(member, Invocation(func, args), None)
        return future

    def end(self, names: Sequence[str]) -> None:
        """End workers; each has 5 seconds to send the rest of its output.

        Args:
            names (list[str]): of the workers; names of none are ignored.
        """
        actors = [self._actors.pop(name) for name in names if name in self._actors]
        for name in names:
            self._node_of.pop(name, None)
        if not ray.is_initialized():  # Ray was shut down, and has ended them
            return
        end_hosted(actors)
        self._close_outputs(names)

    def _close_outputs(self, names: Sequence[str]) -> None:
        """Show the rest of what ended workers printed."""
        outputs = {name: self._outputs.pop(name) for name in names if name in self._outputs}
        for name, output in outputs.items():
            output.wait_ended([name])
        for output in set(outputs.values()) - set(self._outputs.values()):
            output.close()

    def _end_with_program(self) -> None:
        if os.getpid() == self._pid:  # a forked child does not own the workers
            self._at_exit()

    def stop(self) -> None:
        """End all workers at once; later calls do nothing.

        The process leaves the pools' group when its last pool stops.
        """
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            actors, self._actors = self._actors, {}
        atexit.unregister(self._end_with_program)
        if ray.is_initialized():
            for actor in actors.values():
                ray.kill(actor)
        self._close_outputs(list(self._outputs))
        _membership.leave()
