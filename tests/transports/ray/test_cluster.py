"""Whether a cluster's control service answers."""

import socket
import time

import ray

from rayrpc._transports.ray import cluster
from rayrpc._transports.ray.cluster import control_service_answers


def test_that_of_a_cluster_that_runs_answers(ray_cluster):
    assert control_service_answers(60)


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
