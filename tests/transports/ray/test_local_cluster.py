"""The process of a local cluster: leases, without Ray, and the start of Ray."""

import logging
import socket
import threading
import time

import pytest
from conftest import ROOT, eventually, python_path
from limits import no_descriptors

from rayrpc._transports.ray import local_cluster, worker_forks
from rayrpc._transports.ray.local_cluster import LocalCluster

WAIT_SECONDS = 60.0


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A running cluster; it ends with its leases."""
    monkeypatch.setattr(local_cluster, "LAST_LEASE_SECONDS", 0.01)
    cluster = LocalCluster(tmp_path / "c.sock")
    thread = threading.Thread(target=cluster.run)
    thread.start()
    yield cluster
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    cluster._selector.close()
    cluster._listener.close()


def new_client():
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(WAIT_SECONDS)
    return client


def test_without_descriptors_leases_are_kept_and_clients_wait(cluster, caplog):
    caplog.set_level(logging.WARNING, "rayrpc")
    cluster.announce("ready there")
    with new_client() as first, new_client() as second:
        first.connect(str(cluster._path))
        assert first.recv(20) == b"ready there\n"
        with no_descriptors():
            second.connect(str(cluster._path))
            assert eventually(lambda: "could not accept a client" in caplog.text)
            assert len(cluster._leases) == 1
        assert second.recv(20) == b"ready there\n"
    assert caplog.text.count("could not accept a client") == 1


def test_a_client_that_cannot_be_watched_is_closed_and_the_others_keep_their_leases(
    cluster, monkeypatch
):
    cluster.announce("ready there")
    register = cluster._selector.register

    def fail_once(*args):
        monkeypatch.setattr(cluster._selector, "register", register)
        raise OSError("no space")

    with new_client() as first, new_client() as second, new_client() as third:
        first.connect(str(cluster._path))
        assert first.recv(20) == b"ready there\n"
        monkeypatch.setattr(cluster._selector, "register", fail_once)
        second.connect(str(cluster._path))
        assert second.recv(20) == b""
        third.connect(str(cluster._path))
        assert third.recv(20) == b"ready there\n"
        assert len(cluster._leases) == 2


def test_it_ends_when_its_folder_is_gone(cluster, tmp_path):
    with new_client() as client:
        client.connect(str(cluster._path))
        assert eventually(lambda: cluster._leases != set())
        cluster._path.unlink()
        cluster._lock_path.unlink(missing_ok=True)
        tmp_path.rmdir()


LATE = """
import os, sys
from pathlib import Path

import psutil
from ray._private import node

from rayrpc._transports.ray import local_cluster, worker_forks

start = node.Node.__init__
failures = [bool(int(starts)) for starts in sys.argv[1]]


def start_late(self, *args, **kwargs):
    if failures:
        if failures.pop(0):
            start(self, *args, **kwargs)
        raise Exception("The current node timed out during startup.")
    start(self, *args, **kwargs)


class Cluster:
    def announce(self, answer):
        names = [child.name() for child in psutil.Process().children(recursive=True)]
        print(answer, "with", names.count("raylet"), flush=True)


node.Node.__init__ = start_late
local_cluster._start_ray(Cluster(), Path(os.environ["RAY_TMPDIR"]), "names", 1, False, 0)
"""


@pytest.mark.parametrize(
    ("failures", "answer", "nodes"),
    [("10", "ready", 1), ("000", "failed Exception: The current node", 0)],
)
def test_ray_is_started_again_where_it_did_not_start_in_its_own_time(
    start, script, failures, answer, nodes
):
    """An attempt that failed may have started processes; ``1`` stands for one that did."""
    one = start(script(LATE), failures, PYTHONPATH=python_path(ROOT), RAY_ADDRESS=None)
    assert one.end() == 0, one.output
    assert answer in one.output
    assert f"with {nodes}" in one.output


def told(client, text):
    client.sendall(text)
    return client.recv(20)


def test_a_cluster_that_is_kept_stays_without_leases(cluster, monkeypatch):
    cluster.announce("ready there")
    with new_client() as client:
        client.connect(str(cluster._path))
        assert client.recv(20) == b"ready there\n"
        assert told(client, b"release\n") == b"old\n"
        assert told(client, b"keep 0\n") == b"new\n"
        assert told(client, b"keep 0\n") == b"old\n"
        assert told(client, b"hm\n") == b"unknown\n"
    time.sleep(0.1)  # more than LAST_LEASE_SECONDS
    with new_client() as client:
        client.connect(str(cluster._path))
        assert client.recv(20) == b"ready there\n"
        assert told(client, b"release\n") == b"new\n"


def test_a_cluster_that_is_kept_for_a_time_ends_then(cluster):
    cluster.announce("ready there")
    with new_client() as client:
        client.connect(str(cluster._path))
        assert client.recv(20) == b"ready there\n"
        assert told(client, b"keep 0.3\n") == b"new\n"
    begin = time.monotonic()
    assert eventually(lambda: not cluster._path.exists(), WAIT_SECONDS)
    assert time.monotonic() > begin + 0.2


@pytest.mark.process
def test_a_cluster_that_ends_leaves_the_fork_server_of_the_next_one_alone(tmp_path, monkeypatch):
    """Ray takes seconds to end, when another cluster may have started."""
    monkeypatch.setattr(worker_forks, "LIGHT", ())
    forks = tmp_path / "c.forks"
    with worker_forks.forked_workers(forks):
        cluster = LocalCluster(tmp_path / "c.sock")
        assert cluster._remove_socket()
        assert not forks.exists()
        cluster._selector.close()
        cluster._listener.close()
        forks.touch()  # the next one's
    assert forks.exists()
