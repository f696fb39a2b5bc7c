"""One thread waits for all idle connections, and has those read on which something arrives."""

import gc
import logging
import selectors
import socket
import threading
import weakref

import pytest
from conftest import eventually

from rayrpc._transports.direct.idle_connections import IdleConnections

WAIT_SECONDS = 60.0


class Connection:
    """One end of a connection, and how often it was to be read again."""

    def __init__(self):
        self.socket, self.peer = socket.socketpair()
        self.starts = 0
        self.started = threading.Event()

    def start(self):
        self.starts += 1
        self.started.set()

    def close(self):
        self.socket.close()
        self.peer.close()


@pytest.fixture
def idle():
    idle = IdleConnections()
    yield idle
    idle.close()


@pytest.fixture
def connect():
    """Make a connection, which ends with the test."""
    made = []

    def connect():
        made.append(weakref.ref(connection := Connection()))
        weakref.finalize(connection, connection.peer.close)
        weakref.finalize(connection, connection.socket.close)
        return connection

    yield connect
    for each in made:
        if (connection := each()) is not None:
            connection.close()


@pytest.mark.parametrize("comes", ["a message", "an end"])
def test_the_one_on_which_something_comes_is_read_once_and_the_others_stay(idle, connect, comes):
    one, *others = connections = [connect() for _ in range(3)]
    assert all(idle.add(each) for each in connections)
    assert eventually(lambda: idle.count == 3)  # not while one is taken over
    if comes == "a message":
        one.peer.send(b"x")
    else:
        one.peer.close()
    assert one.started.wait(WAIT_SECONDS)
    assert eventually(lambda: idle.count == 2)
    others[0].peer.send(b"x")
    assert others[0].started.wait(WAIT_SECONDS)
    assert [each.starts for each in connections] == [1, 1, 0]


def test_one_on_which_something_has_come_before_is_read(idle, connect):
    connection = connect()
    connection.peer.send(b"x")
    assert idle.add(connection) and connection.started.wait(WAIT_SECONDS)


def test_one_may_be_kept_again_and_another_in_its_place(idle, connect):
    connection = connect()
    for number in range(1, 4):
        connection.started.clear()
        assert idle.add(connection)
        connection.peer.send(b"x")
        assert connection.started.wait(WAIT_SECONDS) and connection.starts == number
        connection.socket.recv(1)
    descriptor = connection.socket.fileno()
    connection.close()
    other = connect()  # the system gives it the descriptor that is free
    assert descriptor in (other.socket.fileno(), other.peer.fileno())
    assert idle.add(other)
    other.peer.send(b"x")
    assert other.started.wait(WAIT_SECONDS)


def test_all_are_read_when_it_closes_and_none_is_kept_from_then_on(connect):
    idle = IdleConnections()
    connections = [connect() for _ in range(3)]
    assert all(idle.add(each) for each in connections)
    idle.close()
    assert all(each.started.wait(WAIT_SECONDS) for each in connections)
    late = connect()
    assert not idle.add(late) and late.starts == 0
    idle.close()
    assert [each.starts for each in connections] == [1, 1, 1]


def test_one_that_was_never_used_closes_at_once(connect):
    idle = IdleConnections()
    idle.close()
    assert not idle.add(connect()) and idle.count == 0


def test_closing_one_that_was_never_used_closes_its_descriptors():
    idle = IdleConnections()
    idle.close()
    del idle
    gc.collect()  # which warns about open ones, and a warning is an error


def test_an_error_of_one_that_is_read_again_harms_no_other(idle, connect, caplog):
    bad, good = connect(), connect()

    def fail():
        raise RuntimeError("no thread can be started")

    bad.start = fail
    assert idle.add(bad) and idle.add(good)
    bad.peer.send(b"x")
    assert eventually(lambda: idle.count == 1)
    good.peer.send(b"x")
    assert good.started.wait(WAIT_SECONDS)
    assert "a connection could not be read again; it is closed" in caplog.text
    assert "no thread can be started" in caplog.text


def test_one_that_the_system_cannot_wait_for_is_read_by_a_thread(idle, connect, caplog):
    caplog.set_level(logging.DEBUG, "rayrpc")
    closed, good = connect(), connect()
    closed.close()
    assert idle.add(good) and idle.add(closed)
    assert closed.started.wait(WAIT_SECONDS)
    assert eventually(lambda: idle.count == 1) and good.starts == 0
    assert "an idle connection keeps its thread" in caplog.text


def test_the_wait_goes_on_after_an_error(connect, monkeypatch, caplog):
    failed = threading.Event()

    class Selector(selectors.DefaultSelector):
        def select(self, timeout=None):
            ready = super().select(timeout)
            if ready and not failed.is_set():
                failed.set()
                raise OSError("no memory")
            return ready

    monkeypatch.setattr(selectors, "DefaultSelector", Selector)
    idle, connection = IdleConnections(), connect()
    try:
        assert idle.add(connection)
        assert failed.wait(WAIT_SECONDS)
        connection.peer.send(b"x")
        assert connection.started.wait(WAIT_SECONDS)
        assert "an error in the wait for idle connections" in caplog.text
    finally:
        idle.close()


def test_without_its_thread_none_is_kept_and_it_starts_with_a_later_one(
    idle, connect, unstartable, caplog
):
    unstartable.add("rayrpc-idle")
    first, second = connect(), connect()
    assert not idle.add(first) and idle.count == 0
    assert "idle connections keep their threads" in caplog.text
    unstartable.clear()
    assert idle.add(second)
    second.peer.send(b"x")
    assert second.started.wait(WAIT_SECONDS) and first.starts == 0


def test_the_thread_keeps_none_alive_that_is_read_again(idle, connect):
    connection, other = connect(), connect()
    assert idle.add(connection) and idle.add(other)
    connection.peer.send(b"x")
    assert connection.started.wait(WAIT_SECONDS)
    freed = weakref.ref(connection)
    del connection
    assert eventually(lambda: (gc.collect(), freed() is None)[-1])
    assert idle.count == 1


def test_each_is_read_or_refused_however_adding_and_closing_meet(connect, quick_switches):
    for _ in range(20):
        idle = IdleConnections()
        connections = [connect() for _ in range(8)]
        barrier = threading.Barrier(5)
        refused = []

        def add(mine, idle=idle, barrier=barrier, refused=refused):
            barrier.wait(WAIT_SECONDS)
            for each in mine:
                each.peer.send(b"x")
                if not idle.add(each):
                    refused.append(each)

        def close(idle=idle, barrier=barrier):
            barrier.wait(WAIT_SECONDS)
            idle.close()

        threads = [threading.Thread(target=close)]
        threads += [threading.Thread(target=add, args=(connections[n::4],)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        for each in connections:
            assert each in refused or each.started.wait(WAIT_SECONDS)
        assert all(each.starts == (each not in refused) for each in connections)
        assert idle.count == 0
        for each in connections:
            each.close()
