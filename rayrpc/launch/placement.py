"""Where workers can run: ask for resources, and say at once which are missing."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import ray

from rayrpc._transports.ray.cluster import through_client
from rayrpc.config import Settings, WorkerResources
from rayrpc.errors import PlacementError

__all__ = [
    "check_placeable",
    "demands",
    "free_group",
    "named",
    "placed_options",
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
    """Return the resources that a worker asks for, under Ray's names."""
    demand = {"CPU": want.num_cpus, "GPU": want.num_gpus, **want.resources}
    if want.memory is not None:
        demand["memory"] = want.memory
    return {name: amount for name, amount in demand.items() if amount}


def check_placeable(wanted: Mapping[str, WorkerResources]) -> None:
    """Check that some node could run each worker, were it idle.

    Args:
        wanted: by worker.

    Raises:
        PlacementError: none could; the message names the worker and the resource.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for worker, want in wanted.items():
        demand = demands(want)
        if any(all(n.get(k, 0) >= v for k, v in demand.items()) for n in nodes):
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


def placed_options(
    wanted: Mapping[str, WorkerResources], strategy: str | None, patience: float
) -> dict[str, dict[str, Any]]:
    """Return Ray's options for each worker's actor.

    Args:
        wanted: by worker.
        strategy: how to lay the workers out over the nodes; None: each by itself.
        patience: how long to wait for resources that others hold, in seconds.

    Raises:
        PlacementError: they did not become free.
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
    if strategy is None:
        return options
    # a group lays out what its members ask for, so those that ask for nothing get a token
    bundles = [demands(want) or {"CPU": 0.001} for want in wanted.values()]
    group = ray.util.placement_group(bundles, strategy=strategy)
    if not group.wait(patience):
        ray.util.remove_placement_group(group)
        raise PlacementError(
            f"Workers {', '.join(wanted)} could not be placed with {strategy} in {patience:g} s: "
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


def free_group(options: Mapping[str, Mapping[str, Any]]) -> None:
    """Give back what ``placed_options`` reserved for workers that have ended."""
    for option in options.values():
        strategy = option.get("scheduling_strategy")
        if strategy is not None:
            ray.util.remove_placement_group(strategy.placement_group)
            return


def wait_placed(
    actors: Mapping[str, Any], wanted: Mapping[str, WorkerResources], patience: float
) -> dict[str, int]:
    """Wait until every worker's process runs; return their pids.

    Args:
        actors, wanted: by worker.
        patience: how long to wait in seconds.

    Raises:
        PlacementError: some did not start in time, for lack of free resources.
    """
    refs = {worker: actor.pid.remote() for worker, actor in actors.items()}
    ready, late = ray.wait(list(refs.values()), num_returns=len(refs), timeout=patience)
    if late:
        worker = next(name for name, ref in refs.items() if ref in late)
        raise PlacementError(
            f"Worker {worker!r} was not started in {patience:g} s: it asks for "
            f"{demands(wanted[worker]) or 'nothing'}, and free are {_free()}. Wait for other "
            "programs, ask for less in the setting `workers`, or raise placement_timeout."
        )
    del ready
    return dict(zip(refs, ray.get(list(refs.values())), strict=True))


def _free() -> dict[str, float]:
    free = ray.available_resources()
    return {k: v for k, v in sorted(free.items()) if not k.startswith(("node:", "object_store"))}
