"""The calls of a pool, of processes and of threads."""

import multiprocessing
import pickle
import sys
import threading

import pytest
import torch
from pool_targets import add, double, fail, make_file, wait_for

from rayrpc import errors
from rayrpc.parallel.pickle import dumps
from rayrpc.parallel.pool import Pool, ThreadPool


@pytest.fixture(scope="module", params=[Pool, ThreadPool])
def pool(request, ray_cluster):
    with request.param(2) as pool:
        yield pool


def test_apply_returns_the_result(pool):
    assert pool.apply(double, (torch.ones(3),)).sum() == 6
    assert pool.apply(add, [1], {"z": 2}) == 3
    assert pool.apply(max, (1, 2)) == 2 and pool.size() == 2


def test_apply_async_calls_back_and_returns_the_outcome(pool):
    seen = []
    result = pool.apply_async(add, (1,), {"y": 1}, seen.append)
    assert result.get(60) == 2 and seen == [2] and result.successful()
    failed = pool.apply_async(fail, (5,), error_callback=seen.append)
    with pytest.raises(KeyError, match="5"):
        failed.get(60)
    assert isinstance(seen[1], KeyError) and not failed.successful()


@pytest.mark.parametrize("chunksize", [None, 1, 3])
def test_map_and_starmap_keep_the_order(pool, chunksize):
    assert pool.map(double, range(10), chunksize) == [2 * i for i in range(10)]
    assert pool.map_async(double, (i for i in range(3)), chunksize).get(60) == [0, 2, 4]
    pairs = [(i, i) for i in range(10)]
    assert pool.starmap(add, pairs, chunksize) == [2 * i for i in range(10)]
    assert pool.starmap_async(add, pairs, chunksize).get(60)[9] == 18
    assert pool.map(double, []) == []


def test_imap_iterates_over_the_results(pool):
    results = pool.imap(double, range(5))
    assert results.next(timeout=60) == 0 and list(results) == [2, 4, 6, 8]
    assert sorted(pool.imap_unordered(double, range(5))) == [0, 2, 4, 6, 8]
    assert pool.imap(double, range(5), chunksize=2) == [0, 2, 4, 6, 8]
    assert sorted(pool.imap_unordered(double, range(5), 2)) == [0, 2, 4, 6, 8]


def test_an_error_of_the_iterable_is_raised_by_the_call(pool):
    def broken():
        yield 1
        raise OSError("no more")

    for call in (pool.map_async, pool.imap, pool.imap_unordered):
        with pytest.raises(OSError, match="no more"):
            call(double, broken())


def test_an_error_of_an_element_is_raised_by_its_map(pool):
    with pytest.raises(KeyError):
        pool.map(fail, range(4))
    results = pool.imap(lambda x: 1 // x, [1, 0, 1])
    assert next(results) == 1
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert next(results) == 1


def test_lambdas_and_local_functions_may_be_tasks(pool):
    kept = torch.ones(10)

    def local(x):
        return float(torch.sum(x + kept))

    assert pool.map(local, [torch.ones(10) * i for i in range(3)]) == [10, 20, 30]
    assert pool.starmap(lambda x, y: x * y, [(2, 3), (4, 5)]) == [6, 20]


def test_wrong_arguments_are_refused(pool):
    with pytest.raises(TypeError, match="callable"):
        pool.apply("max", (1, 2))
    with pytest.raises(ValueError, match="chunksize"):
        pool.map(double, range(3), 0)


def test_get_raises_when_the_timeout_is_over(pool, tmp_path):
    path = str(tmp_path / "go-on")
    result = pool.apply_async(wait_for, (path,))
    with pytest.raises(multiprocessing.TimeoutError):
        result.get(0.01)
    make_file(path)
    assert result.get(60) is None


def test_a_pool_cannot_be_pickled(pool):
    for dump in (pickle.dumps, dumps):
        with pytest.raises(NotImplementedError, match="cannot be passed"):
            dump(pool)


def test_several_threads_may_call_at_a_time(pool):
    results = {}

    def call(number):
        handles = [pool.apply_async(add, (number, i)) for i in range(100)]
        results[number] = [handle.get(60) for handle in handles]

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    assert results == {n: [n + i for i in range(100)] for n in range(4)}


def leave(x):
    sys.exit(3)


def test_a_task_that_exits_fails_and_its_worker_goes_on(pool):
    with pytest.raises(errors.CallError, match=r"SystemExit\(3\)"):
        pool.apply(leave, (2,))
    assert pool.map(double, [1, 2]) == [2, 4] and pool.size() == 2


def test_a_refused_call_leaves_no_result_behind(pool):
    before = dict(pool._cache)
    for wrong in (("max", (1, 2)), (double, 5), (double, (1,), 5)):
        with pytest.raises(TypeError):
            pool.apply(*wrong)
    with pytest.raises(TypeError):
        pool.map(double, 5)
    assert pool._cache == before
