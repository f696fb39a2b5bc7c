"""Whether a cluster's control service answers."""

import socket
import sys
import time

import pytest
import ray

from rayrpc import errors
from rayrpc._transports.ray import cluster, local_lease
from rayrpc._transports.ray.cluster import control_service_answers
from rayrpc.config import Settings


def test_that_of_a_cluster_that_runs_answers(ray_cluster):
    assert control_service_answers(60)


def test_a_dashboard_that_is_not_installed_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.dashboard.optional_deps", None)
    monkeypatch.setattr(local_lease, "_start_local_cluster", None)  # none is started
    with pytest.raises(errors.ClusterError, match=r"pip install 'rayrpc\[dashboard\]'"):
        local_lease.join_local(Settings(dashboard=True), True)


def test_a_port_that_takes_connections_is_no_answer(ray_cluster, monkeypatch):
    """It takes them while its process is being ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())

        class Context:
            gcs_address = address

        monkeypatch.setattr(ray, "get_runtime_context", Context)
        begin = time.monotonic()
        assert not control_service_answers(0.3)
        assert time.monotonic() - begin < 30
        monkeypatch.setenv("RAY_USE_TLS", "1")
        assert control_service_answers(60)
    monkeypatch.delenv("RAY_USE_TLS")
    assert not cluster._answers(("127.0.0.1", 1), 0.3)
