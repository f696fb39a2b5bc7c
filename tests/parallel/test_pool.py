"""Pools of processes and of threads, on a real cluster."""

import functools
import multiprocessing
import os
import pickle
import queue
import sys
import threading
import time
from multiprocessing.pool import MaybeEncodingError, RemoteTraceback

import pytest
import torch
from conftest import eventually

import rayrpc as rpc
from rayrpc import errors
from rayrpc.config import WorkerResources
from rayrpc.launch.worker_pool import WorkerPool
from rayrpc.parallel.pickle import dumps
from rayrpc.parallel.pool import (
    BasePool,
    CtxPool,
    CtxPoolStorage,
    CtxThreadPool,
    P2PPool,
    Pool,
    PoolStates,
    ThreadPool,
    proxy_ctx_caller,
)

pytestmark = pytest.mark.usefixtures("ray_cluster")


def double(x):
    return 2 * x


def add(x, y=0, z=0):
    return x + y + z


def fail(x):
    raise KeyError(x)


def where(_):
    return os.getpid(), threading.get_ident()


def with_context(ctx, x, y=0):
    return ctx, x + y


@pytest.fixture(scope="module")
def pool(ray_cluster):
    with Pool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def threads():
    with ThreadPool(2) as pool:
        yield pool


@pytest.fixture(params=["processes", "threads"])
def any_pool(request):
    return request.getfixturevalue({"processes": "pool", "threads": "threads"}[request.param])


# -- what all do ----------------------------------------------------------------------------------


class TestCalls:
    def test_apply(self, any_pool):
        assert any_pool.apply(double, (torch.ones(3),)).sum() == 6
        assert any_pool.apply(add, [1], {"z": 2}) == 3
        assert any_pool.apply(max, (1, 2)) == 2 and any_pool.size() == 2

    def test_apply_async(self, any_pool):
        seen = []
        result = any_pool.apply_async(add, (1,), {"y": 1}, seen.append)
        assert result.get(30) == 2 and seen == [2] and result.successful()
        failed = any_pool.apply_async(fail, (5,), error_callback=seen.append)
        with pytest.raises(KeyError, match="5"):
            failed.get(30)
        assert isinstance(seen[1], KeyError) and not failed.successful()

    @pytest.mark.parametrize("chunksize", [None, 1, 3])
    def test_map(self, any_pool, chunksize):
        assert any_pool.map(double, range(10), chunksize) == [2 * i for i in range(10)]
        assert any_pool.map_async(double, (i for i in range(3)), chunksize).get(30) == [0, 2, 4]
        pairs = [(i, i) for i in range(10)]
        assert any_pool.starmap(add, pairs, chunksize) == [2 * i for i in range(10)]
        assert any_pool.starmap_async(add, pairs, chunksize).get(30)[9] == 18
        assert any_pool.map(double, []) == []

    def test_imap(self, any_pool):
        results = any_pool.imap(double, range(5))
        assert results.next(timeout=30) == 0 and list(results) == [2, 4, 6, 8]
        assert sorted(any_pool.imap_unordered(double, range(5))) == [0, 2, 4, 6, 8]
        assert any_pool.imap(double, range(5), chunksize=2) == [0, 2, 4, 6, 8]
        assert sorted(any_pool.imap_unordered(double, range(5), 2)) == [0, 2, 4, 6, 8]

    def test_what_an_iterable_raises_is_raised_by_the_call(self, any_pool):
        def broken():
            yield 1
            raise OSError("no more")

        for call in (any_pool.map_async, any_pool.imap, any_pool.imap_unordered):
            with pytest.raises(OSError, match="no more"):
                call(double, broken())

    def test_a_map_raises_what_an_element_did(self, any_pool):
        with pytest.raises(KeyError):
            any_pool.map(fail, range(4))
        results = any_pool.imap(lambda x: 1 // x, [1, 0, 1])
        assert next(results) == 1
        with pytest.raises(ZeroDivisionError):
            next(results)
        assert next(results) == 1

    def test_lambdas_and_local_functions(self, any_pool):
        kept = torch.ones(10)

        def local(x):
            return float(torch.sum(x + kept))

        assert any_pool.map(local, [torch.ones(10) * i for i in range(3)]) == [10, 20, 30]
        assert any_pool.starmap(lambda x, y: x * y, [(2, 3), (4, 5)]) == [6, 20]

    def test_wrong_arguments(self, any_pool):
        with pytest.raises(TypeError, match="callable"):
            any_pool.apply("max", (1, 2))
        with pytest.raises(ValueError, match="chunksize"):
            any_pool.map(double, range(3), 0)

    def test_a_timeout(self, any_pool):
        result = any_pool.apply_async(time.sleep, (0.3,))
        with pytest.raises(multiprocessing.TimeoutError):
            result.get(0.01)
        assert result.get(30) is None

    def test_a_pool_stays_where_it_is(self, any_pool):
        for dump in (pickle.dumps, dumps):
            with pytest.raises(NotImplementedError, match="cannot be passed"):
                dump(any_pool)

    def test_many_tasks_from_many_threads(self, any_pool):
        results = {}

        def call(number):
            handles = [any_pool.apply_async(add, (number, i)) for i in range(100)]
            results[number] = [handle.get(60) for handle in handles]

        callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(60)
        assert results == {n: [n + i for i in range(100)] for n in range(4)}


@pytest.mark.parametrize("kind", [BasePool, Pool, ThreadPool])
def test_wrong_sizes_are_refused(kind):
    with pytest.raises(ValueError, match="processes=0"):
        kind(0)
    with pytest.raises(ValueError, match="maxtasksperchild"):
        kind(1, maxtasksperchild=0)
    with pytest.raises(TypeError, match="initializer"):
        kind(1, initializer=5)


# -- processes ------------------------------------------------------------------------------------


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
    counted = Counted()
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


def test_an_object_with_a_state_is_new_in_each_task(pool):
    assert pool.map(Adder(), [1] * 6, 1) == [1] * 6
    assert pool.map(functools.partial(add, 1), [1, 2]) == [2, 3]


def test_an_exception_has_its_traceback_with_it(pool):
    with pytest.raises(KeyError) as caught:
        pool.apply(fail, ("x",))
    assert isinstance(caught.value.__cause__, RemoteTraceback)
    assert "in fail" in str(caught.value.__cause__)


def test_what_cannot_be_pickled_is_an_error_of_its_task(pool):
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


def test_what_cannot_be_unpickled_is_an_error_of_its_task(pool):
    with pytest.raises(OSError, match="not here"):
        pool.apply(double, (NotHere(),))
    assert pool.map(double, [1, 2]) == [2, 4]


def crash(x):
    if x == 2:
        os._exit(1)
    return x


def leave(x):
    sys.exit(3)


def test_a_worker_that_dies_is_an_error_and_is_replaced(pool):
    start = time.monotonic()
    with pytest.raises(errors.WorkerDiedError, match="process died"):
        pool.apply(crash, (2,))
    assert time.monotonic() - start < 3
    assert eventually(lambda: pool.size() == 2, 30)
    results = pool.map_async(crash, range(4), 1)
    with pytest.raises(errors.WorkerDiedError, match="worker-"):
        results.get(30)
    assert eventually(lambda: pool.size() == 2, 30)
    assert pool.map(crash, [0, 1, 3, 4], 1) == [0, 1, 3, 4]


def test_a_task_that_exits_is_an_error(any_pool):
    with pytest.raises(errors.CallError, match=r"SystemExit\(3\)"):
        any_pool.apply(leave, (2,))
    assert any_pool.map(double, [1, 2]) == [2, 4] and any_pool.size() == 2


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
        assert before.get(20) == 8
        make(path)
        for each in (*busy, *many, *waits, *behind):
            each.get(40)


def test_a_call_that_fails_leaves_nothing_to_wait_for(any_pool):
    before = dict(any_pool._cache)
    for wrong in (("max", (1, 2)), (double, 5), (double, (1,), 5)):
        with pytest.raises(TypeError):
            any_pool.apply(*wrong)
    with pytest.raises(TypeError):
        any_pool.map(double, 5)
    assert any_pool._cache == before


MAIN = """
import sys
from rayrpc.parallel.pool import Pool

model, limits = None, {}


def load(value):
    global model
    model = value
    limits["most"] = 2 * value


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


def use(x):
    return x + model, limits["most"], even(x)


with Pool(1, load, (10,)) as pool:
    assert pool.map(use, [1, 2]) == [(11, 20, False), (12, 20, True)]
    assert pool.apply(lambda: model) == 10
    model = 5  # changed here, so it is changed there
    assert pool.apply(use, (1,)) == (6, 20, False)

    def even(n):
        return "new"

    assert pool.apply(use, (1,)) == (6, 20, "new")
print("done")
"""


def test_functions_of_a_script_share_their_globals(start, script):
    run = start(script(MAIN))
    assert run.end() == 0, run.output
    assert "done" in run.output


OPEN = """
from rayrpc.parallel.pool import Pool

pool = Pool(1)
assert pool.apply(max, (1, 2)) == 2
pool.apply_async(__import__("time").sleep, (60,))
print("done")
"""


def test_a_program_may_end_with_a_pool_open(start, script):
    run = start(script(OPEN))
    assert run.end(60) == 0, run.output
    said = [line for line in run.output.splitlines() if "(raylet)" not in line]
    assert said[-1:] == ["done"] and not any("rror" in line for line in said), run.output


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


def test_results_that_cannot_travel_harm_nobody():
    with Pool(1, maxtasksperchild=2) as pool:  # its worker sends the last one when it ends
        with pytest.raises(TypeError, match="two"):
            pool.apply(raise_two, (1,))
        with pytest.raises(MaybeEncodingError, match="no pickle"):
            pool.apply(lambda _: NoName(), (1,))
        assert pool._error is None


def wait_for(path):
    end = time.monotonic() + 30
    while not os.path.exists(path):
        assert time.monotonic() < end, "nobody made the file"
        time.sleep(0.005)


def make(path):
    with open(path, "w"):
        pass


def test_short_tasks_do_not_keep_each_other_waiting(pool, tmp_path):
    # the two may be given to one worker together: the second is taken back and goes to the other
    for number in range(3):
        path = str(tmp_path / str(number))
        for seconds in [0.05] * 2 + [0] * 300:  # so that all wait at first
            pool.apply_async(time.sleep, (seconds,))
        waits = pool.apply_async(wait_for, (path,))
        pool.apply_async(make, (path,))
        waits.get(40)


def test_workers_are_laid_out_by_the_nodes_cpus(monkeypatch):
    large, small, head = (digit * 56 for digit in "abc")
    cpus = {large: 6, small: 2, head: 0}
    nodes = [{"NodeID": n, "Alive": True, "Resources": {"CPU": c}} for n, c in cpus.items()]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    made = WorkerPool()
    try:
        chosen = [made._strategy(f"w{i}", WorkerResources()).node_id for i in range(8)]
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


_setting = threading.local()


def set_up(value):
    _setting.value = value


def set_before():
    return _setting.value


def setting(ctx):
    return ctx, CtxPoolStorage.storage, _setting.value, os.getpid()


def test_initializers_contexts_and_the_number_of_tasks():
    with CtxPool(1, set_up, (5,), maxtasksperchild=2, worker_contexts=["mine"]) as pool:
        seen = [pool.apply(setting) for _ in range(3)]
    assert [each[:3] for each in seen] == [("mine", "mine", 5)] * 3
    pids = [each[3] for each in seen]
    assert pids[0] == pids[1] != pids[2]


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


def test_terminate_does_not():
    pool = Pool(1)
    results = [pool.apply_async(time.sleep, (60,)) for _ in range(2)]
    time.sleep(0.2)
    pool.terminate()
    for result in results:
        with pytest.raises(errors.CallError, match="terminated"):
            result.get(5)
    pool.join()
    assert "TERMINATE" in repr(pool)


# -- tensors in shared memory ---------------------------------------------------------------------


def fill(tensor, value):
    tensor.fill_(value)
    return tensor


def test_tensors_are_shared():
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


# -- contexts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CtxPool, CtxThreadPool])
def test_contexts(kind):
    with pytest.raises(ValueError, match="not equal to the number"):
        kind(2, worker_contexts=[0, 1, 2])
    with kind(2, set_up, (3,), worker_contexts=["a", "b"]) as pool:
        xs = list(range(10))
        assert sorted(x for _, x in pool.map(with_context, xs)) == xs
        assert {ctx for ctx, _ in pool.imap(with_context, xs)} <= {"a", "b"}
        assert pool.starmap(with_context, [(1, 2)])[0][1] == 3
        assert pool.apply(with_context, (1,), {"y": 4})[1] == 5
        assert pool.apply(lambda ctx: set_before()) == 3
    assert CtxThreadPool(1).apply(with_context, (1,)) == (None, 1)


def test_proxy_ctx_caller(monkeypatch):
    monkeypatch.setattr(CtxPoolStorage, "storage", "here")
    data = dumps(lambda ctx, x, y: (ctx, x, y))
    assert proxy_ctx_caller(data, (1,), {"y": 2}) == ("here", 1, 2)
    assert proxy_ctx_caller((data, (1,), {"y": 2})) == ("here", 1, 2)


# -- the others -----------------------------------------------------------------------------------


def test_names_of_the_same():
    assert issubclass(P2PPool, Pool) and issubclass(ThreadPool, Pool)
    assert [state.value for state in PoolStates] == [0, 1, 2]
    with P2PPool(1) as pool:
        assert pool.map(double, [1]) == [2]


def test_threads_see_the_same_objects(threads):
    seen = []
    threads.map(seen.append, range(5))
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert where(0)[1] not in {ident for _, ident in threads.map(where, range(10), 1)}


def test_threads_are_replaced_and_told_of():
    with ThreadPool(1, maxtasksperchild=1) as pool:
        threads = [pool.apply(threading.current_thread) for _ in range(3)]
        assert len(set(threads)) == 3
    pool = ThreadPool(1, fail, ("setup",))
    with pytest.raises(KeyError, match="setup"):
        pool.apply_async(double, (1,)).get(10)
    pool = ThreadPool(2)
    results = [pool.apply_async(time.sleep, (0.05,)) for _ in range(4)]
    pool.close()
    pool.join()
    assert all(result.ready() for result in results)


class OwnPool(BasePool):
    """A pool as a user may build one: of the documented parts."""

    def setup_queues(self):
        self.tasks, self.results = queue.SimpleQueue(), queue.SimpleQueue()

    def repopulate_pool(self):
        while len(self._pool) < self._processes:
            args = (self.tasks.get, self.results.put, self._initializer, self._initargs)
            thread = threading.Thread(target=self.worker, args=args, daemon=True)
            self._pool.append(thread)
            thread.start()

    def maintain_pool(self):
        pass

    def pool_inqueue_put(self, obj):
        self.tasks.put(obj)

    def pool_outqueue_get(self, timeout):
        try:
            return self.results.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError from None

    def join_workers(self):
        for thread in self._pool:
            thread.join()

    def terminate_workers(self):
        for _ in self._pool:
            self.tasks.put(None)


def test_a_pool_of_a_users_own():
    pool = OwnPool(2)
    assert pool.map(double, range(10)) == [2 * i for i in range(10)]
    pool.close()
    pool.join()
    assert not any(thread.is_alive() for thread in pool._pool)


def test_a_pool_that_is_cut_off_says_so():
    class Broken(OwnPool):
        def pool_outqueue_get(self, timeout):
            raise EOFError("cut off")

    pool = Broken(1)
    with pytest.raises(EOFError, match="cut off"):
        pool.apply(double, (1,))
