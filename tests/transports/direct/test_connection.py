"""Connections between a caller and a callee in one process, without Ray: authentication, readers,
and broken connections."""

import contextlib
import functools
import gc
import itertools
import logging
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from conftest import eventually
from direct_ends import TOKEN, WAIT_SECONDS, Owner, dial, frame
from interrupting import strikes
from launching import thread_states

from rayrpc._concurrency import reader
from rayrpc._concurrency import threads as threads_module
from rayrpc._concurrency.outcome import Value
from rayrpc._concurrency.reader import ReaderRole, ReaderWatchdog, release_reader
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.membership import Member
from rayrpc._protocol.transport import Deferred
from rayrpc._transports.direct import connection as connection_module
from rayrpc._transports.direct import outgoing, send_queue, stream
from rayrpc._transports.direct.auth import CHALLENGE_SIZE, ClientHandshake
from rayrpc._transports.direct.connection import CallerConnection
from rayrpc._transports.direct.message_reader import MessageReader
from rayrpc._transports.direct.wire import message_parts
from rayrpc.errors import CallError, CallLostError


@pytest.fixture(params=["unix", "tcp"])
def connection(request, callee):
    family = socket.AF_UNIX if request.param == "unix" else socket.AF_INET
    owner = Owner(callee, family)
    threads = ThreadCache("caller", soft_limit=1000, idle_seconds=0.2)
    connection: Any = CallerConnection(Member("callee", "bob", 1), owner, threads, ReaderWatchdog())
    connection.owner = owner
    connection.open()
    yield connection
    connection.fail(CallLostError("the test is over"))
    threads.close()


class TestCalls:
    def test_calls_that_wait_and_calls_that_call_back_share_a_connection(self, callee, connection):
        some = random.Random(7)
        callee.answer = lambda f: (time.sleep(some.choice([0, 0, 0.001])), f.data)[1]
        numbers = iter(range(1, 10**9))
        wrong, done = [], []

        def waits():
            for _ in range(150):
                number = next(numbers)
                data = b"%d" % number
                if connection.call(frame(number, data)).wait(WAIT_SECONDS).data != data:
                    wrong.append(number)

        def calls_back():
            for _ in range(300):
                number = next(numbers)
                data = b"%d" % number
                connection.call(frame(number, data)).on_done(
                    lambda outcome, data=data: done.append(outcome.value.data == data)
                )

        threads = [threading.Thread(target=f) for f in [waits] * 4 + [calls_back] * 3]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not wrong
        assert eventually(lambda: len(done) == 900) and all(done)

    def test_a_call_that_waits_long_does_not_hold_up_the_others(self, callee, connection):
        go = threading.Event()
        callee.answer = lambda f: (f.data != b"slow" or go.wait(WAIT_SECONDS), f.data)[1]
        slow = [connection.call(frame(i, b"slow")) for i in range(1, 30)]
        waiting = [threading.Thread(target=call.wait, args=(WAIT_SECONDS,)) for call in slow[:5]]
        for thread in waiting:
            thread.start()
        for i in range(100, 150):
            assert connection.call(frame(i, b"fast")).wait(WAIT_SECONDS).data == b"fast"
        go.set()
        assert all(call.wait(WAIT_SECONDS).data == b"slow" for call in slow[5:])
        for thread in waiting:
            thread.join(WAIT_SECONDS)

    def test_after_a_timeout_another_caller_reads(self, callee, connection):
        go = {b"late": threading.Event(), b"other": threading.Event()}
        callee.answer = lambda f: (go[f.data].wait(WAIT_SECONDS), f.data)[1]
        late = connection.call(frame(1, b"late"))
        other = connection.call(frame(2, b"other"))
        result = []
        thread = threading.Thread(target=lambda: result.append(other.wait(WAIT_SECONDS).data))

        def times_out():
            with pytest.raises(TimeoutError):
                late.wait(0.2)

        first = threading.Thread(target=times_out, daemon=True)
        first.start()
        thread.start()
        first.join(WAIT_SECONDS)
        assert result == []
        go[b"other"].set()
        thread.join(WAIT_SECONDS)
        assert result == [b"other"]
        go[b"late"].set()
        assert late.wait(WAIT_SECONDS).data == b"late"

    def test_threads_end_when_there_is_nothing_to_do(self, callee, connection):
        may_end = threading.Event()
        callee.answer = lambda f: may_end.wait(WAIT_SECONDS) and f.data
        calls = [connection.call(frame(i, b"x")) for i in range(1, 20)]
        assert eventually(lambda: callee.threads.size > 10)
        may_end.set()
        assert all(call.wait(WAIT_SECONDS).data == b"x" for call in calls)
        assert eventually(lambda: callee.threads.size <= 2)
        assert connection.call(frame(99, b"y")).wait(WAIT_SECONDS).data == b"y"


class TestShortCalls:
    """A short function keeps the role of the reader while calls come one at a time."""

    @pytest.fixture
    def may_end(self):
        return threading.Event()

    @pytest.fixture
    def readers(self, callee, may_end, monkeypatch):
        """Return the threads that served calls; a call takes as many seconds as its data says.

        A call of ``wait`` takes until ``may_end`` is set.
        """
        threads = []

        def answer(frame):
            release_reader(briefly=True)
            threads.append(threading.get_ident())
            if frame.data == b"wait":
                assert may_end.wait(WAIT_SECONDS)
            else:
                time.sleep(float(frame.data))
            return frame.data

        callee.answer = answer
        monkeypatch.setattr(reader, "TICK_SECONDS", 300.0)  # the watchdog releases no reader here
        return threads

    def test_one_call_at_a_time_is_served_by_one_thread(self, connection, readers):
        for number in range(50):
            assert connection.call(frame(number, b"0.001")).wait(WAIT_SECONDS).data == b"0.001"
        assert len(set(readers)) == 1

    def test_after_calls_at_a_time_others_read_while_one_runs(self, connection, readers, may_end):
        first = connection.call(frame(1, b"wait"))
        assert eventually(lambda: readers)
        held_up = connection.call(frame(2, b"0"))  # the first of a crowd
        may_end.set()
        assert held_up.wait(WAIT_SECONDS) and first.wait(WAIT_SECONDS)
        may_end.clear()
        long = connection.call(frame(3, b"wait"))
        assert eventually(lambda: len(readers) == 3)
        assert connection.call(frame(4, b"0")).wait(WAIT_SECONDS).data == b"0"
        assert not long.is_done and len(set(readers)) > 1
        may_end.set()
        assert long.wait(WAIT_SECONDS)


class TestBrokenConnections:
    def test_sent_calls_end_with_an_unknown_outcome(self, callee, connection):
        arrived = []
        callee.answer = lambda f: (arrived.append(f.call_id), Deferred())[1]
        called = [connection.call(frame(i)) for i in range(1, 5)]
        outcomes = []
        called[0].on_done(outcomes.append)
        assert eventually(lambda: len(arrived) == 4)
        for served in list(callee.server._connections):
            served.close()
        for call in called[1:]:
            with pytest.raises(CallLostError, match="not known"):
                call.wait(WAIT_SECONDS)
        assert eventually(lambda: outcomes and isinstance(outcomes[0].error, CallLostError))
        assert len(connection.owner.lost) == 1 and not connection.owner.rerouted
        assert connection.call(frame(9)) is None

    def test_a_reply_that_cannot_be_sent_ends_the_connection_and_is_logged(
        self, callee, connection, caplog
    ):
        callee.answer = lambda f: "no bytes" if f.data == b"bad" else f.data
        assert connection.call(frame(1, b"x")).wait(WAIT_SECONDS).data == b"x"
        bad = connection.call(frame(2, b"bad"))
        with pytest.raises(CallLostError):
            bad.wait(WAIT_SECONDS)
        assert "a reply could not be sent" in caplog.text

    def test_an_error_in_a_callback_harms_no_other_call(self, callee, connection, caplog):
        failed = threading.Event()

        def fail(outcome):
            failed.set()
            raise RuntimeError("of the program")

        for number in range(1, 4):
            failed.clear()
            connection.call(frame(number, b"x")).on_done(fail)
            assert failed.wait(WAIT_SECONDS)
            assert connection.call(frame(10 + number, b"y")).wait(WAIT_SECONDS).data == b"y"
        assert "of the program" in caplog.text
        assert not connection.owner.lost

    @pytest.mark.parametrize("waits", [True, False])
    def test_a_malformed_reply_is_an_error_and_ends_the_connection(
        self, callee, connection, monkeypatch, waits
    ):
        connection.call(frame(1, b"x")).wait(WAIT_SECONDS)
        stream = next(iter(callee.server._connections))._stream
        send = stream._send_queue.send
        monkeypatch.setattr(
            stream._send_queue,
            "send",
            lambda number, parts, *rest: send(number, message_parts(number, b"?", [])),
        )
        call = connection.call(frame(2, b"x"))
        if waits:
            with pytest.raises(CallLostError):
                call.wait(WAIT_SECONDS)
        else:
            outcomes: Any = queue.SimpleQueue()
            call.on_done(outcomes.put)
            assert isinstance(outcomes.get(timeout=WAIT_SECONDS).error, CallLostError)
        assert "malformed" in connection.owner.lost[0]
        assert connection.call(frame(3)) is None

    def test_an_unexpected_error_of_a_reader_ends_the_calls(self, callee, connection, monkeypatch):
        assert connection.call(frame(1, b"x")).wait(WAIT_SECONDS).data == b"x"

        def fail():
            raise ArithmeticError("unexpected")

        monkeypatch.setattr(connection._stream, "read", fail)
        calls = [connection.call(frame(number)) for number in (2, 3)]
        outcomes: Any = queue.SimpleQueue()
        calls[1].on_done(outcomes.put)
        with pytest.raises((CallError, ArithmeticError)):
            calls[0].wait(WAIT_SECONDS)
        assert isinstance(outcomes.get(timeout=WAIT_SECONDS).error, CallError)
        assert "unexpected" in connection.owner.lost[0]

    def test_an_unexpected_error_of_a_callee_ends_the_connection(
        self, callee, connection, monkeypatch, caplog
    ):
        assert connection.call(frame(1, b"x")).wait(WAIT_SECONDS).data == b"x"

        def fail(self):
            raise ArithmeticError("unexpected")

        monkeypatch.setattr(ReaderRole, "message_received", fail)
        with pytest.raises(CallError):
            connection.call(frame(2, b"x")).wait(WAIT_SECONDS)
        assert "unexpected" in caplog.text

    def test_unsent_calls_are_rerouted(self, callee, connection):
        assert connection.call(frame(1, b"x")).wait(WAIT_SECONDS).data == b"x"
        (opened,) = connection.owner.connections
        opened.shutdown(socket.SHUT_WR)
        call = connection.call(frame(2, b"y"))
        assert call.wait(WAIT_SECONDS).data == b"rerouted"
        assert connection.call(frame(3)) is None

    def test_calls_are_rerouted_where_no_socket_for_descriptors_can_be_made(
        self, callee, monkeypatch
    ):
        def refuse(*_):
            raise OSError(24, "Too many open files")

        owner = Owner(callee, socket.AF_UNIX)
        threads = ThreadCache("caller", soft_limit=10, idle_seconds=0.2)
        monkeypatch.setattr("rayrpc._transports.direct.stream.socket.socketpair", refuse)
        connection: Any = CallerConnection(
            Member("callee", "bob", 1), owner, threads, ReaderWatchdog()
        )
        assert connection.call(frame(1, b"x")).wait(WAIT_SECONDS).data == b"rerouted"
        threads.close()

    def test_calls_that_waited_for_a_connection_are_rerouted(self, callee):
        owner: Any = Owner(callee, socket.AF_INET)
        go = threading.Event()

        def connect(peer, is_bulk, pair):
            go.wait(WAIT_SECONDS)
            raise ConnectionRefusedError("nothing listens there")

        owner.connect = connect
        threads = ThreadCache("caller", soft_limit=10, idle_seconds=0.2)
        connection: Any = CallerConnection(
            Member("callee", "bob", 1), owner, threads, ReaderWatchdog()
        )
        calls = [connection.call(frame(i)) for i in range(3)]
        outcomes = []
        calls[0].on_done(outcomes.append)
        waiting = threading.Thread(
            target=lambda: outcomes.append(Value(calls[1].wait(WAIT_SECONDS))), daemon=True
        )
        waiting.start()
        go.set()
        assert calls[2].wait(WAIT_SECONDS).data == b"rerouted"
        assert eventually(lambda: len(outcomes) == 2)
        assert [o.value.data for o in outcomes] == [b"rerouted"] * 2
        assert "nothing listens there" in owner.lost[0]
        threads.close()


class TestUnauthenticatedConnections:
    def hold(self, stack, server, count, data=b""):
        """Connect, send data, and keep the connections open."""
        for _ in range(count):
            connection = stack.enter_context(dial(server))
            with contextlib.suppress(OSError):
                connection.sendall(data)

    @pytest.mark.parametrize(
        "data",
        [b"", b"GET / HTTP/1.1\r\n\r\n", b"rayrpc 2", os.urandom(200), b"rayrpc 2" + b"x" * 500],
        ids=["silent", "http", "stalls", "garbage", "long"],
    )
    def test_they_hold_up_no_member(self, callee, connection, data):
        with contextlib.ExitStack() as stack:
            self.hold(stack, callee.server, 100, data)
            assert connection.call(frame(1, b"x")).wait(WAIT_SECONDS).data == b"x"
            assert len(callee.server._connections) == 1

    def test_a_peer_without_the_secret_is_refused(self, callee):
        with dial(callee.server) as intruder:
            answer = ClientHandshake(b"guess", "caller", TOKEN)
            intruder.sendall(answer.hello)
            assert intruder.recv(CHALLENGE_SIZE)
            intruder.sendall(b"\0" * 32)
            with contextlib.suppress(ConnectionError):
                intruder.sendall(b"\0" * 100)
                assert intruder.recv(1) == b""
        assert not callee.server._connections

    def test_a_silent_peer_is_refused_in_time(self, callee, monkeypatch):
        monkeypatch.setattr("rayrpc._transports.direct.acceptor.HANDSHAKE_SECONDS", 0.3)
        with dial(callee.server) as intruder:
            assert intruder.recv(1) == b""

    def test_a_thousand_of_them_leave_no_descriptor(self, callee, connection):
        assert connection.call(frame(1, b"x")).wait(WAIT_SECONDS).data == b"x"

        def descriptors():
            return len(os.listdir("/proc/self/fd"))

        before = descriptors()
        for _ in range(1000):
            with dial(callee.server) as intruder:
                intruder.sendall(b"rayrpc 2" + b"y" * 40)
        assert eventually(lambda: descriptors() <= before)
        assert connection.call(frame(2, b"x")).wait(WAIT_SECONDS).data == b"x"

    def test_the_server_listens_at_the_nodes_address_only(self, callee):
        for listener in callee.server.listeners:
            if listener.family == socket.AF_INET:
                assert listener.getsockname()[0] == "127.0.0.1"
            assert not listener.get_inheritable()


def test_a_stopped_peer_times_out_and_answers_when_it_goes_on(tmp_path):
    """The peer is a process of its own, so that it can be stopped."""
    code = (
        "import sys, time; sys.path[:0] = sys.argv[1:]\n"
        "from direct_ends import Callee\n"
        "callee = Callee()\n"
        "print(callee.server.unix, callee.server.port, flush=True)\n"
        "time.sleep(100)\n"
    )
    folders = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]
    process: Any = subprocess.Popen(
        [sys.executable, "-c", code, *folders, *sys.path], stdout=subprocess.PIPE, text=True
    )
    threads = ThreadCache("caller", soft_limit=1000, idle_seconds=0.2)
    try:
        unix, port = process.stdout.readline().split()
        server = type("Server", (), {"unix": unix, "port": int(port)})
        token = unix.removeprefix("rayrpc-")
        owner = Owner(type("Remote", (), {"server": server}), socket.AF_UNIX, token)
        connection: Any = CallerConnection(
            Member("callee", "bob", 1), owner, threads, ReaderWatchdog()
        )
        assert connection.call(frame(1, b"x")).wait(WAIT_SECONDS).data == b"x"
        os.kill(process.pid, signal.SIGSTOP)
        assert eventually(lambda: thread_states(process.pid) == {"T"})
        big = [connection.call(frame(i, b"", [b"x" * 500_000])) for i in range(2, 12)]
        with pytest.raises(TimeoutError):
            big[0].wait(0.3)
        os.kill(process.pid, signal.SIGCONT)
        assert all(len(call.wait(WAIT_SECONDS).buffers[0]) == 500_000 for call in big)
    finally:
        process.kill()
        connection.fail(CallLostError("the test is over"))
        process.wait()
        process.stdout.close()
        threads.close()


@pytest.fixture
def overlaps(monkeypatch):
    """Uses of a receive buffer by two threads at once; looking ahead takes a while."""
    found = []

    def watch(use, seconds):
        def watched(self, *args):
            if not self.__dict__.setdefault("in_use", threading.Lock()).acquire(blocking=False):
                found.append(use.__name__)
            try:
                time.sleep(seconds)
                return use(self, *args)
            finally:
                with contextlib.suppress(RuntimeError):
                    self.in_use.release()

        return watched

    monkeypatch.setattr(MessageReader, "read", watch(MessageReader.read, 0))
    monkeypatch.setattr(MessageReader, "wait", watch(MessageReader.wait, reader.TICK_SECONDS / 2))
    return found


@pytest.mark.usefixtures("quick_switches")
class TestHandOver:
    def test_many_hand_overs_lose_no_reply(self, overlaps, callee, connection, caplog):
        """Functions take about a tick of the watchdog, or less; all ways to call take part."""
        some = random.Random(3)
        pauses = [0, 0, 0, 0.0005, reader.TICK_SECONDS, 1.5 * reader.TICK_SECONDS]

        def answer(request):
            release_reader(briefly=some.random() < 0.8)
            time.sleep(some.choice(pauses))
            return request.data

        callee.answer = answer
        numbers = itertools.count(1).__next__
        answered, expected = [], []

        def call(kind):
            for _ in range(300):
                number = numbers()
                expected.append(number)
                data = str(number).encode()
                pending = connection.call(frame(number, data))
                if kind == "waits":
                    assert pending.wait(WAIT_SECONDS).data == data
                    answered.append(number)
                else:
                    pending.on_done(
                        lambda outcome: answered.append(int(outcome.unwrap().data)),
                        urgent=kind == "urgent",
                    )

        kinds = ["waits", "waits", "urgent", "not urgent"]
        callers = [threading.Thread(target=call, args=(kind,)) for kind in kinds]
        for each in callers:
            each.start()
        for each in callers:
            each.join(WAIT_SECONDS)
        assert eventually(lambda: len(answered) == len(expected))
        assert sorted(answered) == sorted(expected)
        assert not overlaps
        assert not connection.owner.lost
        assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_a_call_that_ends_before_it_is_sent_frees_its_request_at_once(callee):
    threads = ThreadCache("caller", soft_limit=8, idle_seconds=0.2)
    owner = Owner(callee, socket.AF_UNIX)
    connection: Any = CallerConnection(Member("callee", "bob", 1), owner, threads, ReaderWatchdog())
    connection.open = lambda: None
    request, buffer = frame(1), np.zeros(10, np.uint8)
    request.buffers, request.is_stable = [buffer], True
    call = connection.call(request)
    freed = weakref.ref(buffer)
    connection.fail(CallLostError("the test is over"))
    gc.collect()
    gc.disable()  # which would free cycles, later
    try:
        del request, buffer, call
        assert freed() is None
    finally:
        gc.enable()
    threads.close()


def test_an_interrupt_of_a_call_that_finds_the_connection_cut_keeps_that_from_no_owner(callee):
    modules = (connection_module, outgoing, send_queue, stream, threads_module)
    files = [module.__file__ for module in modules]
    threads = ThreadCache("caller", soft_limit=1000, idle_seconds=0.2)
    for strike in strikes(files):
        owner = Owner(callee, socket.AF_UNIX)
        connection: Any = CallerConnection(
            Member("callee", "bob", 1), owner, threads, ReaderWatchdog()
        )
        connection.open()
        assert connection.call(frame(1)).wait(WAIT_SECONDS).call_id == 1
        connection._stream.shut_down()
        call = functools.partial(connection.call, frame(2))
        strike(call)
        connection.call(frame(3))  # finds it cut if that one has not
        assert eventually(functools.partial(len, owner.lost)), f"at point {strike.number}"
        connection.fail(CallLostError("the test is over"))
    threads.close()
    assert strike.number > 50
