"""Which threads poll the relay, and which send results to it."""

import sys
import threading

import pytest

from rayrpc._transports.ray.relay_client import MAX_EXCHANGES, PollSchedule, ResultQueue


@pytest.fixture
def switching():
    """Let threads take turns as often as Python can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run(count, task):
    threads = [threading.Thread(target=task, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_no_more_threads_exchange_than_allowed():
    schedule = PollSchedule()
    assert [schedule.begin() for _ in range(MAX_EXCHANGES + 1)] == [True] * MAX_EXCHANGES + [False]
    assert not schedule.end()
    assert schedule.begin()


def test_the_last_thread_to_leave_the_exchange_starts_another():
    schedule = PollSchedule()
    assert schedule.begin() and schedule.begin()
    assert [schedule.end(), schedule.end()] == [False, True]


def test_some_thread_always_exchanges_or_is_told_to_start_one(switching):
    schedule = PollSchedule()
    assert schedule.begin()
    starts = []

    def poll(_):
        for _ in range(2000):
            if schedule.begin() and schedule.end():
                starts.append(schedule.begin())

    run(4, poll)
    # the exchange that was begun first is still open: no thread was ever the last to leave
    assert starts == [] and schedule.end()


def test_results_are_sent_by_one_thread_at_a_time():
    results = ResultQueue()
    assert results.add((1, b"a"))
    assert not results.add((2, b"b"))
    assert results.take_to_send() == [(1, b"a"), (2, b"b")]
    assert not results.add((3, b"c"))
    assert results.take_to_send() == [(3, b"c")]
    assert results.take_to_send() == []
    assert results.add((4, b"d"))


def test_an_exchange_takes_results_from_the_sender():
    results = ResultQueue()
    assert results.add((1, b"a"))
    assert results.take() == [(1, b"a")]
    assert results.take_to_send() == []


def test_no_result_is_lost_or_sent_twice(switching):
    results = ResultQueue()
    sent = []

    def add(thread):
        for number in range(2000):
            if results.add((thread * 2000 + number, b"")):
                while batch := results.take_to_send():
                    sent.extend(batch)

    run(4, add)
    assert sorted(number for number, _ in sent) == list(range(8000))
