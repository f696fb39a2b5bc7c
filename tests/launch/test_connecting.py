"""A process connects to the group of a program that ``rayrpc run`` has started."""

import os

import pytest
from launching import connected, runner

from rayrpc import errors

# 29500, torch's default, may be in use by other programs
ADDRESS = "localhost:29578"
PROGRAM = """
import os, sys, time
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

def step(n):
    return n + 1

def main(rank, path):
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2)
    while rank == 0 and not os.path.exists(path):
        time.sleep(0.05)
    print("names", [info.name for info in rpc.api._get_current_rpc_agent().get_worker_infos()])
    rpc.shutdown()  # rank 1 serves in it
    print("ended", rank, flush=True)

if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29578"}
    mp.spawn(main, (sys.argv[1],), nprocs=2)
"""


@pytest.mark.usefixtures("ray_cluster")
def test_a_guest_calls_the_ranks_of_a_run(start, script, tmp_path):
    path = tmp_path / "done"
    program = runner(start, script)(PROGRAM, str(path))
    group = connected(ADDRESS)
    try:
        assert [info.name for info in group.workers()] == ["rank0", "rank1"]
        assert group.rpc_all("rank*", os.getppid).wait().keys() == {"rank0", "rank1"}
        with pytest.raises(errors.GroupError, match="can only be started into a dynamic group"):
            group.start_workers(["more"])
        group.rpc_sync("rank1", os.mkdir, args=(str(path),))
        assert program.end(100) == 0, program.output  # the guest is there still
        assert program.output.count("names ['rank0', 'rank1']") == 2
        with pytest.raises(errors.WorkerDiedError, match="has left the group"):
            group.rpc_sync("rank0", os.getpid)
    finally:
        group.shutdown()
