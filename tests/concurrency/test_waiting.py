"""Waits that are notified, time out, and are interrupted."""

import functools
import threading
import time

import pytest
from conftest import eventually
from interrupting import interrupts_wait, strikes
from simulation.separately import in_virtual_time

from rayrpc._concurrency import waiting
from rayrpc._concurrency.waiting import STEP_SECONDS, Event, Notifier, wait_for_lock


@in_virtual_time()
def test_no_notification_is_lost_between_threads_that_hand_over_a_token():
    changed, turn, seen = Notifier(), [0], []

    def play(player):
        for _ in range(5):
            changed.wait_until(lambda: turn[0] % 3 == player)
            seen.append(player)
            turn[0] += 1
            changed.notify_all()

    players = [threading.Thread(target=play, args=(player,)) for player in range(3)]
    for each in players:
        each.start()
    for each in players:
        each.join()
    assert seen == [0, 1, 2] * 5


@in_virtual_time()
def test_each_notification_of_one_wakes_one_that_was_not_woken():
    changed, lock, left, taken = Notifier(), threading.Lock(), [], []

    def take():
        with lock:
            return left.pop() if left else None

    def work():
        taken.append(changed.wait_until(take))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for each in workers:
        each.start()
    for number in range(1, 5):
        with lock:
            left.append(number)
        changed.notify()
    for each in workers:
        each.join()
    assert sorted(taken) == [1, 2, 3, 4]


@in_virtual_time()
def test_a_wait_ends_in_time_with_what_is_so_then():
    changed, value = Notifier(), [0]
    assert changed.wait_until(lambda: value[0], timeout=2.0) == 0
    assert 2.0 <= time.monotonic() < 2.1
    value[0] = 5
    assert changed.wait_until(lambda: value[0], timeout=0) == 5
    threading.Timer(1.0, lambda: value.__setitem__(0, 6)).start()  # and notifies nobody
    assert changed.wait_until(lambda: value[0] == 6, timeout=20.0)
    assert 22.0 <= time.monotonic() < 30.1


def test_a_condition_that_raises_ends_the_wait_and_leaves_nothing():
    changed = Notifier()
    calls = []

    def ready():
        calls.append(1)
        return 1 / (2 - len(calls)) < 0

    with pytest.raises(ZeroDivisionError):
        changed.wait_until(ready, timeout=60)
    assert changed._waiters == []


def third_time(changed):
    """Return a condition that is so when it is checked for the third time."""
    calls = []

    def ready():
        calls.append(1)
        changed.notify_all()
        return len(calls) > 2

    return ready


def test_an_interrupt_at_any_point_of_a_wait_leaves_nothing():
    for strike in strikes([waiting.__file__]):
        changed = Notifier()
        wait = functools.partial(changed.wait_until, third_time(changed), 60)
        strike(wait)
        assert changed._waiters == []
    assert strike.number > 10


@pytest.mark.parametrize("timeout", [None, 1e12, 3 * STEP_SECONDS, STEP_SECONDS])
@in_virtual_time()
def test_a_lock_is_acquired_when_it_is_released(timeout):
    lock = threading.Lock()
    assert wait_for_lock(lock, timeout)
    threading.Timer(2.5 * STEP_SECONDS, lock.release).start()
    assert wait_for_lock(lock, timeout) == (timeout != STEP_SECONDS)


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("timeout", [-1.0, 0.0, 0.5, 1.0, 1.5, 7.25])
@in_virtual_time()
def test_a_lock_is_waited_for_until_the_timeout_ends(timeout, in_thread):
    lock = threading.Lock()
    lock.acquire()
    acquired = []
    start = time.monotonic()
    if in_thread:
        waiter = threading.Thread(target=lambda: acquired.append(wait_for_lock(lock, timeout)))
        waiter.start()
        waiter.join()
    else:
        acquired.append(wait_for_lock(lock, timeout))
    assert acquired == [False]
    seconds = max(0.0, timeout)
    assert seconds <= time.monotonic() - start < seconds + 0.1


@pytest.mark.parametrize("timeout", [None, 600.0])
def test_a_signal_just_before_a_wait_for_a_lock_ends_it(timeout):
    lock = threading.Lock()
    lock.acquire()
    with interrupts_wait(lock.release):
        wait_for_lock(lock, timeout)
    assert lock.locked()


class TestEvent:
    def test_it_is_set_until_it_is_cleared(self):
        event = Event()
        assert not event.is_set() and not event.wait(0)
        event.set()
        assert event.is_set() and event.wait() and event.wait(0)
        event.clear()
        assert not event.is_set() and not event.wait(0.001)

    @pytest.mark.parametrize("timeout", [None, 600.0])
    def test_a_signal_just_before_a_wait_ends_it(self, timeout):
        event = Event()
        with interrupts_wait(event.set):
            event.wait(timeout)
        assert event._changed._waiters == []

    def test_all_that_wait_for_it_go_on(self):
        event, went = Event(), threading.Semaphore(0)
        for _ in range(3):
            threading.Thread(target=lambda: went.release(event.wait(60)), daemon=True).start()
        assert eventually(lambda: len(event._changed._waiters) == 3)
        event.set()
        assert all(went.acquire(timeout=60) for _ in range(3))

    def test_an_interrupt_of_one_that_sets_it_holds_up_no_other(self):
        for strike in strikes([waiting.__file__]):
            event = Event()
            strike(event.set)
            event.set()
            assert event.wait(60)
