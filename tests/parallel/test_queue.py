"""A queue between processes."""

import multiprocessing
import threading

import pytest
import ray
import torch

from rayrpc import errors
from rayrpc.parallel.pickle import loads
from rayrpc.parallel.pool import Pool
from rayrpc.parallel.queue import SimpleQueue

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def queue(ray_cluster):
    queue = SimpleQueue(ctx=SPAWN, copy_tensor=True)
    yield queue
    queue.close()


def test_first_in_first_out(queue):
    assert queue.empty()
    queue.put(1)
    queue.quick_put({"t": torch.ones(2), "f": lambda x: x + 1})
    assert not queue.empty() and queue.get() == 1
    got = queue.quick_get(timeout=60)
    assert torch.equal(got["t"], torch.ones(2)) and got["f"](1) == 2


def test_get_waits_until_the_timeout(queue):
    for timeout in (0, 0.1):
        with pytest.raises(TimeoutError, match=f"{timeout} s"):
            queue.get(timeout)
    threading.Timer(0.2, queue.put, (5,)).start()
    assert queue.get(timeout=60) == 5


def echo(queue, answers):
    while (got := queue.get()) is not None:
        answers.put(got)


def test_several_processes_may_put_and_get(queue):
    answers = SimpleQueue(copy_tensor=True)
    with Pool(2) as pool:
        readers = [pool.apply_async(echo, (queue, answers)) for _ in range(2)]
        writers = [
            threading.Thread(target=lambda n=n: [queue.put((n, i)) for i in range(50)])
            for n in range(3)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)
        for _ in readers:
            queue.put(None)
        for reader in readers:
            reader.get(60)
    got = sorted(answers.get(60) for _ in range(150))
    assert got == [(n, i) for n in range(3) for i in range(50)] and answers.empty()
    answers.close()


def test_a_spawned_process_may_put(queue):
    process = SPAWN.Process(target=queue_child, args=(queue,))
    process.start()
    assert queue.get(60) == "from the child"
    process.join(60)
    assert process.exitcode == 0


def queue_child(queue):
    queue.put("from the child")


def fill(queue):
    queue.get().fill_(3)


@pytest.fixture
def queue_of_references(ray_cluster):
    queue = SimpleQueue()
    yield queue
    queue.close()


def test_tensors_by_reference_share_memory_with_a_worker(queue_of_references):
    tensor = torch.zeros(4)
    with Pool(1, is_copy_tensor=False, share_method="cpu") as pool:
        done = pool.apply_async(fill, (queue_of_references,))
        queue_of_references.put(tensor)
        done.get(60)
    assert float(tensor.sum()) == 12


def test_memory_of_another_node_is_an_error(queue_of_references, monkeypatch):
    def cannot_load(data):
        loads(data)  # else the memory stays
        raise RuntimeError("unable to open shared memory object")

    queue_of_references.put(torch.zeros(4))
    monkeypatch.setattr("rayrpc.parallel.queue._node", lambda: "another")
    monkeypatch.setattr("rayrpc.parallel.queue.loads", cannot_load)
    with pytest.raises(errors.SerializationError, match="copy_tensor=True"):
        queue_of_references.get()


def test_a_ray_task_may_put(queue):
    @ray.remote(num_cpus=0)
    def put(queue):
        queue.put("from a task")

    ray.get(put.remote(queue))
    assert queue.get(60) == "from a task"


@pytest.mark.slow  # forks beside gRPC's threads, which may hold any lock
def test_a_forked_process_is_refused_with_advice(queue):
    def child(pipe):
        try:
            queue.put(1)
        except errors.ClusterError as exc:
            pipe.send(str(exc))

    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(there,))
    process.start()
    assert here.poll(60) and "spawn" in here.recv()
    process.join(60)
