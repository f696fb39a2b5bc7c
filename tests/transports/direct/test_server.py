"""A worker's server of connections: whom it refuses, what it waits for, and what it closes."""

import contextlib
import os
import socket
import threading
import time

import pytest
from conftest import eventually
from direct_ends import SECRET, TOKEN, WAIT_SECONDS, Callee, authenticate, dial, send_call

from rayrpc._concurrency.reader import ReaderWatchdog
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._transports.direct.bulk_replies import BULK_BYTES
from rayrpc._transports.direct.listening import listen
from rayrpc._transports.direct.server import DirectServer

LARGE = os.urandom(BULK_BYTES + 1)
PEER = "caller"  # token of all peers here


@pytest.fixture
def make():
    """Make a server, which the test starts and closes."""
    with contextlib.closing(ReaderWatchdog()) as watchdog:
        with contextlib.closing(ThreadCache("callee")) as threads:
            yield lambda listener: DirectServer(TOKEN, listener, threads, watchdog)


@pytest.fixture
def connect(callee):
    """Connect to the callee by TCP, as a member of the group."""
    with contextlib.ExitStack() as connections:

        def connect():
            connection = connections.enter_context(dial(callee.server, socket.AF_INET))
            authenticate(connection)
            return connection

        yield connect


def has_ended(connection):
    with contextlib.suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True


def flush(callee, timeout):
    """Return how long the server waits for its replies, in seconds."""
    began = time.monotonic()
    callee.server.flush_replies(timeout)
    return time.monotonic() - began


class TestExpelledPeers:
    def test_their_connections_end_and_those_of_others_stay(self, callee, connect):
        one, another = connect(), connect()
        for each in (one, another):
            send_call(each)
            assert each.recv(1)
        callee.server.expel("somebody else")
        assert [each.is_closed for each in callee.server.connections] == [False, False]
        callee.server.expel(PEER)
        assert has_ended(one) and has_ended(another)
        assert eventually(lambda: not callee.server.connections)

    def test_they_are_refused_from_then_on(self, callee, connect):
        callee.server.expel(PEER)
        with pytest.raises(AssertionError, match="refused"):
            connect()
        assert not callee.server.connections

    def test_one_that_is_expelled_after_its_handshake_is_closed(self, callee, connect):
        callee.on_connected = lambda connection: callee.server.expel(PEER)
        assert has_ended(connect())
        assert eventually(lambda: not callee.server.connections)


class TestFlush:
    def test_without_calls_it_waits_for_nothing(self, callee, connect):
        connection = connect()
        send_call(connection)
        assert connection.recv(1)
        assert eventually(lambda: not any(each.is_busy for each in callee.server.connections))
        assert flush(callee, WAIT_SECONDS) < WAIT_SECONDS / 2

    def test_it_waits_for_a_function_that_runs_no_longer_than_it_may(self, callee, connect):
        may_end, runs = threading.Event(), threading.Event()

        def answer(frame):
            runs.set()
            assert may_end.wait(WAIT_SECONDS)
            return frame.data

        callee.answer = answer
        send_call(connect())
        assert runs.wait(WAIT_SECONDS)
        assert flush(callee, 0.1) >= 0.1
        threading.Timer(0.1, may_end.set).start()
        assert 0.05 < flush(callee, WAIT_SECONDS) < WAIT_SECONDS / 2

    def test_it_waits_for_large_replies_until_their_peer_has_left(self, callee):
        callee.answer = lambda request: Frame(Kind.VALUE, 0, 1, request.call_id, buffers=[LARGE])
        with dial(callee.server, socket.AF_INET) as connection:
            authenticate(connection)
            send_call(connection)
            assert connection.recv(1)  # the reply is announced, and no connection opened for it
            assert flush(callee, 0.1) >= 0.1
        assert flush(callee, WAIT_SECONDS) < WAIT_SECONDS / 2

    def test_it_does_not_wait_for_the_thread_that_calls_it(self, callee, connect):
        """A function that ends its own worker."""
        took: list[float] = []

        def answer(request):
            took.append(flush(callee, WAIT_SECONDS))
            return request.data

        callee.answer = answer
        connection = connect()
        send_call(connection)
        assert connection.recv(1) and took[0] < WAIT_SECONDS / 2


class TestClose:
    def test_nobody_connects_any_more_and_connections_end(self):
        with contextlib.closing(Callee()) as callee:
            addresses = {each.family: each.getsockname() for each in callee.server.listeners}
            connection = dial(callee.server, socket.AF_INET)
            authenticate(connection)
        with connection:
            assert has_ended(connection)
        assert len(addresses) == 2
        for family, address in addresses.items():
            with socket.socket(family) as late, pytest.raises(ConnectionError):
                late.connect(address)

    def test_one_that_has_not_started_closes_its_listeners(self, make):
        server = make(listen("127.0.0.1"))
        server.close()
        assert [each.fileno() for each in server.listeners] == [-1, -1]


def test_without_a_listener_workers_of_the_same_host_alone_connect(make):
    with contextlib.closing(make(None)) as server:
        server.start(SECRET, lambda request, may_block=True: request, lambda connection: None)
        assert server.port == 0
        assert [each.family for each in server.listeners] == [socket.AF_UNIX]
        with dial(server) as connection:
            authenticate(connection)
            assert eventually(lambda: len(server.connections) == 1)
