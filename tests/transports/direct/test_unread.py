"""A peer that does not read its replies: it gets a bounded number of them, and loses none."""

import os
import random
import socket
import threading
import time
from typing import Any

import pytest
from conftest import eventually
from direct_ends import WAIT_SECONDS, Callee, Owner, authenticate, dial, end, frame

from rayrpc._concurrency.reader import ReaderWatchdog, release_reader
from rayrpc._concurrency.threads import Slots, ThreadCache
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import Deferred
from rayrpc._transports.direct import bulk_replies, stream
from rayrpc._transports.direct.connection import CallerConnection
from rayrpc._transports.direct.stream import Stream
from rayrpc._transports.direct.wire import prepare

LIMIT = 4 << 20
SIZE = 1 << 20
CALLS = 200
SLOTS = 4
# Replies that may be there beside the limit: in the sockets' buffers and in the functions that run.
SLACK = 16

FAMILIES = pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET], ids=["unix", "tcp"])


@pytest.fixture(autouse=True)
def small_limit(monkeypatch):
    for module in (stream, bulk_replies):
        monkeypatch.setattr(module, "MAX_UNREAD_BYTES", LIMIT)


@pytest.fixture
def threads():
    cache = ThreadCache("unread-test", soft_limit=50, idle_seconds=0.2)
    yield cache
    cache.close()


class LargeReplies(Callee):
    """Replies to each request with ``SIZE`` bytes, at once or from one of a few threads."""

    def __init__(self, is_late):
        self.slots_threads = ThreadCache("slots", soft_limit=SLOTS, idle_seconds=0.2)
        self.slots = Slots(SLOTS, self.slots_threads)
        self.is_late = is_late
        self.served = 0
        self.began = 0
        super().__init__()

    def serve(self, frame, may_block=True):
        if not self.is_late:
            return self.reply(frame)
        self.served += 1
        release_reader()
        deferred = Deferred()

        def run():
            if not deferred.hold(lambda: self.slots.submit(run)):
                deferred.set(self.reply(frame))

        self.slots.submit(run)
        return deferred

    def reply(self, frame):
        self.began += 1
        return Frame(Kind.VALUE, 0, 1, frame.call_id, data=b"", buffers=[bytes(SIZE)])

    def close(self):
        super().close()
        self.slots_threads.close()


@pytest.fixture(params=[False, True], ids=["at once", "late"])
def callee(request):
    callee = LargeReplies(request.param)
    yield callee
    callee.close()


@pytest.fixture
def connect(callee, threads, request):
    """Connect to the callee; nothing is read on the connection but what the test reads."""
    streams = []

    def connect_once(is_bulk=False):
        connection = dial(callee.server, request.param)
        authenticate(connection, is_bulk=is_bulk)
        prepare(connection)
        streams.append(Stream(connection, threads, lambda unsent: None, opened_here=True))
        return streams[-1]

    yield connect_once
    for each in streams:
        each.close()


def read(stream):
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        try:
            message = stream.read()
        except TimeoutError:
            continue
        stream.handled()
        return message
    raise AssertionError("nothing came")


def is_still(get, seconds=0.5):
    """Return whether a number does not change any more."""
    before = get()
    time.sleep(seconds)
    return before == get()


@pytest.mark.parametrize(
    "connect", [socket.AF_UNIX, socket.AF_INET], ids=["unix", "tcp"], indirect=True
)
class TestPeerThatDoesNotRead:
    @pytest.mark.parametrize("opens", [True, False], ids=["opens both", "opens one"])
    def test_it_gets_a_bounded_number_of_replies_and_all_when_it_reads(
        self, callee, connect, opens
    ):
        caller = connect()
        is_local = caller.shares_memory
        large = caller if is_local else connect(is_bulk=True) if opens else None
        for number in range(1, CALLS + 1):
            caller.send(number, frame(number))
        assert eventually(lambda: callee.began > 0 and is_still(lambda: callee.began))
        assert callee.began <= LIMIT // SIZE + SLACK
        large = large or connect(is_bulk=True)
        seen = set()
        for _ in range(CALLS):
            message = read(large)
            (buffer,) = message.buffers
            assert len(buffer) == SIZE
            seen.add(message.number)
        assert seen == {*range(1, CALLS + 1)}
        if not is_local:
            assert {read(caller).number for _ in range(CALLS)} == seen

    def test_its_connection_can_be_closed_meanwhile(self, callee, connect):
        caller = connect()
        for number in range(1, CALLS + 1):
            caller.send(number, frame(number))
        assert eventually(lambda: callee.began >= LIMIT // SIZE)
        caller.close()
        (connection,) = callee.server._connections or [None]
        assert eventually(lambda: connection is None or connection._closed)
        # calls that had arrived run, as those of any caller that died
        assert not callee.is_late or eventually(lambda: callee.began == callee.served)
        assert eventually(lambda: callee.server._bulk.is_empty)


@FAMILIES
def test_a_caller_that_reads_is_not_slowed_to_a_stop(callee, family, threads):
    """Each waits for its replies only, whatever was sent: more than the limit in all."""
    connection: Any = CallerConnection(
        Member("callee", "bob", 1), Owner(callee, family), threads, ReaderWatchdog()
    )
    try:
        for number in range(1, 3 * LIMIT // SIZE):
            reply = connection.call(frame(number)).wait(WAIT_SECONDS)
            assert len(reply.buffers[0]) == SIZE
    finally:
        end(connection)


@FAMILIES
def test_two_peers_that_call_one_another_with_large_messages_do_not_wait_for_one_another(
    family, threads
):
    some = random.Random(3)
    sizes = [some.choice([10, SIZE, LIMIT + 1, 2 * LIMIT]) for _ in range(20)]
    callees, connections = [], []
    for name in (f"first-{os.getpid()}", f"second-{os.getpid()}"):
        callees.append(Callee(name))
        owner, watchdog = Owner(callees[-1], family, name), ReaderWatchdog()
        connections.append(CallerConnection(Member(name, name, 1), owner, threads, watchdog))
    to_second: Any = connections[1]
    to_first: Any = connections[0]

    def call_back(request):
        """At the second: call the first with what came, and reply with what that replies."""
        release_reader()
        reply = to_first.call(frame(request.call_id, b"", request.buffers)).wait(WAIT_SECONDS)
        assert len(reply.buffers[0]) == len(request.buffers[0])
        return b"done"

    callees[1].answer = call_back
    done = threading.Semaphore(0)
    outcomes = []
    try:
        for number, size in enumerate(sizes, 1):
            call = to_second.call(frame(number, b"", [bytes(size)]))
            call.on_done(lambda outcome: (outcomes.append(outcome), done.release()))
        assert all(done.acquire(timeout=WAIT_SECONDS) for _ in sizes)
        assert sorted(len(outcome.value.buffers[0]) for outcome in outcomes) == sorted(sizes)
    finally:
        for each in connections:
            end(each)
        for callee in callees:
            callee.close()
