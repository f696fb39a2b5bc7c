"""Pools of processes, on a real cluster."""

import functools
import os
import threading
import time
from multiprocessing.pool import (  # type: ignore[attr-defined]  # typeshed leaves them out
    MaybeEncodingError,
    RemoteTraceback,
)
from typing import Any

import pytest
import torch
from conftest import eventually
from pool_targets import add, double, fail, make_file, wait_for, where

import rayrpc as rpc
from rayrpc import errors
from rayrpc.config import WorkerResources
from rayrpc.launch.worker_pool import WorkerPool
from rayrpc.parallel.pool import (
    Pool,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def pool(ray_cluster):
    with Pool(2) as pool:
        yield pool


def test_workers_are_other_processes_with_one_thread_for_tasks(pool):
    places = set(pool.map(where, range(20), 1))
    assert os.getpid() not in {pid for pid, _ in places} and len(places) <= 2


class Counted:
    """Counts where it is unpickled."""

    made = 0

    def __setstate__(self, state):
        Counted.made += 1


def made_at(_):
    return os.getpid(), Counted.made


def test_a_function_is_sent_to_each_worker_once(pool):
    counted: Any = Counted()
    counted.state = 1

    def made(_):
        assert counted is not None
        return made_at(None)

    before = dict(pool.map(made_at, range(20), 1))
    after = [each for _ in range(5) for each in pool.map(made, range(10), 1)]
    assert all(count <= before.get(pid, 0) + 1 for pid, count in after)


class Adder:
    def __init__(self):
        self.total = 0

    def __call__(self, x):
        self.total += x
        return self.total


def test_a_callable_object_is_unpickled_for_each_task(pool):
    assert pool.map(Adder(), [1] * 6, 1) == [1] * 6
    assert pool.map(functools.partial(add, 1), [1, 2]) == [2, 3]


def test_an_exception_brings_its_traceback(pool):
    with pytest.raises(KeyError) as caught:
        pool.apply(fail, ("x",))
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in fail" in str(caught.value.__cause__)


def test_an_error_of_pickling_is_one_of_its_task(pool):
    results = pool.imap(lambda i: threading.Lock() if i == 3 else i, range(6))
    got = []
    for _ in range(6):
        try:
            got.append(next(results))
        except MaybeEncodingError as exc:
            got.append("lock" in str(exc))
    assert got == [0, 1, 2, True, 4, 5]
    with pytest.raises(errors.SerializationError, match="lock"):
        pool.apply(double, (threading.Lock(),))
    assert pool.map(double, [1, 2]) == [2, 4]


class NotHere:
    """Cannot be unpickled where a worker is."""

    def __reduce__(self):
        return _only_in, (os.getpid(),)


def _only_in(pid):
    if os.getpid() != pid:
        raise OSError("not here")
    return NotHere()


def test_an_error_of_unpickling_is_one_of_its_task(pool):
    with pytest.raises(OSError, match="not here"):
        pool.apply(double, (NotHere(),))
    assert pool.map(double, [1, 2]) == [2, 4]


def crash(x):
    if x == 2:
        os._exit(1)
    return x


def test_a_worker_that_dies_fails_its_tasks_and_is_replaced(pool):
    with pytest.raises(errors.WorkerDiedError, match="process died"):
        pool.apply_async(crash, (2,)).get(60)
    assert eventually(lambda: pool.size() == 2)
    results = pool.map_async(crash, range(4), 1)
    with pytest.raises(errors.WorkerDiedError, match="worker-"):
        results.get(60)
    assert eventually(lambda: pool.size() == 2)
    assert pool.map(crash, [0, 1, 3, 4], 1) == [0, 1, 3, 4]


_pushed = []


def push(i):
    _pushed.append(i)
    return _pushed


def grow(tensor, by):
    tensor += by
    return tensor


def test_tasks_share_no_objects(pool):
    # short ones are given, and answered, several at a time
    time.sleep(0.1)
    sizes = [len(each) for each in pool.map(push, range(500), 1)]
    assert sorted(sizes)[:2] in ([1, 1], [1, 2]) and max(sizes) < 501
    assert sum(sizes) == sum(sum(range(1, n + 1)) for n in _tops(sizes))
    ones = torch.ones(3)
    results = pool.starmap(grow, [(ones, 1)] * 500, 1)
    assert all(each.tolist() == [2, 2, 2] for each in results) and ones.sum() == 3


def _tops(sizes):
    """Return how long the list of each of the two workers became."""
    longest = max(sizes)
    return [longest, len(sizes) - longest]


def test_a_result_does_not_wait_for_a_long_task_behind_it(pool, tmp_path):
    for number in range(3):
        path = str(tmp_path / f"later-{number}")
        busy = [pool.apply_async(time.sleep, (0.05,)) for _ in range(2)]
        many = [pool.apply_async(double, (1,)) for _ in range(300)]
        before = pool.apply_async(double, (4,))
        waits = [pool.apply_async(wait_for, (path,)) for _ in range(2)]
        behind = [pool.apply_async(double, (1,)) for _ in range(300)]
        assert before.get(60) == 8
        make_file(path)
        for each in (*busy, *many, *waits, *behind):
            each.get(60)


OPEN = """
from rayrpc.parallel.pool import Pool

pool = Pool(1)
assert pool.apply(max, (1, 2)) == 2
pool.apply_async(__import__("time").sleep, (60,))
print("done")
"""


def test_a_program_may_end_with_a_pool_open(start, script):
    run = start(script(OPEN))
    assert run.end(120) == 0, run.output
    lines = [line for line in run.output.splitlines() if "(raylet)" not in line]
    assert lines[-1:] == ["done"] and not any("rror" in line for line in lines), run.output


class TwoArguments(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


def raise_two(_):
    raise TwoArguments(1, 2)


class NoName:
    def __repr__(self):
        raise ValueError("no repr")

    def __reduce__(self):
        raise RuntimeError("no pickle")


def test_a_result_that_cannot_be_pickled_does_not_end_the_worker():
    with Pool(1, maxtasksperchild=2) as pool:  # its worker sends the last one when it ends
        with pytest.raises(TypeError, match="two"):
            pool.apply(raise_two, (1,))
        with pytest.raises(MaybeEncodingError, match="no pickle"):
            pool.apply(lambda _: NoName(), (1,))
        assert pool._error is None


def test_a_task_does_not_wait_for_the_one_before_it_in_a_batch(pool, tmp_path):
    # the two may be given to one worker together: the second is taken back and goes to the other
    for number in range(3):
        path = str(tmp_path / str(number))
        for seconds in [0.05] * 2 + [0] * 300:  # so that all wait at first
            pool.apply_async(time.sleep, (seconds,))
        waits = pool.apply_async(wait_for, (path,))
        pool.apply_async(make_file, (path,))
        waits.get(60)


def test_workers_are_laid_out_by_the_nodes_cpus(monkeypatch):
    large, small, head = (digit * 56 for digit in "abc")
    cpus = {large: 6, small: 2, head: 0}
    nodes = [{"NodeID": n, "Alive": True, "Resources": {"CPU": c}} for n, c in cpus.items()]
    made = WorkerPool()
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    try:
        strategies = [made._strategy(f"w{i}", WorkerResources()) for i in range(8)]
        assert not any(each.soft for each in strategies)  # Ray keeps none without resources
        chosen = [each.node_id for each in strategies]
        assert chosen.count(large) == 6 and chosen.count(small) == 2
        assert made._strategy("w8", WorkerResources(num_gpus=1)) == "SPREAD"
    finally:
        made.stop()


def test_a_pool_beside_rpc_and_in_a_pool():
    options = rpc.TensorPipeRpcBackendOptions(init_method="ray://beside-a-pool")
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        with Pool(1) as pool:
            assert rpc.rpc_sync("alone", double, (1,)) == 2

            def inner(x):
                with Pool(1) as own:
                    return own.apply(double, (x,))

            assert pool.apply(inner, (4,)) == 8
            assert rpc.rpc_sync("alone", double, (2,)) == 4
    finally:
        rpc.shutdown()


def test_an_initializer_that_fails_ends_the_pool(caplog):
    pool = Pool(1, fail, ("setup",))
    with pytest.raises(KeyError, match="setup"):
        pool.apply(double, (1,))
    with pytest.raises(KeyError, match="setup"):
        pool.apply(double, (1,))
    pool.join()
    assert "a pool ends because its workers do" in caplog.text


def test_close_lets_tasks_end():
    pool = Pool(1)
    results = [pool.apply_async(time.sleep, (0.1,)) for _ in range(3)]
    with pytest.raises(ValueError, match="still running"):
        pool.join()
    pool.close()
    with pytest.raises(ValueError, match="CLOSE"):
        pool.apply(double, (1,))
    pool.join()
    assert all(result.successful() for result in results) and pool.size() == 0


def test_terminate_fails_tasks_that_have_not_ended():
    pool = Pool(1)
    results = [pool.apply_async(time.sleep, (60,)) for _ in range(2)]
    assert repr(pool) == "<Pool state=RUN size=1 pending=2>"
    time.sleep(0.2)
    pool.terminate()
    for result in results:
        with pytest.raises(errors.CallError, match="terminated"):
            result.get(60)
    pool.join()
    assert "TERMINATE" in repr(pool)


# -- tensors in shared memory ---------------------------------------------------------------------


def fill(tensor, value):
    tensor.fill_(value)
    return tensor


def test_tensors_by_reference_share_memory():
    with pytest.raises(RuntimeError, match='Invalid share method: "None"'):
        Pool(1, is_copy_tensor=False)
    tensors = [torch.zeros(4).share_memory_(), torch.zeros(4)]
    with Pool(1, is_copy_tensor=False, share_method="cpu") as pool:
        back = pool.starmap(fill, [(tensor, i + 1) for i, tensor in enumerate(tensors)])
        assert [float(tensor.sum()) for tensor in tensors] == [4, 8]
        back[0].zero_()
        assert float(tensors[0].sum()) == 0, "the same memory came back"
        local = torch.ones(2)
        assert pool.apply(lambda: float(local.sum())) == 2
        with pytest.raises(KeyError):
            pool.apply(fail, (1,))
        with pytest.raises(TypeError, match="lock"):
            pool.apply(double, (threading.Lock(),))
