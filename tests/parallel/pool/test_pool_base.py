"""What all pools have: sizes that are refused, and pools of a user's own."""

import queue
import threading

import pytest
from pool_targets import double

from rayrpc.parallel.pool import BasePool, P2PPool, Pool, PoolStates, ThreadPool


@pytest.mark.parametrize("kind", [BasePool, Pool, ThreadPool])
def test_wrong_sizes_are_refused(kind, ray_cluster):
    with pytest.raises(ValueError, match="processes=0"):
        kind(0)
    with pytest.raises(ValueError, match="maxtasksperchild"):
        kind(1, maxtasksperchild=0)
    with pytest.raises(TypeError, match="initializer"):
        kind(1, initializer=5)


def test_a_p2p_pool_is_a_pool(ray_cluster):
    assert issubclass(P2PPool, Pool) and issubclass(ThreadPool, Pool)
    with P2PPool(1) as pool:
        assert pool.map(double, [1]) == [2]


def test_the_states_have_the_values_of_machin():
    assert [state.value for state in PoolStates] == [0, 1, 2]


class OwnPool(BasePool):
    """A pool of threads that overrides what is documented."""

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


def test_a_subclass_of_the_documented_parts_is_a_pool():
    pool = OwnPool(2)
    assert pool.map(double, range(10)) == [2 * i for i in range(10)]
    pool.close()
    pool.join()
    assert not any(thread.is_alive() for thread in pool._pool)


def test_an_error_of_the_queue_of_results_ends_the_pool():
    class Broken(OwnPool):
        def pool_outqueue_get(self, timeout):
            raise EOFError("cut off")

    pool = Broken(1)
    with pytest.raises(EOFError, match="cut off"):
        pool.apply(double, (1,))
    pool.join()
