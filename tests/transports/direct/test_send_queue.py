"""Writing messages: what an interrupt leaves, and what is sent of memory that changes."""

import contextlib
import socket
from typing import Any

import pytest
from conftest import eventually

from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._transports.direct.outgoing import MAX_PARTS, SEND_BYTES
from rayrpc._transports.direct.send_queue import SendQueue
from rayrpc._transports.direct.stream import Stream
from rayrpc._transports.direct.wire import prepare

BIG = bytes(8 << 20)  # more than a connection takes while nobody reads


@pytest.fixture
def ends():
    near, far = socket.socketpair()
    with near, far:
        for end in (near, far):
            prepare(end)
        yield near, far


@pytest.fixture
def threads():
    threads = ThreadCache("send-queue-test", idle_seconds=0.2)
    threads.start()
    yield threads
    threads.close()


class Recorder:
    """A connection that takes all at once."""

    def __init__(self):
        self.taken: list[list[bytes]] = []  # by system call

    def send(self, part, flags):
        return self.sendmsg([part], (), flags)

    def sendmsg(self, parts, ancillary, flags):
        self.taken.append([bytes(part) for part in parts])
        return sum(map(len, parts))


@pytest.mark.parametrize(
    "sizes",
    [
        (1,),
        (SEND_BYTES,),
        (SEND_BYTES + 1,),
        (100, 5 * SEND_BYTES),
        (100, SEND_BYTES - 100, 7),
        (*[SEND_BYTES // 3] * 10, 4 * SEND_BYTES, 5),
        (10,) * (3 * MAX_PARTS),
    ],
    ids=lambda sizes: f"{len(sizes)} parts of {max(sizes)}",
)
def test_a_system_call_sends_so_many_bytes_and_parts_at_most(threads, sizes):
    connection = Recorder()
    parts = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    assert SendQueue(connection, threads, print).send(1, list(parts))  # type: ignore[arg-type]
    assert b"".join(b"".join(each) for each in connection.taken) == b"".join(parts)
    for taken in connection.taken[:-1]:
        assert sum(map(len, taken)) == SEND_BYTES or len(taken) == MAX_PARTS
    assert sum(map(len, connection.taken[-1])) <= SEND_BYTES


def interrupted_once(function):
    """Raise KeyboardInterrupt at the first call."""
    calls: list[Any] = []

    def call(*args):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return function(*args)

    return call


@pytest.mark.parametrize("second", ["_hand_over", "_on_interrupt"])
def test_a_writer_that_is_interrupted_twice_is_followed_by_another_thread(
    ends, threads, monkeypatch, second
):
    near, far = ends
    queue = SendQueue(near, threads, lambda unsent: None)
    for name in ("_write", second):
        monkeypatch.setattr(queue, name, interrupted_once(getattr(queue, name)))
    with pytest.raises(KeyboardInterrupt):
        queue.send(1, [b"one"])
    if second == "_on_interrupt":  # only maintenance finds that
        assert not queue.is_empty
        queue.flush_piggybacked()
    assert far.recv(3) == b"one"
    assert eventually(lambda: queue.is_empty)
    assert queue.send(2, [b"two"]) and far.recv(3) == b"two"


def test_a_message_behind_one_that_is_being_written_may_be_unsent(ends, threads):
    near, _ = ends
    queue = SendQueue(near, threads, lambda unsent: None)
    assert not queue.send(1, [BIG])
    assert not queue.send(2, [b"two"])
    assert queue.may_be_unsent(2) and not queue.may_be_unsent(1)


def test_a_request_keeps_its_bytes_if_another_thread_begins_to_write_just_before_it(
    ends, threads, monkeypatch
):
    near, _ = ends
    stream = Stream(near, threads, lambda unsent: None, True)
    big = Frame(Kind.CALL, 0, 1, 1, data=b"x", buffers=[BIG])
    big.is_stable = True
    monkeypatch.setattr(SendQueue, "is_empty", True)  # when the thread looked
    with contextlib.closing(stream):
        stream._pool = None
        assert not stream.send(1, big)
        data = bytearray(b"as it was")
        frame = Frame(Kind.CALL, 0, 1, 2, data=b"x", buffers=[data])
        assert not stream.send(2, frame)
        data[:] = bytes(len(data))
        assert bytes(frame.buffers[0]) == b"as it was"
