"""Threads on demand, and slots."""

import threading

import pytest
from conftest import eventually
from interrupting import strikes

from rayrpc._concurrency import threads
from rayrpc._concurrency.threads import SingleThread, Slots, ThreadCache


@pytest.fixture
def cache():
    made = ThreadCache("test", soft_limit=4)
    yield made
    made.close()


@pytest.fixture
def start_one(monkeypatch):
    """Have a cache start one thread, and no second one where the first is slow to start."""

    def start(cache):
        with monkeypatch.context() as patch:
            patch.setattr(threads, "STALL_SECONDS", 60.0)
            cache.submit(lambda: None)
            assert eventually(lambda: cache._taken == 1)
            cache._wake_ups.put(None)
            assert eventually(lambda: not cache._is_watching)
        assert eventually(lambda: cache._idle == cache.size)

    return start


def test_tasks_that_follow_one_another_share_threads(cache):
    done = threading.Semaphore(0)
    seen = set()

    def task():
        seen.add(threading.current_thread().name)
        done.release()

    for _ in range(50):
        cache.submit(task)
        assert done.acquire(timeout=60)
    assert len(seen) <= 8  # the soft limit, and some in case a thread was slow to become idle


def test_tasks_that_wait_for_one_another_all_run(cache):
    events = [threading.Event() for _ in range(20)]

    def task(i):
        if i + 1 < len(events):
            assert events[i + 1].wait(60)
        events[i].set()

    for i in range(len(events)):
        cache.submit(lambda i=i: task(i))
    assert events[0].wait(60)


def test_a_burst_of_short_tasks_starts_few_threads(cache):
    done = threading.Semaphore(0)
    for _ in range(2000):
        cache.submit(done.release)
    for _ in range(2000):
        assert done.acquire(timeout=60)
    assert cache.size <= 8


def test_an_error_of_a_task_is_logged_and_ends_no_thread(cache, caplog):
    done = threading.Event()
    cache.submit(lambda: 1 / 0)
    cache.submit(done.set)
    assert done.wait(60)
    assert eventually(lambda: "error in a task of test" in caplog.text)


def test_threads_end_when_idle_or_closed():
    cache = ThreadCache("short", idle_seconds=0.05)
    cache.submit(lambda: None)
    assert eventually(lambda: cache.size == 0)
    cache.close()
    cache = ThreadCache("closed", idle_seconds=1000.0)
    cache.submit(lambda: None)
    cache.close()
    assert eventually(lambda: cache.size == 0)


@pytest.mark.parametrize("is_idle", [False, True], ids=["no thread is idle", "one is"])
def test_a_task_that_is_queued_runs_whatever_point_of_its_submission_is_interrupted(
    is_idle, start_one
):
    for strike in strikes([threads.__file__]):
        cache = ThreadCache("test", idle_seconds=1000.0 if is_idle else 0.01)
        start_one(cache)
        assert eventually(lambda: cache._idle == cache.size == is_idle)  # noqa: B023
        strike(lambda: cache.submit(lambda: None))  # noqa: B023
        assert eventually(lambda: not cache._tasks), f"after an interrupt at point {strike.number}"  # noqa: B023
        cache.close()
    assert strike.number > 5


class TestSingleThread:
    def test_it_starts_once(self):
        runs, go = [], threading.Event()
        single = SingleThread(lambda: (runs.append(1), go.wait(60)), "single", "nothing runs")
        for _ in range(3):
            single.start()
        assert single.is_running
        go.set()
        assert eventually(lambda: single.thread is not None and not single.thread.is_alive())
        assert runs == [1]

    def test_it_starts_later_where_the_system_starts_none(self, unstartable, caplog):
        done = threading.Event()
        single = SingleThread(done.set, "single", "nothing runs")
        unstartable.add("single")
        single.start()
        assert not single.is_running and "nothing runs, because" in caplog.text
        unstartable.clear()
        single.start()
        assert done.wait(60) and single.is_running

    def test_an_interrupt_of_its_start_leaves_none_or_one(self):
        for strike in strikes([threads.__file__]):
            runs, go = [], threading.Event()
            single = SingleThread(lambda: (runs.append(1), go.wait(60)), "single", "nothing runs")  # noqa: B023
            strike(single.start)
            single.start()
            assert eventually(lambda: single.thread is not None)  # noqa: B023
            go.set()
            assert eventually(lambda: "single" not in [t.name for t in threading.enumerate()])
            assert runs == [1], f"after an interrupt at point {strike.number}"
        assert strike.number > 10


class TestWithoutThreads:
    """While the system starts no thread, as at a limit of processes."""

    def test_a_task_waits_and_runs_when_a_thread_starts_again(
        self, cache, start_one, unstartable, caplog
    ):
        start_one(cache)
        go, went, done = threading.Event(), threading.Event(), threading.Semaphore(0)
        cache.submit(lambda: (went.set(), go.wait(60)))
        assert went.wait(60)
        unstartable.add("test")
        for _ in range(3):
            cache.submit(done.release)
        assert eventually(lambda: "tasks of test wait" in caplog.text)
        assert not done.acquire(blocking=False)
        assert eventually(lambda: cache.size == 1)  # a thread counts while it is being started
        unstartable.clear()
        assert all(done.acquire(timeout=60) for _ in range(3))  # the one thread is still busy
        go.set()

    def test_a_task_is_taken_by_a_thread_that_becomes_free(self, cache, start_one, unstartable):
        go, went, done = threading.Event(), threading.Event(), threading.Event()
        ran_in = []
        start_one(cache)
        cache.submit(lambda: (ran_in.append(threading.get_ident()), went.set(), go.wait(60)))
        assert went.wait(60)
        unstartable.add("test")
        cache.submit(lambda: (ran_in.append(threading.get_ident()), done.set()))
        go.set()
        assert done.wait(60) and ran_in[0] == ran_in[1]
        assert eventually(lambda: cache.size == 1)  # a thread counts while it is being started

    def test_the_first_task_is_refused_and_not_kept(self, cache, unstartable):
        unstartable.add("test")
        ran = []
        with pytest.raises(RuntimeError, match="can't start"):
            cache.submit(lambda: ran.append("refused"))
        assert cache.size == 0
        unstartable.clear()
        done = threading.Event()
        cache.submit(lambda: (ran.append("taken"), done.set()))
        assert done.wait(60) and ran == ["taken"]

    def test_a_watchdog_that_could_not_start_starts_with_the_next_task(self, cache, unstartable):
        first, second = threading.Event(), threading.Event()
        unstartable.add("test-watchdog")
        cache.submit(first.set)
        assert first.wait(60) and cache._watchdog is None
        unstartable.clear()
        cache.submit(second.set)
        assert second.wait(60) and cache._watchdog is not None

    def test_no_task_is_refused_once_the_watchdog_has_started(self, cache, unstartable):
        cache.start()
        done = threading.Event()
        unstartable.add("test")
        cache.submit(done.set)
        assert not done.wait(0.05)
        unstartable.clear()
        assert done.wait(60)

    def test_a_refused_task_keeps_no_slot(self, cache, unstartable):
        slots = Slots(2, cache)
        unstartable.add("test")
        with pytest.raises(RuntimeError):
            slots.submit(lambda: None)
        assert slots.free == 2
        assert slots.enter() and slots.enter()
        done = threading.Event()
        slots.submit(done.set)
        slots.leave()  # no thread runs the waiting task
        assert slots.free == 1 and slots.waiting == 1
        unstartable.clear()
        slots.leave()
        assert done.wait(60) and eventually(lambda: slots.free == 2)


class TestSlots:
    def test_as_many_tasks_run_at_a_time_as_there_are_slots(self, cache):
        slots = Slots(3, cache)
        lock, running, most, done = threading.Lock(), 0, 0, threading.Semaphore(0)
        barrier = threading.Barrier(3)  # each task meets two others

        def task():
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            barrier.wait(60)
            with lock:
                running -= 1
            done.release()

        for _ in range(12):
            slots.submit(task)
        for _ in range(12):
            assert done.acquire(timeout=60)
        assert most == 3

    def test_a_thread_may_take_a_slot_itself(self, cache):
        slots = Slots(1, cache)
        order = []
        assert slots.enter() and not slots.enter()
        done = threading.Event()

        def second():
            order.append("b")
            done.set()

        slots.submit(lambda: order.append("a"))
        slots.submit(second)
        assert slots.waiting == 2 and order == []
        slots.leave()
        assert done.wait(60) and order == ["a", "b"]

    def test_tasks_that_come_while_slots_are_held_run_when_they_are_released(self, cache):
        slots = Slots(2, cache)
        slots.hold()
        assert not slots.enter()
        done = threading.Semaphore(0)
        for _ in range(5):
            slots.submit(done.release)
        assert slots.waiting == 5 and not done.acquire(timeout=0.05)
        slots.release()
        for _ in range(5):
            assert done.acquire(timeout=60)
        assert eventually(lambda: slots.free == 2)

    def test_a_failing_task_releases_its_slot(self, cache):
        slots = Slots(1, cache)
        slots.submit(lambda: 1 / 0)
        done = threading.Event()
        slots.submit(done.set)
        assert done.wait(60)
