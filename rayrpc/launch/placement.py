"""Where workers can run: check what they ask for, reserve it, and wait for their processes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.actor import ActorHandle

from rayrpc._concurrency.notices import noticed
from rayrpc._transports.ray.cluster import through_client
from rayrpc.config import Settings, WorkerResources
from rayrpc.errors import PlacementError

__all__ = [
    "check_placeable",
    "demands",
    "named",
    "near",
    "placed_options",
    "release_placement",
    "this_node",
    "wait_placed",
]


def this_node() -> str:
    """Return the id of this process's node; empty if it is not on one (Ray Client)."""
    if through_client():
        return ""
    return str(ray.get_runtime_context().get_node_id())


def named(worker: str, settings: Settings) -> dict[str, str]:
    """Return the options by which Ray's lists show a worker under its name."""
    return {"name": f"{worker}#{uuid.uuid4().hex[:12]}", "namespace": settings.namespace}


def demands(want: WorkerResources) -> dict[str, float]:
    """Return the resources that a worker asks for, under Ray's names; amounts of 0 are left out."""
    demand = {"CPU": want.num_cpus, "GPU": want.num_gpus, **want.resources}
    if want.memory is not None:
        demand["memory"] = want.memory
    return {name: amount for name, amount in demand.items() if amount}


def check_placeable(wanted: Mapping[str, WorkerResources]) -> None:
    """Check that each worker fits on some node, were that node idle.

    Args:
        wanted (dict[str, WorkerResources]): by worker.

    Raises:
        PlacementError: one fits on none; the message names the worker and the resource.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for worker, want in wanted.items():
        demand = demands(want)
        if _fits(demand, nodes):
            continue
        for name, amount in demand.items():
            most = max((node.get(name, 0) for node in nodes), default=0)
            if most < amount:
                raise PlacementError(
                    f"Worker {worker!r} asks for {name}: {amount:g}, but no node of the cluster "
                    f"has that much: the most on one node is {most:g} ({len(nodes)} nodes). Ask "
                    "for less in the setting `workers`, or add a node that has it."
                )
        raise PlacementError(
            f"Worker {worker!r} asks for {demand}, which no single node of the cluster has "
            "together. Ask for less in the setting `workers`, or add a node that has it."
        )


def _fits(demand: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> bool:
    """Return whether some node has all that is asked for, were it idle."""
    return any(all(n.get(k, 0) >= v for k, v in demand.items()) for n in nodes)


def placed_options(
    wanted: Mapping[str, WorkerResources],
    strategy: str | None,
    timeout: float,
    detached: str = "",
) -> dict[str, dict[str, Any]]:
    """Reserve resources, and return Ray's options for each worker's actor.

    Args:
        wanted (dict[str, WorkerResources]): by worker.
        strategy (str, optional): how to lay the workers out over the nodes; None: each by itself,
            with nothing reserved.
        timeout (float): how long to wait for resources that others hold, in seconds.
        detached (str): the workers outlive this program, and the name of what is reserved begins
            so; empty: they do not.

    Returns:
        Options by worker; give them to ``release_placement`` when the workers have ended.

    Raises:
        PlacementError: the resources did not become free in time.
    """
    options: dict[str, dict[str, Any]] = {}
    for worker, want in wanted.items():
        options[worker] = {
            "num_cpus": want.num_cpus,
            "num_gpus": want.num_gpus,
            "resources": dict(want.resources),
        }
        if want.memory is not None:
            options[worker]["memory"] = want.memory
        if detached:
            options[worker]["lifetime"] = "detached"
    if strategy is None:
        return options
    # Ray refuses an empty bundle, so a worker that asks for nothing gets a token amount
    bundles = [demands(want) or {"CPU": 0.001} for want in wanted.values()]
    stays: dict[str, Any] = {}
    if detached:
        stays = {"name": f"{detached}{uuid.uuid4().hex[:8]}", "lifetime": "detached"}
    group = ray.util.placement_group(bundles, strategy=strategy, **stays)
    if not group.wait(timeout):
        ray.util.remove_placement_group(group)
        raise PlacementError(
            f"Workers {', '.join(wanted)} could not be placed with {strategy} in {timeout:g} s: "
            f"they ask for {bundles}, and free are {_free()}. Wait for other programs, or raise "
            "placement_timeout."
        )
    for index, option in enumerate(options.values()):
        option["scheduling_strategy"] = (
            ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            )
        )
    return options


def near(
    options: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, WorkerResources], node_id: str
) -> dict[str, dict[str, Any]]:
    """Return Ray's options for workers that shall be on one node if they fit there.

    Args:
        options (dict): as ``placed_options`` returned them; a placement group stays as it is.
        wanted (dict[str, WorkerResources]): by worker.
        node_id (str): of the node; empty: any.
    """
    strategies = ray.util.scheduling_strategies
    nodes = [n["Resources"] for n in ray.nodes() if n["NodeID"] == node_id]
    result = {}
    for worker, option in options.items():
        demand = demands(wanted[worker])
        result[worker] = dict(option)
        if _fits(demand, nodes):
            # a soft affinity is not kept for workers that ask for nothing
            here = strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
            result[worker].setdefault("scheduling_strategy", here)
    return result


def release_placement(options: Mapping[str, Mapping[str, Any]]) -> None:
    """Release what ``placed_options`` reserved.

    Args:
        options (dict): as ``placed_options`` returned them.
    """
    for option in options.values():
        strategy = option.get("scheduling_strategy")
        if strategy is not None:
            ray.util.remove_placement_group(strategy.placement_group)
            return


def wait_placed(
    actors: Mapping[str, ActorHandle[Any]], wanted: Mapping[str, WorkerResources], timeout: float
) -> dict[str, int]:
    """Wait until every worker's process runs.

    Args:
        actors (dict[str, ActorHandle]): by worker.
        wanted (dict[str, WorkerResources]): by worker.
        timeout (float): how long to wait, in seconds.

    Returns:
        Process ids by worker.

    Raises:
        PlacementError: some did not start in time, for lack of free resources.
    """
    refs = {worker: actor.pid.remote() for worker, actor in actors.items()}
    with noticed(f"the processes of {', '.join(actors)}"):
        _, late = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout)
    if late:
        worker = next(name for name, ref in refs.items() if ref in late)
        raise PlacementError(
            f"Worker {worker!r} was not started in {timeout:g} s: it asks for "
            f"{demands(wanted[worker]) or 'nothing'}, and free are {_free()}. Wait for other "
            "programs, ask for less in the setting `workers`, or raise placement_timeout."
        )
    return dict(zip(refs, ray.get(list(refs.values())), strict=True))


def _free() -> dict[str, float]:
    free = ray.available_resources()
    return {k: v for k, v in sorted(free.items()) if not k.startswith(("node:", "object_store"))}
