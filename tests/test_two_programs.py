"""Programs that run at the same time, with the same address and port."""

import pytest

JOB = """
import os, sys, time, torch.multiprocessing as mp
from pathlib import Path
import torch.distributed.rpc as rpc

job, how = sys.argv[1:]

def wait_for(*names, seconds):
    end = time.monotonic() + seconds
    while not all(Path(name).exists() for name in names) and time.monotonic() < end:
        time.sleep(0.05)

def take_turns(rank):
    # first a's rank 0 and b's rank 1, which must not meet
    if f"{job}{rank}" in ("a0", "b1"):
        Path(f"{job}{rank}").touch()
    else:
        wait_for("a0", "b1", seconds=60)
        wait_for("joined", seconds=6)

def whose():
    return job

def run(rank, times=1):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
    for _ in range(times):
        take_turns(rank)
        rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
        Path("joined").touch()
        other = f"w{1 - rank}"
        for _ in range(20):
            assert rpc.rpc_sync(other, whose) == job
        rpc.shutdown()
    print(f"{job}{rank} is done\\n", end="", flush=True)  # one write, as ranks share a pipe

def nested(_):
    child = mp.get_context("spawn").Process(target=run, args=(1,))
    child.start()
    run(0)
    child.join()
    assert child.exitcode == 0

if __name__ == "__main__":
    if how == "spawn":
        mp.spawn(run, (2,), nprocs=2)
    elif how == "nested":
        mp.spawn(nested, nprocs=1)
    else:
        ranks = [mp.get_context("spawn").Process(target=run, args=(rank,)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert [rank.exitcode for rank in ranks] == [0, 0]
"""

RANK = """
import os, sys, torch, torch.multiprocessing as mp
import torch.distributed.rpc as rpc

rank = int(sys.argv[1])

def run(rank):
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29501")
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    assert rpc.rpc_sync(f"w{1 - rank}", torch.add, args=(torch.ones(1), 1)) == 2
    rpc.shutdown()
    print(f"rank {rank} is done", flush=True)

if __name__ == "__main__":
    if rank == 0:
        child = mp.get_context("spawn").Process(target=run, args=(0,))
        child.start()
        child.join()
        assert child.exitcode == 0
    else:
        run(rank)
"""

SECONDS = 200.0  # each program starts several processes, which all import torch

pytestmark = pytest.mark.timeout(2 * SECONDS)


@pytest.mark.parametrize(
    "how",
    ["spawn", *(pytest.param(how, marks=pytest.mark.slow) for how in ("processes", "nested"))],
)
def test_programs_that_start_their_ranks_do_not_meet(ray_cluster, start, script, how):
    path = script(JOB)
    runs = [start("-m", "rayrpc", "run", path, job, how) for job in "ab"]
    for run, job in zip(runs, "ab", strict=True):
        assert run.end(SECONDS) == 0, run.output
        assert {f"{job}{rank} is done" for rank in range(2)} <= set(run.output.splitlines())


@pytest.mark.slow
def test_programs_with_one_rank_each_meet(ray_cluster, start, script):
    # as in torch's tutorial of a parameter server; one rank is a child, the other the program
    path = script(RANK)
    runs = [start("-m", "rayrpc", "run", path, str(rank)) for rank in range(2)]
    for run in runs:
        assert run.end(SECONDS) == 0, run.output
