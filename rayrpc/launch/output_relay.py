"""The actor that collects output on a node where the driver is not, and hands it on.

The driver calls ``read`` again and again.  A call says that the texts of the one before are shown;
only then the collector reads on.  Torch is never imported here.
"""

from __future__ import annotations

import queue

import ray

from rayrpc._transports.ray.raylet_watch import end_with_raylet
from rayrpc.launch.collector import Collector
from rayrpc.launch.display import Text

__all__ = ["CONCURRENCY_GROUPS", "OutputRelay"]

CONCURRENCY_GROUPS = {"read": 1, "system": 2}


class OutputRelay:
    """Collect what the workers of this actor's node print.

    Args:
        by_line (bool), count (int): see ``Collector``.
    """

    def __init__(self, by_line: bool, count: int) -> None:
        end_with_raylet()
        self._batches: queue.SimpleQueue[list[Text]] = queue.SimpleQueue()
        self._shown: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._given = False
        self._collector = Collector(self._deliver, by_line, count)

    def __repr__(self) -> str:
        return "rayrpc.OutputRelay"

    def _deliver(self, batch: list[Text]) -> None:
        self._batches.put(batch)
        self._shown.get()

    @ray.method(concurrency_group="system")
    def address(self) -> str:
        """Return the path of the collector's socket."""
        return self._collector.address

    @ray.method(concurrency_group="read")
    def read(self) -> list[Text]:
        """Note that the texts of the call before are shown; wait for the next ones."""
        if self._given:
            self._shown.put(None)
        batch = self._batches.get()
        self._given = True
        return batch

    @ray.method(concurrency_group="system")
    def ask_stacks(self) -> None:
        """Have all workers write where they are."""
        self._collector.ask_stacks()
