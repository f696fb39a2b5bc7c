"""A worker whose host has ended is started again on another one."""

import subprocess
import sys

import pytest
from host_cluster import cluster_of_hosts
from host_maker import why_impossible

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible"),
]

PEER_TIMEOUT = 5.0
END_SECONDS = 120.0
# A host has four CPUs.
PROGRAM = """
import socket, sys, time
import rayrpc as rpc

def fill(number):
    resources = {"num_cpus": 4, "resources": {f"node:10.88.0.{number}": 0.01}}
    return rpc.start_workers([f"filler{number}"], resources=resources)

def note_start():
    rpc.api.started_on = socket.gethostname()

fill(1)
second = fill(2)
rpc.start_workers(["ps"], resources={"num_cpus": 4}, max_restarts=2, on_start=note_start)
rref = rpc.remote("ps", socket.gethostname)
first = rref.to_here()
print("up", first, flush=True)
second.stop()
sys.stdin.readline()
end = time.monotonic() + 90
host = first
while host == first and time.monotonic() < end:  # it may serve until its death is known
    try:
        host = rpc.rpc_sync("ps", lambda: rpc.api.started_on, timeout=60)
    except rpc.errors.CallError as exc:
        print(exc, flush=True)
    time.sleep(0.2)
print("again", host, flush=True)
try:
    rref.to_here()
except rpc.errors.WorkerDiedError as exc:
    print("rref", "joined again since" in str(exc), flush=True)
rpc.shutdown()
"""


@pytest.mark.parametrize("what", ["raylet", "host"])
def test_it_comes_back_on_another_host(what):
    with cluster_of_hosts(PEER_TIMEOUT) as (hosts, environ):
        process = subprocess.Popen(
            hosts.command(1, sys.executable, "-c", PROGRAM),
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            lines = []
            while not lines or not lines[-1].startswith("up"):
                assert process.stdout is not None
                lines.append(process.stdout.readline())
                assert lines[-1], "".join(lines)
            assert lines[-1] == "up host3\n"
            if what == "host":
                hosts.crash(3)
            else:
                assert hosts.kill(3, "raylet")
            output, _ = process.communicate("\n", timeout=END_SECONDS)
            assert process.returncode == 0, output
            assert "again host2\n" in output and "rref True\n" in output, output
        finally:
            process.kill()
            process.communicate(timeout=10)
