"""Malformed messages: which error they give, and that they end their connection at both ends."""

import collections
import logging
import random
import socket
import struct
import threading
import zlib
from typing import Any

import pytest
from direct_ends import WAIT_SECONDS, Owner, authenticate, dial, frame

from rayrpc._concurrency.reader import ReaderWatchdog
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Fork, ForkRequest, Frame, FrameError, Kind
from rayrpc._transports.direct import message_reader, wire
from rayrpc._transports.direct.connection import CallerConnection
from rayrpc._transports.direct.message_reader import CAPACITY, MessageReader
from rayrpc._transports.direct.shared_memory import is_supported
from rayrpc._transports.direct.stream import SHARED_BYTES, Stream
from rayrpc._transports.direct.wire import (
    FREED,
    RELEASED,
    SHARED,
    SharedBuffers,
    message_parts,
    notice_part,
    prepare,
    shared_parts,
)
from rayrpc.errors import CallLostError, SerializationError

# Mutated messages and mutated frames in all.
MUTATED = 200_000

RREF, FORK = GloballyUniqueId(1, 2), GloballyUniqueId(2, 3)
FRAMES = [
    Frame(Kind.CALL, 5, 1, 7, data=b"pickle" * 9, is_async=True),
    Frame(Kind.REMOTE, 5, 1, 7, rref_id=RREF, fork_id=FORK, data=b"pickle", ack=3),
    Frame(Kind.FETCH, 5, 1, 7, rref_id=RREF),
    Frame(Kind.CONTROL, 5, 1, 7, control=(ForkRequest(1, RREF, FORK),) * 3),
    Frame(Kind.VALUE, 5, 1, 7, meta={"autograd": (1, 2, ())}, forks=(Fork(RREF, FORK, 1, 2),)),
    Frame(Kind.ERROR, 5, 1, 7, data=b"error"),
]
# A receive buffer of this size makes the larger of these messages large ones, and the test quick.
SMALL_CAPACITY = 256
BUFFERS = [(), (b"x" * 40,), (b"", b"y" * 9, b""), (b"z" * SMALL_CAPACITY, b"z")]


def to_bytes(frame, buffers=()):
    return b"".join(message_parts(7, frame.pack(), [memoryview(b) for b in buffers]))


def some_messages():
    yield message_parts(7, b"", [])[0]
    yield notice_part(7, RELEASED)
    yield notice_part(7, FREED)
    for each in FRAMES:
        yield shared_parts(7, each.pack(), SharedBuffers(1, (100_000, 0, 5)))[0]
        for buffers in BUFFERS:
            yield to_bytes(each, buffers)
    yield to_bytes(Frame(Kind.CALL, 5, 1, 7, data=b"d" * SMALL_CAPACITY))


NUMBERS = [0, 1, 2, 24, 1 << 10, 1 << 29, 1 << 30, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
NUMBERS += [1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def mutate(some, data):
    """Change some bytes, or replace some number, within the first bytes or anywhere."""
    changed = bytearray(data)
    for _ in range(some.choice((1, 1, 2, 3))):
        if not changed:
            break
        position = some.randrange(min(len(changed), some.choice((24, 64, 200, 1 << 20))))
        how = some.randrange(5)
        if how == 0:
            changed[position] ^= 1 << some.randrange(8)
        elif how == 1:
            changed[position] = some.randrange(256)
        elif how == 2:
            position &= ~3
            number = some.choice(NUMBERS) + some.choice((0, 0, -1, 1)) & (1 << 64) - 1
            packed = struct.pack("<Q", number)[: some.choice((4, 8))]
            changed[position : position + len(packed)] = packed
        elif how == 3:
            del changed[position : position + some.choice((1, 8, 1 << 20))]
        else:
            changed[position:position] = some.randbytes(some.choice((1, 4, 8)))
    return bytes(changed)


class Source:
    """A connection on which some bytes arrive, and then its end."""

    def __init__(self, data):
        self.data = memoryview(data)

    def fileno(self):
        return 0

    def recv_into(self, view):
        count = min(len(view), len(self.data))
        view[:count] = self.data[:count]
        self.data = self.data[count:]
        return count


def connection_with(data) -> Any:
    return Source(data)


def read_all(data):
    """Return the messages in some bytes, and how they end."""
    reader = MessageReader(connection_with(data))
    messages = []
    while True:
        try:
            messages.append(reader.read())
            reader.handled()
        except EOFError as exc:
            return messages, exc


class TestMutated:
    @pytest.fixture(autouse=True)
    def small_capacity(self, monkeypatch):
        monkeypatch.setattr(message_reader, "CAPACITY", SMALL_CAPACITY)

    def test_a_mutated_message_gives_a_message_or_the_error_and_takes_no_more_than_it_says(
        self, monkeypatch
    ):
        some = random.Random(1)
        bases = list(some_messages())
        allocate = message_reader._allocate
        allocated = []

        def recorded(size, how):
            allocated.append(size)
            return allocate(min(size, 1 << 20), how)  # what is not there is not filled either

        monkeypatch.setattr(message_reader, "_allocate", recorded)
        ends: collections.Counter[Any] = collections.Counter()
        for _ in range(MUTATED // 2):
            data = mutate(some, some.choice(bases))
            allocated.clear()
            reader = MessageReader(connection_with(data))
            try:
                reader.read()
            except EOFError as exc:
                ends[type(exc)] += 1
            else:
                ends["read"] += 1
            if allocated:
                assert sum(allocated) <= struct.unpack_from("<Q", data, 8)[0]
        assert min(ends[FrameError], ends[EOFError], ends["read"]) > MUTATED // 100, ends

    def test_a_mutated_frame_gives_a_frame_or_the_error(self):
        some = random.Random(2)
        heads = [each.pack() for each in FRAMES]
        ends: collections.Counter[Any] = collections.Counter()
        for _ in range(MUTATED // 2):
            try:
                ends[type(Frame.unpack(mutate(some, some.choice(heads))))] += 1
            except FrameError:
                ends[FrameError] += 1
        assert min(ends[Frame], ends[FrameError]) > MUTATED // 100, ends

    def test_what_is_not_mutated_arrives(self):
        for data in some_messages():
            (message,), end = read_all(data)
            assert message.number == 7 and type(end) is EOFError


def prefix(length, head_length, kind, number=7):
    return struct.pack("<QQII", number, length, head_length, kind)


HEAD = FRAMES[0].pack()
N = len(HEAD)
LONG = 1 << 40

MALFORMED = {
    "head longer than the rest": prefix(N, N + 1, 0) + HEAD,
    "head shorter than the rest": prefix(N, N - 1, 0) + HEAD,
    "large head longer than the rest": prefix(CAPACITY, (1 << 32) - 1, 0) + bytes(CAPACITY),
    "unknown kind": prefix(N, N, SHARED | FREED | 1) + HEAD,
    "notice with a body": prefix(N, N, RELEASED) + HEAD,
    "notices with a count": prefix(0, 0, RELEASED | 1),
    "more buffers than there is room for": prefix(N, N, (1 << 29) - 1) + HEAD,
    "more buffers than the large rest": prefix(LONG, N, (1 << 29) - 1)[:20] + b"\xff" * 9,
    "buffers that are too long": prefix(N + 9, N, 1) + struct.pack("<Q", 2) + HEAD + b"x",
    "buffers that are too short": prefix(N + 9, N, 1) + struct.pack("<Q", 0) + HEAD + b"x",
    "large buffers that are too long": prefix(LONG, N, 1) + struct.pack("<Q", LONG) + HEAD,
    "large buffers that are too short": prefix(LONG, N, 1) + struct.pack("<Q", 5) + HEAD,
    "buffers without a head": prefix(9, 0, 1) + struct.pack("<Q", 1) + b"x",
    "shared memory without buffers": prefix(N + 8, N, SHARED) + bytes(8) + HEAD,
    "shared buffers that are also there": prefix(N + 17, N, SHARED | 1) + bytes(16) + HEAD + b"x",
    "a frame of another call": prefix(N, N, 0, number=8) + HEAD,
    "a frame of an unknown kind": prefix(N, N, 0) + bytes([len(Kind)]) + HEAD[1:],
    "unknown flags": prefix(N, N, 0) + HEAD[:1] + b"\x10" + HEAD[2:],
    "a frame without its RRef": prefix(N, N, 0) + bytes([Kind.FETCH]) + HEAD[1:],
    "identities that are cut": prefix(40, 40, 0) + FRAMES[2].pack()[:40],
    "a short head": prefix(5, 5, 0) + HEAD[:5],
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_message_is_refused(data):
    messages, end = read_all(data)
    assert messages == [] and type(end) is FrameError


def test_damaged_rref_messages_are_not_unpickled():
    head = FRAMES[3].pack()
    more = head[38:]
    assert struct.unpack_from("<II", head, 30) == (len(more), zlib.crc32(more))
    # the memo of this one has 2**32 places
    bomb = b"\x80\x05Nr\xff\xff\xff\xff."
    with pytest.raises(FrameError, match="damaged"):
        Frame.unpack(head[:30] + struct.pack("<II", len(bomb), 1) + bomb)
    with pytest.raises(FrameError, match="unpickled"):
        Frame.unpack(head[:30] + struct.pack("<II", 2, zlib.crc32(b"no")) + b"no")


def test_a_head_of_4_gib_is_refused_by_its_sender(monkeypatch):
    monkeypatch.setattr(wire, "MAX_HEAD", N - 1)
    with pytest.raises(SerializationError, match=rf"{N} bytes"):
        message_parts(7, HEAD, [])


class TestSharedMemory:
    pytestmark = pytest.mark.skipif(not is_supported(), reason="no files without a name here")

    @pytest.fixture
    def threads(self):
        cache = ThreadCache("malformed-test", soft_limit=8, idle_seconds=0.1)
        yield cache
        cache.close()

    @pytest.fixture
    def ends(self, threads):
        pair = socket.socketpair()
        for each in pair:
            prepare(each)
        made = [Stream(end, threads, lambda unsent: None, i == 0) for i, end in enumerate(pair)]
        yield made
        for end in made:
            end.close()

    def send_shared(self, ends, segment, lengths):
        """Send a message whose memory is named by hand; expect that it ends the connection."""
        sender, receiver = ends
        sender.send(1, frame(1, buffers=[bytes(SHARED_BYTES)]))  # in segment 1
        assert receiver.read().shared.segment == 1
        receiver.handled()
        (part,) = shared_parts(7, HEAD, SharedBuffers(segment, lengths))
        sender.socket.sendall(part)
        with pytest.raises(FrameError):
            receiver.read()
        with pytest.raises(EOFError):
            sender.read()

    def test_a_segment_that_was_never_sent_ends_the_connection(self, ends):
        self.send_shared(ends, 2, (10,))

    @pytest.mark.parametrize("lengths", [(1 << 30,), (1 << 63, 1 << 63), ((1 << 64) - 1,)])
    def test_buffers_that_are_longer_than_their_segment_end_the_connection(self, ends, lengths):
        self.send_shared(ends, 1, lengths)

    def test_a_connection_without_shared_memory_has_no_shared_buffers(self, threads):
        with socket.create_server(("127.0.0.1", 0)) as server:
            near = socket.create_connection(server.getsockname())
            far = server.accept()[0]
        prepare(far)
        stream: Any = Stream(far, threads, lambda unsent: None, False)
        near.sendall(shared_parts(7, HEAD, SharedBuffers(1, (10,)))[0])
        with pytest.raises(FrameError):
            stream.read()
        stream.close()
        near.close()


class TestBothSides:
    def peer_of(self, callee):
        """Return an authenticated connection."""
        connection = dial(callee.server, socket.AF_INET)
        authenticate(connection)
        return connection

    @pytest.mark.parametrize(
        "data",
        [MALFORMED["head longer than the rest"], MALFORMED["a short head"], prefix(0, 0, 0)],
        ids=["message", "frame", "request without a frame"],
    )
    def test_a_callee_closes_a_connection_with_a_malformed_request_and_serves_the_others(
        self, callee, data, caplog
    ):
        caplog.set_level(logging.WARNING, "rayrpc")
        with self.peer_of(callee) as good, self.peer_of(callee) as bad:
            bad.sendall(to_bytes(Frame(Kind.CALL, 0, 0, 7, data=b"first")))
            reply = to_bytes(Frame(Kind.VALUE, 0, 1, 7, data=b"first"))
            assert bad.recv(len(reply), socket.MSG_WAITALL) == reply
            bad.sendall(data)
            assert bad.recv(1) == b""
            good.sendall(to_bytes(Frame(Kind.CALL, 0, 0, 7, data=b"first")))
            assert good.recv(len(reply), socket.MSG_WAITALL) == reply
        assert "closed a connection whose peer sent" in caplog.text

    @pytest.mark.parametrize("waits", [True, False], ids=["waits", "calls back"])
    @pytest.mark.parametrize("name", ["head longer than the rest", "a short head", "unknown flags"])
    def test_a_malformed_reply_ends_the_calls_of_its_connection_with_an_error(self, name, waits):
        near, far = socket.socketpair()
        for end in (near, far):
            prepare(end)
        far.settimeout(WAIT_SECONDS)

        owner: Any = Owner(None, socket.AF_UNIX)
        owner.connect = lambda peer, is_bulk, pair: near
        threads = ThreadCache("malformed-test", soft_limit=8, idle_seconds=0.1)
        watchdog = ReaderWatchdog()
        connection = CallerConnection(Member("t", "bob", 1), owner, threads, watchdog)
        try:
            calls: list[Any] = [connection.call(frame(number)) for number in (7, 8)]
            errors: list[Any] = []
            done = threading.Semaphore(0)
            if not waits:
                for call in calls:
                    call.on_done(lambda outcome: (errors.append(outcome), done.release()))
            far.recv(1)
            far.sendall(MALFORMED[name])
            if waits:
                for call in calls:
                    with pytest.raises(CallLostError):
                        call.wait(WAIT_SECONDS)
            else:
                assert all(done.acquire(timeout=WAIT_SECONDS) for _ in calls)
                assert [type(outcome.error) for outcome in errors] == [CallLostError] * 2
            assert len(owner.lost) == 1
            while far.recv(1 << 16):
                pass  # the callee learns of it too
        finally:
            connection.fail(CallLostError("the test ends"))
            far.close()
            watchdog.close()
            threads.close()
