"""``rayrpc run --trace FILE``: the calls of all ranks, and of the program itself, in one file."""

import json

import pytest
from launching import runner

RANKS = """
import os
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

def double(x):
    return 2 * x

def main(rank):
    for run in range(2):  # two runs of one group
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2)
        if rank == 0:
            rpc.rpc_sync("rank1", double, args=(torch.ones(3),))
            rpc.rpc_async("rank1", double, args=(run,)).wait()
        rpc.shutdown()

if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    os.chdir("/")
    mp.spawn(main, nprocs=2)
"""

ALONE = """
import torch.distributed.rpc as rpc

def double(x):
    return 2 * x

rpc.init_rpc("alone", rank=0, world_size=1)
print(rpc.rpc_sync("alone", double, args=(21,)))
"""  # it ends without a shutdown


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_of_ranks_is_traced(start, script, tmp_path):
    run = runner(start, script)(RANKS, options=("--trace", "trace.json"))
    assert run.end() == 0, run.output
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [name.split()[0] for name in names.values()] == ["rank0", "rank1"] * 2
    assert len(names) == 4
    slices = [e for e in events if e["ph"] == "X"]
    calls = [e for e in slices if e["name"] == "double -> rank1"]
    assert len(calls) == 4 and {e["args"]["state"] for e in calls} == {"ok"}
    assert len([e for e in slices if e["name"] == "double"]) == 4
    keys = {e["args"]["key"] for e in calls}
    arrows = [e for e in events if e["ph"] in "sf" and e["id"][:-1] in keys]
    assert len(arrows) == 4 * 4
    ends = {(e["id"], e["ph"]): names[e["pid"]].split()[0] for e in arrows}
    for (key, phase), worker in ends.items():
        assert worker == ("rank0" if (phase == "s") == key.endswith(">") else "rank1")


@pytest.mark.usefixtures("ray_cluster")
def test_a_program_that_joins_itself_and_just_ends_is_traced(start, script, tmp_path):
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    run = runner(start, script)(ALONE, options=("--trace", "trace.json"), **environ)
    assert run.end() == 0 and "42" in run.output, run.output
    found = json.loads((tmp_path / "trace.json").read_text())
    names = [e["name"] for e in found["traceEvents"] if e["ph"] == "X"]
    assert "double -> alone" in names and "double" in names
    assert found["otherData"]["dropped_calls"] == {"alone": 0}


def test_a_trace_without_a_cluster_is_refused(start, script):
    run = runner(start, script)(ALONE, options=("--trace", "t.json", "--address", "127.0.0.1:1"))
    assert run.end() == 1
    assert "no Ray cluster answers at '127.0.0.1:1'" in run.output
    assert "Traceback" not in run.output
