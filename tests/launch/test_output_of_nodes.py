"""What workers of another node print; the cluster is simulated here."""

import pytest
from conftest import ROOT, python_path

SCRIPT = """
import os, sys
from nodes import simulated_cluster
import rayrpc as rpc

def say(count):
    for number in range(count):
        print("line", number)
    print("end", end="")

def rank_main(rank):
    say(3000)
    sys.stdout.flush()
    os._exit(3)

if __name__ == "__main__":
    with simulated_cluster() as cluster:
        cluster.add_node(num_cpus=2, resources={"far": 2}, object_store_memory=100 << 20)
        resources = {"resources": {"far": 1}}
        rpc.configure(address=cluster.address, workers={"rank*": resources})
        rpc.start_workers(["w"], resources=resources)
        for number in range(10):
            rpc.rpc_sync("w", say, args=(500,))
            print(f"<returned {number}>", flush=True)
        rpc.shutdown()
        try:
            rpc.spawn(rank_main, nprocs=1)
        except Exception as exc:
            print(f"<{type(exc).__name__}>", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_another_nodes_output_is_shown_as_that_of_this_one(start, script):
    path = python_path(ROOT, ROOT / "tests")
    run = start(script(SCRIPT), RAY_ADDRESS=None, PYTHONPATH=path)
    assert run.end(180) == 0, run.output[-3000:]
    parts = run.output.split("<")
    for number in range(10):
        told = parts[number].rpartition(">")[2]
        assert told.count("line ") == 500 and told.endswith("(w) end"), told[-300:]
    assert parts[11].startswith("ProcessExitedException")
    assert parts[10].count("line ") == 3000 and "line 2999\nend" in parts[10], parts[10][-300:]
