"""Messages on a connection, read and written; on socket pairs, without Ray."""

import contextlib
import functools
import itertools
import os
import random
import signal
import socket
import threading
import time

import pytest
from conftest import eventually
from interrupting import strikes

from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._transports.direct import message_reader, wire
from rayrpc._transports.direct.message_reader import CAPACITY, RECEIVE_BYTES, MessageReader
from rayrpc._transports.direct.send_queue import SendQueue
from rayrpc._transports.direct.wire import message_parts, prepare


def frame(call_id, data=b"", buffers=()):
    return Frame(Kind.CALL, 0, 0, call_id, data=data, buffers=list(buffers))


def to_parts(call_id, frame):
    return message_parts(call_id, frame.pack(), [memoryview(b).cast("B") for b in frame.buffers])


@pytest.fixture
def ends():
    pair = socket.socketpair()
    for end in pair:
        prepare(end)
    yield pair
    for end in pair:
        end.close()


@pytest.fixture
def threads():
    cache = ThreadCache("reader-test", soft_limit=8, idle_seconds=0.1)
    yield cache
    cache.close()


def read(inbox):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            message = inbox.read()
        except TimeoutError:
            continue
        inbox.handled()
        return message
    raise AssertionError("nothing came")


SIZES = [
    (),
    (0,),
    (10,),
    (0, 3, 0),
    (CAPACITY,),
    (CAPACITY - 200, 100),
    (1, CAPACITY * 3, 0, 7),
    tuple([16] * 10_000),
]


def messages():
    some = random.Random(1)
    for call_id in range(120):
        sizes = some.choice(SIZES)
        yield frame(call_id, os.urandom(some.choice([0, 1, 500])), map(os.urandom, sizes))


class Interrupted(Exception):
    """Stands in for KeyboardInterrupt."""


class TestInterrupts:
    @pytest.fixture
    def armed(self):
        """Raise an exception at the next alarm if something is in this list, and empty it.

        So none is raised while another is handled, nor outside of the test.
        """
        armed: list[bool] = []

        def interrupt(number, stack):
            if armed:
                armed.clear()
                raise Interrupted

        before = signal.signal(signal.SIGALRM, interrupt)
        yield armed
        armed.clear()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    def test_one_while_reading_loses_no_byte_or_is_known_to(self, armed):
        """It usually comes while the reader waits; then reading goes on where it was."""
        some = random.Random(5)
        deadline = time.monotonic() + 60
        intact = 0
        while intact < 500 and time.monotonic() < deadline:
            intact += self.interrupt_until_it_is_not_intact(armed, some, 500 - intact)
        assert intact > 0

    def interrupt_until_it_is_not_intact(self, armed, some, at_most):
        """Read from a new connection; return how many interrupts left its reader intact."""

        def send():
            for number in itertools.count():
                time.sleep(some.choice([0, 0.0002, 0.001, 0.02]))
                with contextlib.suppress(OSError):
                    for part in to_parts(number, frame(number, b"h" * some.choice([1, 200]))):
                        ends[0].sendall(part)
                if stop.is_set():
                    return

        ends = socket.socketpair()
        for end in ends:
            prepare(end)
        stop = threading.Event()
        inbox = MessageReader(ends[1])
        writer = threading.Thread(target=send)
        writer.start()
        numbers = []
        intact = 0
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0007)
            while intact < at_most:
                try:
                    armed.append(True)
                    while True:
                        number = inbox.read().number
                        if numbers[-1:] != [number]:  # else it was not noted as handled
                            numbers.append(number)
                        inbox.handled()
                except Interrupted:
                    if not inbox.is_intact:
                        break
                    intact += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            armed.clear()
            stop.set()
            writer.join(60)
            for end in ends:
                end.close()
        assert numbers == list(range(len(numbers)))
        return intact

    def test_one_at_any_point_loses_nothing(self, threads):
        large = b"x" * 2 * CAPACITY
        sent = [frame(1), frame(2, b"data", [b"buffer"]), frame(3, b"", [large, b"y"])]
        data = b"".join(bytes(part) for f in sent for part in to_parts(f.call_id, f))
        for strike in strikes([message_reader.__file__, wire.__file__]):
            near, far = socket.socketpair()
            with near, far:
                prepare(near)
                inbox = MessageReader(near)
                got = []

                def read_all(inbox=inbox, got=got):
                    while len(got) < len(sent):
                        message = inbox.read()
                        if message not in got:
                            got.append(message)
                        inbox.handled()

                threads.submit(functools.partial(far.sendall, data))
                strike(read_all)
                assert inbox.is_intact, f"at point {strike.number}"
                read_all()
                assert [message.frame() for message in got] == sent, f"at point {strike.number}"
        assert strike.number > 100


class TestReading:
    @pytest.mark.parametrize("piece", [1, 23, 24, 25, 4096, 1 << 20])
    def test_messages_arrive_whole_however_they_are_cut(self, ends, piece):
        sent = [frame(1, b"a", [b"xyz"]), frame(2, b"b" * 100), frame(3, b"", [b"", b"1" * 999])]
        if piece > 1:
            sent += list(messages())
        stream = b"".join(bytes(part) for f in sent for part in to_parts(f.call_id, f))

        def write():
            for start in range(0, len(stream), piece):
                ends[0].sendall(stream[start : start + piece])

        threading.Thread(target=write, daemon=True).start()
        inbox = MessageReader(ends[1])
        for expected in sent:
            message = read(inbox)
            got = message.frame()
            assert (message.number, got.data) == (expected.call_id, expected.data)
            assert [bytes(b) for b in got.buffers] == expected.buffers

    def test_a_system_call_receives_so_many_bytes_at_most(self, ends):
        asked = []

        class Recorder(socket.socket):
            def recv_into(self, buffer, *rest, **keywords):
                asked.append(len(buffer))
                return super().recv_into(buffer, *rest, **keywords)

        sizes = (RECEIVE_BYTES - 1, 5 * RECEIVE_BYTES, 3)
        sent = frame(1, b"", [os.urandom(size) for size in sizes])
        message = b"".join(map(bytes, to_parts(1, sent)))
        threading.Thread(target=ends[0].sendall, args=(message,), daemon=True).start()
        with Recorder(fileno=os.dup(ends[1].fileno())) as connection:
            got = read(MessageReader(connection))
        assert [bytes(buffer) for buffer in got.buffers] == sent.buffers
        assert max(asked) == RECEIVE_BYTES

    def test_buffers_are_the_receivers_own_and_writable(self, ends):
        for size in (10, CAPACITY * 2):
            message = b"".join(map(bytes, to_parts(1, frame(1, b"", [b"x" * size]))))
            threading.Thread(target=ends[0].sendall, args=(message,), daemon=True).start()
            inbox = MessageReader(ends[1])
            (buffer,) = read(inbox).buffers
            buffer[0] = 7
            assert bytes(buffer[:2]) == b"\x07x"

    def test_a_read_comes_back_when_nothing_arrives_and_goes_on_later(self, ends):
        inbox = MessageReader(ends[1])
        (part,) = to_parts(5, frame(5, b"data"))
        ends[0].sendall(part[:30])
        with pytest.raises(TimeoutError):
            inbox.read()
        ends[0].sendall(part[30:])
        assert inbox.read().frame().data == b"data"

    def test_a_message_is_read_until_it_is_handled(self, ends):
        inbox = MessageReader(ends[1])
        for number in (1, 2):
            ends[0].sendall(to_parts(number, frame(number))[0])
        assert inbox.read() is inbox.read()
        assert inbox.wait(0) and not inbox.is_between_messages
        inbox.handled()
        assert read(inbox).number == 2
        assert not inbox.wait(0) and inbox.is_between_messages

    def test_the_end_of_the_connection_is_an_end_of_file(self, ends):
        inbox = MessageReader(ends[1])
        ends[0].sendall(to_parts(5, frame(5))[0][:20])
        ends[0].close()
        with pytest.raises(EOFError):
            inbox.read()

    def test_a_note_that_a_reply_comes_elsewhere_has_no_head(self, ends):
        ends[0].sendall(message_parts(9, b"", [])[0])
        message = MessageReader(ends[1]).read()
        assert (message.number, message.content, message.notice) == (9, None, 0)


class TestWriting:
    def test_what_many_threads_send_arrives_once_each(self, ends, threads):
        send_queue = SendQueue(ends[0], threads, lambda unsent: None)
        sent = list(messages())
        parts = [
            threading.Thread(target=self.send, args=(send_queue, sent[i::6])) for i in range(6)
        ]
        for thread in parts:
            thread.start()
        inbox = MessageReader(ends[1])
        got = {message.number: message.frame() for message in (read(inbox) for _ in sent)}
        assert len(got) == len(sent)
        for expected in sent:
            assert [bytes(b) for b in got[expected.call_id].buffers] == expected.buffers

    def send(self, send_queue, frames):
        for each in frames:
            send_queue.send(each.call_id, to_parts(each.call_id, each))

    def test_a_peer_that_does_not_read_never_holds_the_sender(self, ends, threads):
        send_queue = SendQueue(ends[0], threads, lambda unsent: None)
        for i in range(40):
            send_queue.send(i, to_parts(i, frame(i, b"", [b"x" * 100_000])))
        assert not send_queue.is_empty  # all were accepted before the peer has read any
        inbox = MessageReader(ends[1])
        assert [read(inbox).number for _ in range(40)] == list(range(40))

    def test_a_cut_tells_which_messages_were_not_sent(self, ends, threads):
        broken = []
        send_queue = SendQueue(ends[0], threads, broken.append)
        for i in range(10):
            send_queue.send(i, to_parts(i, frame(i, b"", [b"x" * 200_000])))
        ends[1].close()
        assert eventually(lambda: broken)
        (unsent,) = broken
        assert unsent == list(range(unsent[0], 10))
        assert 0 < unsent[0] < 10  # a message that was sent in part is not among them
        send_queue.send(11, to_parts(11, frame(11)))
        assert broken[1:] == [[11]]


@pytest.mark.parametrize("size", [10, 2 * CAPACITY])
def test_a_message_has_begun_with_its_first_byte(ends, size):
    near, far = ends
    near.setblocking(False)
    inbox = MessageReader(near)
    data = b"".join(to_parts(1, frame(1, b"x" * size))) + b"".join(to_parts(2, frame(2)))
    with pytest.raises(TimeoutError):
        inbox.read()
    assert inbox.is_between_messages
    for part in (data[:1], data[1:30]):
        far.sendall(part)
        with pytest.raises(TimeoutError):
            inbox.read()
        assert not inbox.is_between_messages
    far.sendall(data[30:])
    assert read(inbox).number == 1
    assert inbox.is_between_messages == (size > CAPACITY)  # else the next one was received, too
    assert read(inbox).number == 2
    assert inbox.is_between_messages
