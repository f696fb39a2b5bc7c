"""Arguments of ranks on other nodes; the nodes are simulated on this machine."""

import pytest
from conftest import ROOT, python_path

pytestmark = [pytest.mark.process, pytest.mark.slow]

TWO_NODES = """
from nodes import simulated_cluster
import torch
import rayrpc as rpc
from rayrpc.errors import PlacementError

def main(rank, tensor):
    tensor[rank] = rank + 1

if __name__ == "__main__":
    with simulated_cluster() as cluster:
        cluster.add_node(num_cpus=2, resources={"far": 2}, object_store_memory=100 << 20)
        rpc.configure(address=cluster.address)
        shared = torch.zeros(4).share_memory_()
        rpc.spawn(main, args=(shared,), nprocs=4)
        print("ranks wrote", shared.tolist(), flush=True)

        rpc.configure(address=cluster.address, workers={"rank1": {"resources": {"far": 1}}})
        try:
            rpc.spawn(main, args=(shared,), nprocs=2)
        except PlacementError as exc:
            print("refused:", exc, flush=True)
        plain = torch.zeros(4)
        rpc.spawn(main, args=(plain,), nprocs=2)
        print("rank 1 wrote", plain.tolist()[1:], flush=True)
"""


def test_shared_memory_keeps_ranks_on_this_node_and_other_tensors_are_copied(start, script):
    path = python_path(ROOT, ROOT / "tests")
    one = start(script(TWO_NODES), PYTHONPATH=path, RAY_ADDRESS="")
    assert one.end(240) == 0, one.output
    assert "ranks wrote [1.0, 2.0, 3.0, 4.0]" in one.output, one.output
    assert "refused: Rank 1 cannot be called with a Tensor in shared memory" in one.output
    assert "of 2 ranks run on other nodes" in one.output
    assert "rank 1 wrote [0.0, 0.0, 0.0]" in one.output
