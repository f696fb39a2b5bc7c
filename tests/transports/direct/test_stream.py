"""Streams: when what is held back is written."""

import contextlib
import socket
import threading

import pytest

from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._transports.direct.message_reader import MessageReader
from rayrpc._transports.direct.stream import Stream
from rayrpc._transports.direct.wire import RELEASED, message_parts, notice_part, prepare

WAIT_SECONDS = 60.0


def request(number):
    head = Frame(Kind.CALL, 0, 1, number).pack()
    return b"".join(message_parts(number, head, []))


def large_request(number):
    head = Frame(Kind.CALL, 0, 1, number).pack()
    return b"".join(message_parts(number, head, [memoryview(bytes(1_000_000))]))


@pytest.fixture
def threads():
    threads = ThreadCache("stream-test", idle_seconds=0.2)
    yield threads
    threads.close()


@pytest.mark.parametrize(
    "rest",
    [
        notice_part(7, RELEASED),
        notice_part(7, RELEASED) * 3,
        notice_part(7, RELEASED) + request(2)[:30],
        request(2)[:10],
        large_request(2)[:100_000],
    ],
    ids=[
        "a notice",
        "notices",
        "a notice and a part of a request",
        "a part of a request",
        "a part of a large one",
    ],
)
def test_a_reply_does_not_wait_for_what_the_peer_may_never_send(threads, rest):
    """It is held back while there is more to read; then, only such comes."""
    near, far = socket.socketpair()
    with near, far:
        for each in (near, far):
            prepare(each, WAIT_SECONDS)
        stream = Stream(near, threads, lambda unsent: None, opened_here=False)
        stream._pool = None
        far.sendall(request(1) + rest)
        assert stream.read().number == 1
        stream.handled()
        stream.send(1, Frame(Kind.VALUE, 0, 0, 1), more=stream.has_more)
        assert not stream.is_idle

        def read():
            with contextlib.suppress(EOFError):
                while True:
                    with contextlib.suppress(TimeoutError):
                        stream.read()
                        stream.handled()

        reader = threading.Thread(target=read)
        reader.start()
        assert MessageReader(far).read().number == 1
        far.close()
        reader.join(WAIT_SECONDS)
        assert not reader.is_alive()
