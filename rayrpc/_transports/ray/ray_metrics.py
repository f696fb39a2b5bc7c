"""Metrics by Ray: at the Prometheus port of each node, and in its Grafana.

Torch is never imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.util import metrics

from rayrpc._protocol.metrics import METRICS

__all__ = ["RayMetrics", "nodes_without_port"]


def nodes_without_port() -> list[str]:
    """Return the addresses of the nodes whose metrics cannot be read."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return [each["NodeManagerAddress"] for each in nodes if each["MetricsExportPort"] <= 0]


class RayMetrics:
    """Record metrics of this process, which must be connected to a cluster, and not by Ray Client.

    Source: ``rayrpc._protocol.metrics.Sink``.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def record(self, name: str, values: Sequence[float], labels: dict[str, str]) -> None:
        """Record a metric; see ``Sink``."""
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self._make(name, tuple(labels))
        kind = METRICS[name].kind
        record = {"counter": "inc", "gauge": "set", "histogram": "observe"}[kind]
        for value in values:
            getattr(made, record)(value, tags=labels)

    def _make(self, name: str, labels: tuple[str, ...]) -> Any:
        metric = METRICS[name]
        if metric.kind == "histogram":
            return metrics.Histogram(name, metric.description, list(metric.boundaries), labels)
        kind = metrics.Counter if metric.kind == "counter" else metrics.Gauge
        return kind(name, metric.description, labels)
