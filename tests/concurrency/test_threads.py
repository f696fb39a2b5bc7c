"""Threads on demand, slots, timers, cells."""

import threading
import time

import pytest
from conftest import eventually

from rayrpc._concurrency.deadlines import Deadlines
from rayrpc._concurrency.outcome import Error, Value
from rayrpc._concurrency.threads import Slots, ThreadCache
from rayrpc._runtime.rrefs.cell import Cell


@pytest.fixture
def cache():
    made = ThreadCache("test", soft_limit=4)
    yield made
    made.close()


def test_tasks_run_and_threads_are_used_again(cache):
    done = threading.Event()
    seen = set()

    def task(last):
        seen.add(threading.current_thread().name)
        if last:
            done.set()

    for i in range(50):
        cache.submit(lambda i=i: task(i == 49))
        time.sleep(0.001)
    assert done.wait(5) and len(seen) <= 3


def test_tasks_that_wait_for_one_another_all_get_on(cache):
    events = [threading.Event() for _ in range(20)]

    def task(i):
        if i + 1 < len(events):
            assert events[i + 1].wait(10)
        events[i].set()

    for i in range(len(events)):
        cache.submit(lambda i=i: task(i))
    assert events[0].wait(10)


def test_a_burst_of_short_tasks_makes_no_crowd(cache):
    left = threading.Semaphore(0)
    for _ in range(2000):
        cache.submit(left.release)
    for _ in range(2000):
        assert left.acquire(timeout=10)
    assert cache.size <= 8


def test_an_error_of_a_task_is_logged_and_ends_nothing(cache, caplog):
    done = threading.Event()
    cache.submit(lambda: 1 / 0)
    cache.submit(done.set)
    assert done.wait(5)
    assert eventually(lambda: "error in a task of test" in caplog.text)


def test_threads_end_when_idle_or_closed():
    cache = ThreadCache("short", idle_seconds=0.05)
    cache.submit(lambda: None)
    time.sleep(0.5)
    assert cache.size == 0
    cache.submit(lambda: None)
    cache.close()
    time.sleep(0.2)
    assert cache.size == 0


class TestSlots:
    def test_no_more_run_at_a_time_than_there_are(self, cache):
        slots = Slots(3, cache)
        lock, running, most, done = threading.Lock(), 0, 0, threading.Semaphore(0)

        def task():
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
            time.sleep(0.01)
            with lock:
                running -= 1
            done.release()

        for _ in range(12):
            slots.submit(task)
        for _ in range(12):
            assert done.acquire(timeout=10)
        assert most == 3

    def test_a_thread_may_take_a_slot_itself(self, cache):
        slots = Slots(1, cache)
        order = []
        assert slots.enter() and not slots.enter()
        done = threading.Event()
        slots.submit(lambda: order.append("a"))
        slots.submit(lambda: (order.append("b"), done.set()))
        assert slots.waiting == 2 and order == []
        slots.leave()
        assert done.wait(5) and order == ["a", "b"]

    def test_a_failing_task_gives_its_slot_back(self, cache):
        slots = Slots(1, cache)
        slots.submit(lambda: 1 / 0)
        done = threading.Event()
        slots.submit(done.set)
        assert done.wait(5)


class TestDeadlines:
    def make(self, open_calls):
        passed = []
        return Deadlines(
            open_calls, lambda number, seconds: passed.append((number, seconds))
        ), passed

    def test_deadlines_pass_in_order(self):
        deadlines, passed = self.make({1, 2})
        deadlines.add(2, 0.05)
        deadlines.add(1, 0.01)
        assert eventually(lambda: passed == [(1, 0.01), (2, 0.05)])
        deadlines.close()

    def test_a_call_that_ended_never_expires_and_leaves_nothing(self):
        open_calls = set()
        deadlines, passed = self.make(open_calls)
        for number in range(5000):
            open_calls.add(number)
            deadlines.add(number, 60)
            if number:  # the first keeps its place in line
                open_calls.remove(number)
        open_calls.add(-1)
        deadlines.add(-1, 0.3)
        open_calls.remove(-1)
        time.sleep(0.5)
        assert passed == [] and len(deadlines._lines[60]) < 2000 and len(deadlines._lines) == 1
        deadlines.close()

    def test_a_callback_that_fails_does_not_stop_the_others(self):
        passed = []
        deadlines = Deadlines({0, 1}, lambda number, _: passed.append(1 // number))
        deadlines.add(0, 0.001)
        deadlines.add(1, 0.02)
        assert eventually(lambda: passed == [1])
        deadlines.close()

    def test_after_close_nothing_happens(self):
        deadlines, passed = self.make({1, 2})
        deadlines.add(1, 0.02)
        deadlines.close()
        deadlines.add(2, 0.001)
        time.sleep(0.1)
        assert passed == []


class TestCell:
    def test_those_who_wait_get_the_outcome(self):
        cell, got = Cell(), []
        cell.on_done(got.append)
        threading.Timer(0.02, lambda: cell.set(Value(3))).start()
        assert cell.wait(5) == Value(3)
        cell.on_done(got.append)
        assert got == [Value(3), Value(3)]

    def test_waiting_has_a_timeout(self):
        with pytest.raises(TimeoutError):
            Cell().wait(0.01)

    def test_an_error_is_raised_anew_each_time(self):
        error = ValueError("x")
        cell = Cell(Error(error))
        for _ in range(2):
            with pytest.raises(ValueError, match="x"):
                cell.wait().unwrap()
        assert error.__traceback__ is None
