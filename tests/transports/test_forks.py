"""Received tensors in forked children of a worker, as a program sees them."""

import pytest

LOADER = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset

import rayrpc as rpc


def make(value):
    return torch.full((100, 5000), float(value))


class Rows(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return 100

    def __getitem__(self, index):
        row = self.data[index].clone()
        self.data[index] = -1  # the worker's own
        return row


def main():
    rpc.configure(transport=sys.argv[1])
    rpc.start_workers(["other"])
    received = rpc.rpc_sync("other", make, (1,))
    rows = Rows(received)
    batches = iter(DataLoader(
        rows, num_workers=2, prefetch_factor=1, multiprocessing_context="fork"
    ))
    first = next(batches)
    print("the parent has", received.unique().tolist(), flush=True)
    del received, rows.data
    others = [rpc.rpc_sync("other", make, (value,)) for value in range(2, 20)]
    seen = torch.cat([first, *batches])
    print("the workers had", seen.unique().tolist(), len(seen), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()
"""


@pytest.mark.slow  # forks beside gRPC's threads, which may hold any lock
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("transport", ["direct", "ray"])
def test_a_data_loaders_workers_keep_what_they_inherited(start, script, transport):
    one = start(script(LOADER), transport)
    assert one.end(100) == 0, one.output
    assert "the parent has [1.0]" in one.output, one.output
    assert "the workers had [1.0] 100" in one.output, one.output


GARBAGE = """
import gc
import multiprocessing
import os
import sys

import ray

import rayrpc as rpc
from rayrpc.parallel.queue import SimpleQueue


class Node:
    pass


def make_garbage():
    # handles of actors and objects, which send messages when they are deleted
    for _ in range(3):
        node = Node()
        node.itself, node.queue, node.ref = node, SimpleQueue(copy_tensor=True), ray.put(1)
        node.queue.put(1)


def allocate():
    # as a handler of another library, which runs in the child before that of rayrpc
    if where == "handler":
        gc.set_threshold(1, 1, 1)
        [[] for _ in range(10_000)]


def collect(pipe):
    gc.collect()
    for use in (lambda: rpc.init_rpc("child", rank=0, world_size=1), lambda: ray.put(1)):
        try:
            use()
        except RuntimeError as exc:
            pipe.send(str(exc))


where = sys.argv[1]
os.register_at_fork(after_in_child=allocate)
gc.set_threshold(10**9)  # the parent collects nothing
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
rpc.init_rpc("parent", rank=0, world_size=1)
make_garbage()
for _ in range(3):
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=collect, args=(there,))
    child.start()
    for _ in range(2):
        assert here.poll(60) and "forked" in here.recv()
    child.join(60)
    assert child.exitcode == 0 and gc.isenabled()
    queue = SimpleQueue(copy_tensor=True)
    queue.put(5)
    assert queue.get(60) == 5
rpc.shutdown()
print("the parent is connected")
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["target", "handler"])
def test_what_a_forked_child_deletes_does_not_break_its_parents_connection(
    ray_cluster, start, script, where
):
    run = start(script(GARBAGE), where)
    assert run.end() == 0, run.output
    assert "the parent is connected" in run.output
