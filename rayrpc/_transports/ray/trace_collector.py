"""The actor to which the workers of a traced run give what they have recorded, as they leave.

    worker ──clock()──> collector      how their clocks differ
    worker ──add(part)──> collector <──parts()── the process that has started the run

Torch is never imported here.
"""

from __future__ import annotations

from typing import Any

import ray

from rayrpc._concurrency.clocks import Clock, clock, measure
from rayrpc._transports.ray import ray_api
from rayrpc._transports.ray.raylet_watch import end_with_raylet

__all__ = ["TraceCollector", "collected", "give", "start_collector"]

START_SECONDS = 60.0
ANSWER_SECONDS = 10.0
PART_SECONDS = 60.0


class TraceCollector:
    """Keep the parts of a trace, as bytes."""

    def __init__(self) -> None:
        end_with_raylet()
        self._parts: list[tuple[bytes, Clock]] = []

    def ready(self) -> None:
        """Return once the actor runs."""

    def clock(self) -> tuple[str, float]:
        """Return the clock of this host; see ``clocks``."""
        return clock()

    def add(self, part: bytes, of_worker: Clock) -> None:
        """Keep a part, and how its worker's clock differs from this host's."""
        self._parts.append((part, of_worker))

    def parts(self) -> list[tuple[bytes, Clock]]:
        """Return all parts."""
        return self._parts


def start_collector(name: str, namespace: str) -> Any:
    """Start the collector, on this node if it has room; return its handle, which keeps it alive.

    Args:
        name, namespace: of the actor.
    """
    remote: Any = ray.remote
    here = ray_api.on_this_node(soft=True)
    options = remote(TraceCollector).options
    actor = options(name=name, namespace=namespace, num_cpus=0, scheduling_strategy=here).remote()
    ray_api.get(actor.ready.remote(), timeout=START_SECONDS)
    return actor


def give(name: str, namespace: str, part: bytes) -> None:
    """Give a part to the collector.

    Args:
        name, namespace: of the collector.
        part: of this worker.

    Raises:
        ValueError: the collector has ended.
        RayError: it cannot be reached in time.
    """
    actor = ray_api.get_actor(name, namespace=namespace)
    there = measure(lambda: ray_api.get(actor.clock.remote(), timeout=ANSWER_SECONDS))
    here = Clock(-there.offset, there.error)  # from the collector's clock, which is the trace's
    ray_api.get(actor.add.remote(part, here), timeout=PART_SECONDS)


def collected(actor: Any) -> list[tuple[bytes, Clock]]:
    """Return all parts that a collector has, and how their clocks differ from its own."""
    parts: list[tuple[bytes, Clock]] = ray_api.get(actor.parts.remote(), timeout=PART_SECONDS)
    return parts
