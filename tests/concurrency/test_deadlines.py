"""Deadlines of one wait, and of all calls of a worker."""

import functools
import math
import random
import threading
import time

import pytest
from conftest import eventually
from interrupting import strikes
from simulation.separately import in_virtual_time

from rayrpc._concurrency import deadlines
from rayrpc._concurrency.deadlines import (
    MAX_ENDED_CALLS,
    Deadline,
    DeadlineQueue,
    DeadlineThread,
)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestDeadline:
    @pytest.fixture
    def clock(self):
        return Clock()

    def test_the_remaining_time_shrinks_and_is_never_negative(self, clock):
        deadline = Deadline(2.0, clock)
        assert deadline.remaining() == 2.0 and not deadline.expired
        clock.now += 1.5
        assert deadline.remaining() == 0.5 and not deadline.expired
        clock.now += 1.5
        assert deadline.remaining() == 0.0 and deadline.expired

    def test_it_expires_at_its_end(self, clock):
        deadline = Deadline(2.0, clock)
        clock.now += 2.0
        assert deadline.remaining() == 0.0 and deadline.expired

    @pytest.mark.parametrize("seconds", [0.0, -1.0])
    def test_no_time_is_expired_at_once(self, clock, seconds):
        deadline = Deadline(seconds, clock)
        assert deadline.remaining() == 0.0 and deadline.expired

    def test_none_is_without_limit(self, clock):
        deadline = Deadline(None, clock)
        clock.now = math.inf
        assert deadline.remaining() is None and not deadline.expired

    def test_no_wait_is_longer_than_a_lock_allows(self):
        remaining = Deadline(1e12).remaining()
        assert remaining is not None and threading.Lock().acquire(timeout=remaining)

    def test_the_default_clock_is_monotonic(self):
        remaining = Deadline(1000.0).remaining()
        assert remaining is not None and 0 < remaining <= 1000
        assert Deadline(0.0).expired


class TestDeadlineQueue:
    def test_calls_expire_by_deadline(self):
        queue = DeadlineQueue({1, 2})
        queue.add(5.0, 2, 5.0)
        queue.add(1.0, 1, 1.0)
        assert queue.next_due() == 1.0
        assert queue.take_expired(0.5) == []
        assert queue.take_expired(1.0) == [(1, 1.0)]
        assert queue.next_due() == 5.0
        assert queue.take_expired(9.0) == [(2, 5.0)]
        assert queue.next_due() == math.inf and len(queue) == 0

    def test_a_call_that_ended_never_expires(self):
        open_calls = {1, 2}
        queue = DeadlineQueue(open_calls)
        queue.add(1.0, 1, 1.0)
        queue.add(2.0, 2, 1.0)
        open_calls.remove(1)
        assert queue.take_expired(3.0) == [(2, 1.0)]

    def test_ended_calls_do_not_pile_up_behind_an_open_one(self):
        open_calls = set()
        queue = DeadlineQueue(open_calls)
        for call_id in range(5000):
            open_calls.add(call_id)
            queue.add(60.0 + call_id, call_id, 60.0)
            if call_id:  # the first call stays open at the front
                open_calls.remove(call_id)
        assert len(queue) <= MAX_ENDED_CALLS + 4
        open_calls.clear()
        assert queue.take_expired(0.0) == [] and len(queue) == 0

    @pytest.mark.parametrize("seed", range(20))
    def test_calls_that_begin_and_end_at_random_expire_as_sorted(self, seed):
        order = random.Random(seed)
        open_calls: dict[int, float] = {}
        queue, now = DeadlineQueue(open_calls), 0.0
        for call_id in range(2000):
            now += order.random()
            due = now + order.choice([1.0, 20.0, 20.0, 500.0])
            open_calls[call_id] = due
            queue.add(due, call_id, due - now)
            if order.random() < 0.6:
                del open_calls[order.choice(list(open_calls))]
            assert queue.next_due() <= min(open_calls.values(), default=math.inf)
            if order.random() < 0.1:
                expired = [each for each, _ in queue.take_expired(now)]
                over = [each for each, due in open_calls.items() if due <= now]
                assert expired == sorted(over, key=lambda each: (open_calls[each], each))
                assert queue.next_due() > now
                for each in expired:
                    del open_calls[each]
            assert len(queue) <= 2 * len(open_calls) + MAX_ENDED_CALLS + 1

    def test_an_interrupt_at_any_point_leaves_the_others_in_time(self):
        order = random.Random(1)
        for strike in strikes([deadlines.__file__]):
            open_calls = {call_id: order.random() for call_id in range(50)}
            queue = DeadlineQueue(open_calls)
            for call_id in range(2 * len(open_calls) + MAX_ENDED_CALLS):  # one more is too many
                queue.add(open_calls.get(call_id, 0.5), call_id, 1.0)
            strike(functools.partial(queue.add, 2.0, 50, 1.0))
            expired: set[int] = set()
            for now in (0.2, 0.4, 0.6, 0.8, 1.0):
                assert queue.next_due() <= min(open_calls.values())
                expired.update(call_id for call_id, _ in queue.take_expired(now))
                over = [call_id for call_id, due in open_calls.items() if due <= now]
                assert expired.issuperset(over)
                for call_id in over:
                    del open_calls[call_id]
        assert strike.number > 3

    def test_many_timeouts_share_one_queue(self):
        queue = DeadlineQueue(range(1000))
        for call_id in range(1000):
            queue.add(1000.0 - call_id, call_id, 1000.0 - call_id)
        assert queue.next_due() == 1.0
        assert [call_id for call_id, _ in queue.take_expired(3.0)] == [999, 998, 997]


@in_virtual_time()
def test_deadlines_expire_in_order_and_in_time():
    expired: list[tuple[int, float, float]] = []

    def on_expired(call_id, timeout):
        expired.append((call_id, timeout, time.monotonic()))

    thread = DeadlineThread({1, 2, 3}, on_expired)
    thread.add(3, 1e10)  # it does not keep others from expiring
    thread.add(2, 10.0)
    thread.add(1, 1.0)
    time.sleep(40)
    assert [each[:2] for each in expired] == [(1, 1.0), (2, 10.0)]
    assert all(0 <= at - timeout < 10 for _, timeout, at in expired)
    thread.close()


class TestDeadlineThread:
    def test_a_thread_that_could_not_start_starts_with_the_next_call(self, unstartable, caplog):
        expired, done = [], threading.Event()

        def on_expired(call_id, timeout):
            expired.append(call_id)
            if len(expired) == 2:
                done.set()

        thread = DeadlineThread({1, 2}, on_expired)
        unstartable.add("rayrpc-timers")
        thread.add(1, 0.001)
        assert "can't start new thread" in caplog.text
        unstartable.clear()
        thread.add(2, 0.001)
        assert done.wait(60) and expired == [1, 2]
        thread.close()

    def test_a_thread_that_was_started_before_needs_no_start(self, unstartable):
        done = threading.Event()
        thread = DeadlineThread({1}, lambda *_: done.set())
        thread.start()
        unstartable.add("rayrpc-timers")
        thread.add(1, 0.001)
        assert done.wait(60)
        thread.close()

    def test_an_error_in_a_callback_does_not_stop_the_others(self, caplog):
        done = threading.Event()

        def on_expired(call_id, timeout):
            if call_id == 0:
                raise ValueError
            done.set()

        thread = DeadlineThread({0, 1}, on_expired)
        thread.add(0, 0.001)
        thread.add(1, 0.02)
        assert done.wait(60)
        assert "error in the callback of an expired deadline" in caplog.text
        thread.close()

    def test_after_close_nothing_expires_and_the_thread_ends(self):
        expired = []
        thread = DeadlineThread({1, 2}, lambda *call: expired.append(call))
        thread.add(1, 1000.0)
        thread.close()
        thread.add(2, 0.0)
        timers = thread._thread.thread
        assert eventually(lambda: timers not in threading.enumerate()) and expired == []


def test_a_step_is_no_longer_than_what_is_left():
    now = [0.0]
    deadline = Deadline(3.0, clock=lambda: now[0])
    assert deadline.within(2.0) == 2.0
    now[0] = 2.5
    assert deadline.within(2.0) == 0.5
    assert Deadline(None).within(2.0) == 2.0
