"""Workers that one object of this process has for itself, beside any group it is in."""

from __future__ import annotations

import atexit
import uuid
from collections.abc import Sequence
from typing import Any

import ray

from rayrpc import config, startup
from rayrpc._transports.ray_cluster import connect, through_client
from rayrpc.errors import PlacementError
from rayrpc.launch.placement import check_placeable, placed_options, this_node
from rayrpc.launch.workers import start_into

__all__ = ["Crew", "count_cpus"]

NO_TIMEOUT = 0.0
LEAVE_SECONDS = 5.0


def count_cpus() -> int:
    """Return how many CPUs the cluster has."""
    connect(config.settings())
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


class Crew:
    """Start workers, call them, end them; they end with this process at the latest.

    They are a group of their own, which this process is a member of without any call to
    ``init_rpc``; for them it is the group that they are in.

    Args:
        me (str): the name by which workers know this process.
        here (bool): start workers on this process's node only.

    Raises:
        PlacementError: ``here``, but this process is on no node of the cluster.
    """

    def __init__(self, me: str, here: bool = False) -> None:
        self._settings = config.settings()
        connect(self._settings)
        if here and through_client():
            raise PlacementError(
                f"{me!r} needs workers on its own node, but this process is outside of the "
                "cluster (Ray Client): run it on a node, or do not ask for shared memory"
            )
        self._node = this_node() if here else None
        options = startup.default_options(self._settings)
        options.init_method = f"ray://{me}-{uuid.uuid4().hex[:8]}"
        self._agent = startup.make_agent(me, -1, None, options, self._settings)
        self._agent.start()
        self._actors: dict[str, Any] = {}
        atexit.register(self.stop)

    def start(self, names: Sequence[str]) -> None:
        """Start workers, and wait until they serve.

        Raises:
            PlacementError: the cluster has not what the setting ``workers`` asks for.
        """
        settings = self._settings
        wanted = {name: settings.resources_for(name) for name in names}
        check_placeable(wanted)
        placed = placed_options(wanted, None, settings.placement_timeout)
        for options in placed.values():
            options["scheduling_strategy"] = self._strategy()
        self._actors.update(start_into(self._agent, settings, wanted, placed))

    def _strategy(self) -> Any:
        if self._node is None:
            return "SPREAD"
        strategies = ray.util.scheduling_strategies
        return strategies.NodeAffinitySchedulingStrategy(self._node, soft=False)

    def call(self, name: str, func: Any, args: tuple[Any, ...]) -> Any:
        """Call a worker, without a timeout; return a Future, which fails if the worker dies."""
        member = self._agent.lookup(name)
        return self._agent.caller.future(member, func, args, {}, NO_TIMEOUT)

    def end(self, names: Sequence[str]) -> None:
        """End workers when what they have printed is here."""
        actors = [self._actors.pop(name) for name in names if name in self._actors]
        if not ray.is_initialized():  # any more: they ended with it
            return
        refs = [actor.leave_group.remote() for actor in actors]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=LEAVE_SECONDS)
        for actor in actors:
            ray.kill(actor)

    def stop(self) -> None:
        """End all workers at once, and leave their group."""
        atexit.unregister(self.stop)
        actors, self._actors = self._actors, {}
        if ray.is_initialized():
            for actor in actors.values():
                ray.kill(actor)
        self._agent.shutdown()
