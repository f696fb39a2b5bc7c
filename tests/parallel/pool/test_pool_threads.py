"""Pools of threads."""

import threading
import time

import pytest
from pool_targets import double, fail, where

from rayrpc.parallel.pool import ThreadPool


@pytest.fixture(scope="module")
def threads():
    with ThreadPool(2) as pool:
        yield pool


def test_tasks_get_the_callers_own_objects(threads):
    seen = []
    threads.map(seen.append, range(5))
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert where(0)[1] not in {ident for _, ident in threads.map(where, range(10), 1)}


def test_threads_are_replaced_after_their_number_of_tasks():
    with ThreadPool(1, maxtasksperchild=1) as pool:
        threads = [pool.apply(threading.current_thread) for _ in range(3)]
        assert len(set(threads)) == 3


def test_an_error_of_the_initializer_ends_the_pool():
    pool = ThreadPool(1, fail, ("setup",))
    with pytest.raises(KeyError, match="setup"):
        pool.apply_async(double, (1,)).get(60)
    pool.join()


def test_close_lets_tasks_end():
    pool = ThreadPool(2)
    results = [pool.apply_async(time.sleep, (0.05,)) for _ in range(4)]
    pool.close()
    pool.join()
    assert all(result.ready() for result in results)
