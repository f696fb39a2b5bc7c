"""A process outside the cluster takes part through Ray Client."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from conftest import ROOT, Run, python_path

SCRIPT = """
import os, sys, torch
import ray
import rayrpc, rayrpc.errors
import targets
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

def rank_main(rank):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29790")
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    assert rpc.rpc_sync(f"w{1 - rank}", torch.add, args=(torch.ones(3), 2)).tolist() == [3] * 3
    rpc.shutdown()

if __name__ == "__main__":
    mp.spawn(rank_main, nprocs=2)
    rayrpc.start_workers(["carol"])
    big = torch.arange(1e6)
    futures = [rpc.rpc_async("carol", torch.add, args=(big, i)) for i in range(5)]
    for i, future in enumerate(futures):
        result = future.wait()
        result += 1  # writable
        assert torch.equal(result, big + i + 1)
    rpc.rpc_sync("carol", targets.say, args=("carol says hello",))
    print("carol said it", flush=True)
    rref = rpc.remote("carol", targets.Adder, args=(5,))
    assert rref.rpc_sync().add(1) == 6
    ref = ray.put(torch.ones(3))
    assert rpc.rpc_sync("carol", torch.add, args=(ref, 1)).tolist() == [2] * 3
    assert ray.get(rpc.rpc_sync("carol", targets.identity, args=([ref],))[0]).tolist() == [1] * 3
    later = rayrpc.object_ref(rpc.rpc_async("carol", targets.nap, args=(0.2, big)))
    assert torch.equal(ray.get(later), big)
    made = rpc.remote("carol", torch.ones, args=(2,)).object_ref()
    assert rayrpc.as_future(made).wait().tolist() == [1, 1]
    assert rayrpc.rref(made, "carol").rpc_sync().sum() == 2
    # and back: a worker of the cluster calls this process
    assert rpc.rpc_sync("carol", targets.call_on, args=("driver", os.getpid)) == os.getpid()
    back = rpc.rpc_sync("carol", targets.call_on, args=("driver", torch.neg, big))
    assert torch.equal(back, -big)
    try:
        rpc.rpc_sync("carol", targets.kill_me)
    except rayrpc.errors.WorkerDiedError as error:
        print("saw", error)
    rpc.shutdown()
    print("done", flush=True)
"""


@contextlib.contextmanager
def client_server(address: str, folder: Path) -> Iterator[tuple[str, Run]]:
    """Serve Ray Client for a cluster; give the address to connect to, and the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ray.util.client.server", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--mode", "proxy", "--address", address]
    environ = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"  # gRPC's handlers for fork() may break the server
    server = Run(command, environ, folder)
    try:
        server.wait_for("Starting Ray Client server")
        yield f"ray://127.0.0.1:{port}", server
    finally:
        server.process.terminate()
        server.end(60)
        server.close()


def test_a_program_runs_through_ray_client(ray_cluster, tmp_path, start, script):
    path = script(SCRIPT)
    with client_server(ray_cluster, tmp_path) as (address, server):
        run = start(
            "-m",
            "rayrpc",
            "run",
            "--address",
            address,
            path,
            PYTHONPATH=python_path(ROOT, ROOT / "tests"),
            RAY_ADDRESS=None,
        )
        assert run.end() == 0, run.output + server.output
    assert "done" in run.output
    assert "(carol) carol says hello" in run.output.partition("carol said it")[0]
    assert "saw RPC worker 'carol'" in run.output
