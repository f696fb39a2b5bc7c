"""Gatherings and barriers inside calls, while other workers wait in shutdown."""

SCRIPT = """
import os, sys, torch.multiprocessing as mp
import torch.distributed.rpc as rpc
from torch.distributed.rpc import api

NAMES = ["w0", "w1", "w2"]

def barrier():
    api._barrier(NAMES)

def gather():
    return sorted(api._all_gather(rpc.get_worker_info().id).items())

async def gather_in_a_loop():
    return gather()

def run(rank):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29641")
    # a barrier in a call leaves no thread for that of others
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=1)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    others = [name for name in NAMES if name != f"w{rank}"]
    if rank == 0:  # it leads gatherings; w1 is in shutdown, w2 at a barrier of its own
        for _ in range(5):
            futures = [rpc.rpc_async(name, barrier, timeout=60) for name in others]
            barrier()
            [future.wait() for future in futures]
    if rank != 1:
        api._barrier(["w0", "w2"])
    if rank == 2:
        all_of = [(name, number) for number, name in enumerate(NAMES)]
        for func in (gather, gather_in_a_loop):
            rrefs = [rpc.remote(name, func, timeout=60) for name in others]
            assert gather() == all_of
            assert [rref.to_here(60) for rref in rrefs] == [all_of] * 2
    rpc.shutdown()
    print("done", flush=True)

if __name__ == "__main__":
    mp.spawn(run, nprocs=3)
"""


def test_barriers_and_gatherings_run_in_calls_while_others_shut_down(ray_cluster, start, script):
    run = start("-m", "rayrpc", "run", script(SCRIPT), RAYRPC_INIT_TIMEOUT="90")
    assert run.end() == 0, run.output
    assert run.output.count("done") == 3
