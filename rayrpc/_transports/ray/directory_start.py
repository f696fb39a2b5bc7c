"""Start the directory of a group, or find the one that runs."""

from __future__ import annotations

from typing import Any

import ray

from rayrpc._transports.ray.directory import DirectoryActor
from rayrpc._transports.ray.directory_answers import DIRECTORY_NAME

__all__ = ["find_or_create"]


def find_or_create(key: str, namespace: str, peer_timeout: float) -> Any:
    """Return the handle of the directory of a group; create it if there is none.

    Args:
        key: names the group.
        namespace: Ray namespace of the directory's name.
        peer_timeout: of the directory that is created, in seconds.
    """
    directory: Any = ray.remote(DirectoryActor)
    return directory.options(
        name=f"{DIRECTORY_NAME}{key}",
        namespace=namespace,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        num_cpus=0,
        memory=1,  # a byte: Ray puts an actor that asks for nothing on any node
        max_concurrency=100_000,
        scheduling_strategy=_on_head_node(),
    ).remote(key, peer_timeout)


def _on_head_node() -> Any:
    """Return where the directory runs: beside Ray's control service, while that node lives."""
    for node in ray.nodes():
        if "node:__internal_head__" in node["Resources"]:
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            return affinity(node["NodeID"], soft=True)
    return "DEFAULT"
