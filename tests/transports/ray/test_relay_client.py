"""Which threads poll the relay and send results to it, and exchanges that are repeated."""

import itertools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import eventually

from rayrpc._concurrency.threads import ThreadCache
from rayrpc._transports.ray import ray_api, relay_client
from rayrpc._transports.ray.endpoint import to_wire
from rayrpc._transports.ray.relay import Relay
from rayrpc._transports.ray.relay_client import (
    MAX_EXCHANGES,
    PollSchedule,
    RelayClient,
    ResultQueue,
)


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


def test_some_thread_always_exchanges_or_is_told_to_start_one(quick_switches):
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


def test_no_result_is_lost_or_sent_twice(quick_switches):
    results = ResultQueue()
    sent = []

    def add(thread):
        for number in range(2000):
            if results.add((thread * 2000 + number, b"")):
                while batch := results.take_to_send():
                    sent.extend(batch)

    run(4, add)
    assert sorted(number for number, _ in sent) == list(range(8000))


class TestExchange:
    def test_one_that_is_repeated_returns_the_same_frames(self):
        relay: Any = Relay("alice", False)
        for number in (1, 2):
            relay.deliver(number, number)
        first = relay.exchange(1, [], [])
        relay.deliver(3, 3)
        assert [number for _, number, _ in first] == [1, 2]
        assert relay.exchange(1, [], []) == first
        assert [number for _, number, _ in relay.exchange(2, [1], [])] == [3]
        relay.note_arrived([2])
        assert not relay._exchanges

    def test_one_that_is_repeated_while_it_waits_gets_the_frames_of_the_first(self):
        relay: Any = Relay("alice", False)
        with ThreadPoolExecutor(2) as threads:
            twice = [threads.submit(relay.exchange, 1, [], []) for _ in range(2)]
            relay.deliver(7, 7)
            assert [each.result(20) for each in twice] == [[("reply", 7, 7)]] * 2


class TestFaults:
    """Errors of Ray's client, without a relay."""

    @pytest.fixture
    def threads(self):
        threads = ThreadCache("test")
        yield threads
        threads.close()

    @pytest.fixture
    def client(self, threads, monkeypatch):
        monkeypatch.setattr(relay_client, "FAULT_SECONDS", 0.01)
        relay: Any = SimpleNamespace(exchange=None, give=SimpleNamespace(remote=list))
        ignore = [lambda *_: None] * 3
        return RelayClient(relay, to_wire, threads, *ignore)

    def test_an_error_in_a_poller_leaves_another_and_its_results(self, client):
        given: queue.SimpleQueue[Any] = queue.SimpleQueue()
        asked = itertools.count(1)
        polls_again = threading.Event()

        def exchange_and_serve(results):
            if next(asked) == 1:
                client._schedule.end()
                results.append((7, b"result"))
                raise ArithmeticError("as expected")
            polls_again.set()

        client._exchange_and_serve = exchange_and_serve
        client._send_result = given.put
        client.start(lambda frame, may_block=True: frame)
        assert polls_again.wait(60) and given.get(timeout=60) == (7, b"result")

    def test_a_poller_ends_where_ray_was_shut_down(self, client, caplog, monkeypatch):
        for module in (relay_client, ray_api):
            monkeypatch.setattr(module, "ray", SimpleNamespace(is_initialized=lambda: False))
        asked = itertools.count(1)
        client._relay.exchange = SimpleNamespace(remote=lambda *_: next(asked))
        client.start(lambda frame, may_block=True: frame)
        assert eventually(lambda: "Ray was shut down under RPC" in caplog.text)
        assert client._schedule.begin() and next(asked) == 1
        assert "error in a thread" not in caplog.text

    def test_results_that_could_not_be_sent_are_sent_with_the_next(self, client):
        sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        fails = [True]

        def ask(call):
            if fails:
                fails.clear()
                raise ArithmeticError("as expected")
            sent.put(call.args[-1])

        client._ask = ask
        client._send_result((1, b"a"))
        assert eventually(lambda: not client._results._is_sending)
        client._send_result((2, b"b"))
        assert sent.get(timeout=60) == [(1, b"a"), (2, b"b")]
