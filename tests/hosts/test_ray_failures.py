"""What follows when Ray's own processes die: those of one node, or the cluster's head."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import eventually
from host_cluster import cluster_of_hosts
from host_maker import why_impossible
from host_ranks import started_ranks

from rayrpc._transports.ray.directory_client import LEAVE_SECONDS

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible"),
]

PEER_TIMEOUT = 5.0
# Ray tells of a node's end within 15 s, and ends all processes 60 s after that of its head; more is
# for machines that are busy.
NODE_SECONDS = 30.0
HEAD_SECONDS = 120.0

SCRIPT = """
import os, sys, time
import torch.multiprocessing as mp
import torch.distributed.rpc as rpc

def nap(seconds):
    time.sleep(seconds)
    return seconds

def work(rank, seconds):
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    rpc.rpc_sync(f"w{1 - rank}", nap, args=(0,))
    print(f"up {rank} {os.getpid()}", flush=True)
    rpc.rpc_sync(f"w{1 - rank}", nap, args=(seconds,), timeout=0)
    rpc.shutdown()
    print("shut down", flush=True)

if __name__ == "__main__":
    mp.spawn(work, args=(float(sys.argv[1]),), nprocs=2)
    print("all work is done", flush=True)
"""
# Rank 0 calls nobody while its host is cut off, and after that.
COMPUTES = """
import os, sys, time
import torch.multiprocessing as mp
import torch.distributed.rpc as rpc

def work(rank):
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    rpc.rpc_sync(f"w{1 - rank}", max, args=(1, 2))
    print(f"up {rank} {os.getpid()}", flush=True)
    if rank == 0:
        time.sleep(600)
    try:
        rpc.rpc_sync("w0", time.sleep, args=(600,), timeout=0)
    except RuntimeError as exc:
        print("lost", exc, flush=True)
    rpc.shutdown()

if __name__ == "__main__":
    mp.spawn(work, nprocs=2)
"""
STARTS = """
import sys, time
import rayrpc as rpc
from rayrpc.errors import ClusterError

rpc.start_workers(["a"])
print("up", flush=True)
sys.stdin.readline()
begin = time.monotonic()
try:
    rpc.start_workers(["b"])
except ClusterError as exc:
    print("error", exc, time.monotonic() - begin < 10, flush=True)
"""


@pytest.fixture
def cluster():
    with cluster_of_hosts(PEER_TIMEOUT) as made:
        yield made


@contextlib.contextmanager
def program(hosts, number, environ, text, *arguments):
    """Run a program on a host by ``rayrpc run``, its ranks on hosts 2 and 3."""
    script = Path(environ["TMPDIR"], "script.py")
    script.write_text(text)
    nodes = ", ".join(
        f"rank{rank}: {{resources: {{node:{hosts.address(2 + rank)}: 0.01}}}}" for rank in (0, 1)
    )
    options = ["--set", f"workers={{{nodes}}}"]
    command = [sys.executable, "-m", "rayrpc", "run", *options, str(script), *arguments]
    process = subprocess.Popen(
        hosts.command(number, *command),
        env={**environ, "MASTER_PORT": "29500"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=10)


def wait_up(process, count):
    """Return the lines that tell that the ranks are up."""
    lines = []
    while len(lines) < count:
        line = process.stdout.readline()
        assert line, "it has ended"
        if line.startswith("up"):
            lines.append(line.split())
    return lines


def finished(process, seconds, line=""):
    """Return the exit status and the output of a program, which gets a line."""
    try:
        output, _ = process.communicate(line, timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"no end in {seconds} s; the output is:\n{process.communicate(timeout=10)[0]}")
    return process.returncode, output


def ended_after(cluster, number, seconds, at, killed, timeout):
    """Run the script, kill some of Ray's programs, and return the exit status and the output.

    Args:
        cluster: the hosts, and the environment.
        number: of the host that runs it.
        seconds: that its calls take.
        at: the host where programs are killed.
        killed: the programs.
        timeout: of the rest of the run.
    """
    hosts, environ = cluster
    with program(hosts, number, environ, SCRIPT, seconds) as process:
        wait_up(process, 2)
        for name in killed:
            assert hosts.kill(at, name)
        return finished(process, timeout)


@pytest.mark.slow
def test_attached_workers_of_a_node_that_ended_are_lost(cluster):
    hosts, environ = cluster
    with started_ranks(hosts, environ, (1, 2, 3)) as (a, b, c):
        c.tell("own w1")
        c.wait_for("owns")
        a.tell("nap w1 100")
        b.tell("nap w2 100")
        c.tell("pass w1 100")
        for rank, word in ((a, "napping"), (b, "napping"), (c, "passing")):
            rank.wait_for(word)
        assert hosts.kill(2, "raylet")
        for rank in (a, b, c):
            line = rank.wait_for("napped", "passed", "error", timeout=NODE_SECONDS)
            assert line.startswith("error") and "'w" in line
        c.tell("fetch")
        assert c.wait_for("fetched", "error").startswith("error")
        a.tell("call w2")
        assert a.wait_for("called", "error") == "called 2"
        for rank in (a, b, c):
            rank.tell("shutdown")
        for rank in (a, c):
            assert rank.wait_for("shut", "error") == "shut down" and rank.end() == 0
        b.wait_for("shut", "error")


def test_hosted_workers_of_a_node_that_ended_end(cluster):
    hosts, _ = cluster
    status, output = ended_after(cluster, 1, "100", 2, ["raylet"], NODE_SECONDS)
    assert status == 1 and "process 0" in output and "its node died" in output
    end = time.monotonic() + NODE_SECONDS
    while left := hosts.commands(2, "ray::"):
        assert time.monotonic() < end, left
        time.sleep(0.2)


@pytest.mark.slow
def test_a_hosted_worker_that_was_cut_off_ends_when_its_cable_is_mended(cluster):
    hosts, environ = cluster
    with program(hosts, 1, environ, COMPUTES) as process:
        wait_up(process, 2)
        hosts.cut(2)
        while not (line := process.stdout.readline()).startswith("lost"):
            assert line, "it has ended"
        assert "'w0'" in line and "has not answered" in line
        hosts.heal(2)
        status, output = finished(process, LEAVE_SECONDS + NODE_SECONDS)
    assert status == 1 and "process 0" in output
    assert "'w0' is no member of its group any more" in output


@pytest.mark.slow
def test_the_directory_moves_when_the_node_of_the_head_ends(cluster):
    status, output = ended_after(cluster, 2, "25", 1, ["raylet"], HEAD_SECONDS)
    assert status == 0 and output.count("shut down") == 2, output


@pytest.mark.slow
def test_a_program_whose_node_ended_says_so(cluster):
    status, output = ended_after(cluster, 1, "100", 1, ["raylet"], NODE_SECONDS)
    assert status == 1
    assert "the Ray node of the process that started it has ended" in output


@pytest.mark.slow
def test_without_the_control_service_calls_and_shutdown_go_on(cluster):
    hosts, environ = cluster
    with started_ranks(hosts, environ, (1, 2, 3)) as ranks:
        ranks[0].tell("nap w1 15")
        ranks[0].wait_for("napping")
        assert hosts.kill(1, "gcs_server")
        ranks[1].tell("call w2")
        assert ranks[1].wait_for("called", "error") == "called 2"
        assert ranks[0].wait_for("napped", "error") == "napped 15.0"
        for rank in ranks:
            rank.tell("shutdown")
        for rank in ranks:
            assert rank.wait_for("shut", "error") == "shut down"
            assert rank.end() == 0


@pytest.mark.slow
def test_without_the_control_service_a_run_ends_with_its_own_status(cluster):
    status, output = ended_after(cluster, 1, "10", 1, ["gcs_server"], NODE_SECONDS)
    assert status == 0 and "all work is done" in output, output


@pytest.mark.slow
def test_without_the_control_service_no_worker_starts(cluster):
    hosts, environ = cluster
    with program(hosts, 2, environ, STARTS) as process:
        wait_up(process, 1)
        assert hosts.kill(1, "gcs_server")
        status, output = finished(process, NODE_SECONDS, "\n")
        assert "the control service (GCS)" in output and output.rstrip().endswith("True"), output
        assert status == 0


@pytest.mark.slow
def test_what_needs_the_directory_fails_when_the_head_is_lost(cluster):
    hosts, environ = cluster
    with started_ranks(hosts, environ, (2, 3)) as ranks:
        for name in ("gcs_server", "raylet"):
            assert hosts.kill(1, name)
        ranks[0].tell("call w1")
        assert ranks[0].wait_for("called", "error") == "called 2"
        assert eventually(lambda: not hosts.commands(1, "ray::DirectoryActor"))
        for rank in ranks:
            rank.tell("shutdown")
        for rank in ranks:
            line = rank.wait_for("shut", "error", timeout=4 * PEER_TIMEOUT)
            assert line.startswith("error GroupError") and "directory" in line


@pytest.mark.slow
def test_when_the_head_is_lost_ray_ends_all_with_a_message(cluster):
    status, output = ended_after(cluster, 2, "200", 1, ["gcs_server", "raylet"], HEAD_SECONDS)
    assert status not in (0, None) and "GCS" in output, output
