"""The metrics of a worker: what is recorded, and what records it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

__all__ = ["METRICS", "Metric", "Sink"]


class Metric(NamedTuple):
    """A metric; each has the labels ``group`` and ``worker``, too.

    Args:
        kind (str): "counter", "gauge" or "histogram".
        description (str): for people.
        labels (tuple[str, ...]): names.
        boundaries (tuple[float, ...]): of a histogram.
    """

    kind: str
    description: str
    labels: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()


_CALL = ("function", "caller")
_SECONDS = tuple(base * 10.0**power for power in range(-4, 3) for base in (1, 3))
METRICS = {
    "rayrpc_calls_made": Metric("counter", "Calls that the worker has sent."),
    "rayrpc_calls_served": Metric("counter", "Calls that have ended at the worker.", _CALL),
    "rayrpc_call_errors": Metric("counter", "Those of them that raised an error.", _CALL),
    "rayrpc_call_seconds": Metric(
        "histogram", "Seconds from a call's arrival until its function has ended.", _CALL, _SECONDS
    ),
    "rayrpc_sent_bytes": Metric("counter", "Bytes that the worker has sent, by way.", ("way",)),
    "rayrpc_open_calls": Metric("gauge", "Calls of the worker that wait for their replies."),
    "rayrpc_busy_slots": Metric("gauge", "Slots of the worker that run functions."),
    "rayrpc_queued_calls": Metric("gauge", "Calls that wait for one of the worker's slots."),
    "rayrpc_rrefs_owned": Metric("gauge", "RRefs that the worker owns, and others hold."),
    "rayrpc_rrefs_held": Metric("gauge", "References to other workers' values."),
    "rayrpc_members": Metric("gauge", "Members of the group, as far as the worker knows."),
    "rayrpc_joins": Metric("counter", "Members that have joined while the worker was one."),
    "rayrpc_leaves": Metric("counter", "Members that have left or died meanwhile."),
}


class Sink(Protocol):
    """Takes what metrics have become; Ray's metrics are one."""

    def record(self, name: str, values: Sequence[float], labels: dict[str, str]) -> None:
        """Record a metric of METRICS.

        Args:
            name: its name.
            values: what a counter has grown by, what a gauge is, or the values for a histogram.
            labels: all of them.
        """
