"""Shared memory of a connection: which buffers use it, who may write to it, when it is reused."""

import errno
import gc
import os
import random
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from interrupting import strikes

from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._transports.direct import descriptors as descriptors_module
from rayrpc._transports.direct import message_reader, shared_memory, wire
from rayrpc._transports.direct import stream as stream_module
from rayrpc._transports.direct.shared_memory import Segment, SegmentPool, offsets
from rayrpc._transports.direct.stream import SHARED_BYTES, Stream
from rayrpc._transports.direct.wire import SharedBuffers, prepare, shared_parts

LARGE = 100_000
WAIT_SECONDS = 60.0

pytestmark = pytest.mark.skipif(
    not shared_memory.is_supported(), reason="this system has no files without a name"
)


def frame(call_id, buffers=()):
    return Frame(Kind.CALL, 0, 0, call_id, data=b"head", buffers=list(buffers))


def read(stream):
    end = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < end:
        try:
            message = stream.read()
        except TimeoutError:
            continue
        stream.handled()
        return message
    raise AssertionError("nothing came")


def send_and_read(sender, receiver, buffers=(), call_id=1):
    sender.send(call_id, frame(call_id, buffers))
    return read(receiver)


pass_message: Any = send_and_read  # mypy takes `*ends` for any number of arguments


def echo(stream):
    """Reply to one call with its buffers; return where they were."""
    message = read(stream)
    shared, call = message.shared, message.frame()
    del message
    stream.send(call.call_id, call, release_buffers=True)
    return shared


def contents(message):
    return [bytes(buffer) for buffer in message.buffers]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def mappings():
    return Path("/proc/self/maps").read_text().count("memfd:rayrpc")


@pytest.fixture
def threads():
    cache = ThreadCache("memory-test", soft_limit=8, idle_seconds=0.1)
    yield cache
    cache.close()


def open_ends(threads, pair):
    """Return both ends of a connection: the one that opened it, and the one that accepted."""
    for end in pair:
        prepare(end)
    return [Stream(end, threads, lambda unsent: None, i == 0) for i, end in enumerate(pair)]


@pytest.fixture(params=["unix"])
def ends(request, threads):
    gc.collect()
    pair = socket.socketpair() if request.param == "unix" else tcp_pair()
    ends = open_ends(threads, pair)
    yield ends
    for end in ends:
        end.close()


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


class TestWhichBuffersAreShared:
    @pytest.mark.parametrize("size", [SHARED_BYTES, LARGE, 5_000_000, 1 << 23])
    def test_large_buffers_arrive_by_shared_memory_both_ways(self, ends, size):
        data = os.urandom(size)
        for sender, receiver in (ends, ends[::-1]):
            message = pass_message(sender, receiver, [data])
            assert message.shared is not None and message.frame().data == b"head"
            assert contents(message) == [data]

    def test_small_buffers_go_in_line(self, ends):
        message = pass_message(*ends, [b"x" * (SHARED_BYTES - 1)])
        assert message.shared is None and contents(message) == [b"x" * (SHARED_BYTES - 1)]

    @pytest.mark.parametrize(
        "sizes",
        [(0, LARGE), (LARGE, 0), (0, 0, 3, LARGE, 0, 1), (1000,) * 70, (16,) * 2000 + (LARGE,)],
        ids=["empty first", "empty last", "mixed", "many that are large together", "thousands"],
    )
    def test_many_buffers_share_a_segment_and_stay_apart(self, ends, sizes):
        sent = [os.urandom(size) for size in sizes]
        message = pass_message(*ends, sent)
        assert message.shared is not None and contents(message) == sent
        for buffer in message.buffers:
            buffer[:] = b"\1" * len(buffer)
        assert contents(message) == [b"\1" * size for size in sizes]

    def test_empty_buffers_alone_need_no_memory(self, ends):
        message = pass_message(*ends, [b"", b""])
        assert message.shared is None and contents(message) == [b"", b""]

    @pytest.mark.parametrize("ends", ["tcp"], indirect=True)
    def test_tcp_never_shares_memory(self, ends):
        near, far = ends
        before = mappings()
        data = os.urandom(3 * LARGE)
        for sender, receiver in ((near, far), (far, near)):
            message = pass_message(sender, receiver, [data])
            assert message.shared is None and contents(message) == [data]
        assert not near.shares_memory and mappings() == before

    def test_buffers_go_in_line_while_no_segment_can_be_made(self, ends, monkeypatch):
        data = os.urandom(LARGE)

        def refuse(*_):
            raise OSError(errno.EMFILE, "too many")

        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse)
            message = pass_message(*ends, [data])
            assert message.shared is None and contents(message) == [data]
        assert pass_message(*ends, [data]).shared is not None

    def test_a_segment_that_cannot_be_mapped_leaves_no_descriptor(self, ends, monkeypatch):
        def refuse(*_, **__):
            raise OSError(errno.ENOMEM, "no memory")

        pass_message(*ends)
        before = descriptors()
        monkeypatch.setattr(shared_memory, "map_memory", refuse)
        assert pass_message(*ends, [b"x" * LARGE]).shared is None
        assert descriptors() == before

    def test_a_segment_that_may_shrink_ends_the_connection(self, ends, monkeypatch):
        pass_message(*ends)
        monkeypatch.setattr(shared_memory, "SEALS", 0)  # of the sender alone
        with pytest.raises(EOFError, match="not sealed"):
            pass_message(*ends, [b"x" * LARGE])

    def test_buffers_beyond_a_segments_end_end_the_connection(self, ends):
        near, far = ends
        beyond = SharedBuffers(pass_message(near, far, [bytes(LARGE)]).shared.segment, (1 << 40,))
        near._send_queue.send(2, shared_parts(2, frame(2).pack(), beyond))
        with pytest.raises(EOFError, match="do not fit"):
            read(far)

    def test_a_peer_that_does_not_read_holds_up_no_sender(self, ends):
        near, far = ends

        def send():
            for number in range(400):
                near.send(number, frame(number, [b"%5d" % number + bytes(SHARED_BYTES)]))

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        sender.join(60)
        assert not sender.is_alive()
        for number in range(400):
            message = read(far)
            assert message.number == number
            assert bytes(message.buffers[0][:5]) == b"%5d" % number


class TestOwnership:
    def test_later_changes_by_the_sender_are_not_seen(self, ends):
        source = bytearray(b"a" * LARGE)
        message = pass_message(*ends, [source])
        source[:] = b"b" * LARGE
        assert contents(message) == [b"a" * LARGE]

    def test_buffers_are_the_receivers_own_to_write(self, ends):
        near, far = ends
        source = bytearray(b"a" * LARGE)
        message = pass_message(near, far, [source])
        assert not message.buffers[0].readonly
        message.buffers[0][:] = b"c" * LARGE
        assert source == b"a" * LARGE
        assert contents(pass_message(near, far, [source])) == [b"a" * LARGE]
        assert contents(message) == [b"c" * LARGE]

    def test_a_segment_in_use_is_not_used_again(self, ends):
        near, far = ends
        kept = [pass_message(near, far, [b"%d" % i * LARGE], i) for i in range(5)]
        pass_message(far, near)  # brings the notices, if there were any
        assert near.send(9, frame(9, [b"9" * LARGE])) and contents(read(far)) == [b"9" * LARGE]
        assert len({message.shared.segment for message in kept}) == 5
        assert [contents(m) for m in kept] == [[b"%d" % i * LARGE] for i in range(5)]

    def test_one_remaining_buffer_keeps_its_segment(self, ends):
        near, far = ends
        message = pass_message(near, far, [b"a" * LARGE, b"b" * 10, b"c" * LARGE])
        number, small = message.shared.segment, message.buffers[1][2:5]
        del message
        pass_message(far, near, call_id=2)
        near.send(3, frame(3))
        read(far)
        other = pass_message(near, far, [b"d" * LARGE])
        assert other.shared.segment != number and bytes(small) == b"bbb"

    @pytest.mark.parametrize("closed", [(0,), (1,), (1, 0)], ids=["sender", "receiver", "both"])
    def test_received_buffers_outlive_the_connection(self, ends, closed):
        data = os.urandom(LARGE)
        message = pass_message(*ends, [data])
        for each in closed:
            ends[each].close()
        gc.collect()
        assert contents(message) == [data]
        message.buffers[0][0] = 1
        assert message.buffers[0][0] == 1


class TestReuse:
    def test_one_segment_serves_all_echoes(self, ends):
        near, far = ends
        counts = []
        for number in range(20):
            data = os.urandom(LARGE)
            near.send(number, frame(number, [data]), release_buffers=True)
            assert echo(far).segment == 1
            reply = read(near)
            assert reply.shared.segment == 1 and contents(reply) == [data]
            del reply
            counts.append((descriptors(), mappings()))
        assert counts[-1] <= counts[0]

    def test_releasing_the_buffers_empties_the_frame_at_once(self, ends):
        near, far = ends
        call = frame(1, [bytearray(LARGE)])
        near.send(1, call, release_buffers=True)
        assert call.buffers == [] and len(read(far).buffers[0]) == LARGE
        call = frame(2, [bytearray(LARGE)])
        near.send(2, call)
        assert len(call.buffers) == 1

    def test_a_segment_is_reused_by_messages_of_its_size(self, ends):
        near, far = ends
        big = pass_message(near, far, [bytes(3_000_000)]).shared
        small = pass_message(near, far, [bytes(LARGE)]).shared
        pass_message(far, near)
        near.send(5, frame(5))
        read(far)
        assert pass_message(near, far, [bytes(2_950_000)]).shared.segment == big.segment
        assert pass_message(near, far, [bytes(LARGE + 1)]).shared.segment == small.segment

    def test_segments_beyond_the_limit_are_freed_at_both_ends(self, ends, monkeypatch):
        near, far = ends
        monkeypatch.setattr(shared_memory, "MAX_FREE_BYTES", shared_memory.MIN_SEGMENT_BYTES)
        before = mappings()
        messages = [pass_message(near, far, [bytes(LARGE)], i) for i in range(3)]
        assert mappings() == before + 6  # one at each end
        messages.clear()
        pass_message(far, near)
        assert mappings() == before + 4  # the receiver does not know yet
        pass_message(near, far)
        assert mappings() == before + 2
        (kept,) = [number for number in (1, 2, 3) if far._mapped.has(number)]
        assert pass_message(near, far, [bytes(LARGE)]).shared.segment == kept

    def test_unused_segments_are_freed_at_both_ends(self, ends, monkeypatch):
        near, far = ends
        before = mappings()
        messages = [pass_message(near, far, [bytes(LARGE)], i) for i in range(3)]
        del messages[1:]
        pass_message(far, near)
        near.trim()
        pass_message(near, far)
        assert mappings() == before + 6
        monkeypatch.setattr(shared_memory, "MAX_FREE_SECONDS", -1)
        near.trim()
        pass_message(near, far)
        assert mappings() == before + 2
        assert contents(messages[0]) == [bytes(LARGE)]

    def test_threads_that_send_at_once_never_share_a_segment(self, ends):
        near, far = ends
        some = random.Random(5)
        todo = {number: os.urandom(some.choice([10, LARGE, 300_000])) for number in range(200)}
        server = threading.Thread(target=lambda: [echo(far) for _ in range(200)], daemon=True)
        server.start()
        seen = set()

        def send(first):
            for number in range(first, 200, 4):
                near.send(number, frame(number, [todo[number]]))

        senders = [threading.Thread(target=send, args=(i,), daemon=True) for i in range(4)]
        for thread in senders:
            thread.start()
        for _ in range(200):
            reply = read(near)
            assert contents(reply) == [todo[reply.number]]
            seen.add(reply.number)
        assert len(seen) == 200
        for thread in [*senders, server]:
            thread.join(WAIT_SECONDS)

    def test_segments_in_use_are_limited(self, ends, monkeypatch):
        monkeypatch.setattr(shared_memory, "MAX_SEGMENTS", 50)
        kept = [pass_message(*ends, [b"%5d" % i * LARGE], i) for i in range(60)]
        assert [message.shared is not None for message in kept] == [True] * 50 + [False] * 10
        assert all(bytes(m.buffers[0][:5]) == b"%5d" % i for i, m in enumerate(kept))


class TestTheEnd:
    def test_no_descriptor_and_no_mapping_is_left(self, threads):
        gc.collect()
        before = descriptors(), mappings()
        near, far = open_ends(threads, socket.socketpair())
        for number in range(5):
            near.send(number, frame(number, [bytes(LARGE)]))
            echo(far)
            read(near)
        assert descriptors() > before[0] and mappings() > before[1]
        for end in (near, far):
            end.close()
        del near, far, end
        gc.collect()
        assert (descriptors(), mappings()) == before

    def test_an_interrupt_while_a_segment_is_made_leaves_neither(self):
        gc.collect()
        before = descriptors(), mappings()
        for strike in strikes([shared_memory.__file__], finalizers=False):
            strike(lambda: Segment(1, LARGE, lambda descriptor: None))
            assert (descriptors(), mappings()) == before, (
                f"after an interrupt at point {strike.number}"
            )
        assert strike.number > 10

    def test_a_notice_of_a_release_counts_once(self):
        pool = SegmentPool(lambda number, capacity, descriptor: None)
        segment, notice = pool.acquire(LARGE), object()
        assert pool.release(segment.number, notice)
        assert pool.acquire(LARGE) is segment
        assert pool.release(segment.number, notice)  # read again after an interrupt
        assert pool.acquire(LARGE) is not segment
        pool.close()

    def test_an_interrupt_while_a_notice_is_read_keeps_no_segment_in_use(self, ends):
        near, far = ends
        modules = (descriptors_module, shared_memory, stream_module, message_reader, wire)
        files = [module.__file__ for module in modules]
        for strike in strikes(files, finalizers=False):
            message = pass_message(near, far, [bytes(LARGE)])
            assert len(near._pool._used) == 1
            del message
            far.trim()  # which sends the notice
            far.send(strike.number, frame(strike.number))
            strike(near.read)
            assert near.is_intact, f"after an interrupt at point {strike.number}"
            assert read(near).number == strike.number
            assert not near._pool._used, f"after an interrupt at point {strike.number}"
        assert strike.number > 20

    def test_no_function_in_python_runs_when_a_buffer_is_deleted(self, ends):
        """Ctrl-C in it would keep the segment in use for ever."""
        near, far = ends
        messages = [pass_message(near, far, [bytes(LARGE)])]
        assert near._pool._used
        called: list[Any] = []
        sys.setprofile(lambda frame, event, _: event == "call" and called.append(frame))
        try:
            messages.clear()
        finally:
            sys.setprofile(None)
        assert not called
        far.trim()
        pass_message(far, near)
        assert not near._pool._used

    def test_a_message_that_is_never_written_leaves_no_segment_in_use(self, ends):
        near, far = ends
        lease = near._pool.lease()
        near._pool.acquire(LARGE, lease)  # and then Ctrl-C
        near.trim()
        assert near._pool._used
        del lease
        near.trim()
        assert not near._pool._used
        assert contents(pass_message(near, far, [bytes(LARGE)])) == [bytes(LARGE)]
        assert len(far._mapped._segments) == 1  # the other one was freed

    def test_a_pool_that_was_closed_keeps_nothing(self):
        before = mappings()
        pool = SegmentPool(lambda number, capacity, descriptor: None)
        segments = [pool.acquire(offsets([LARGE])[1]) for _ in range(3)]
        assert pool.release(segments[0].number)
        pool.close()
        segments.clear()
        assert mappings() == before

    def test_a_segment_that_is_released_after_the_end_is_freed(self):
        before = mappings()
        pool = SegmentPool(lambda number, capacity, descriptor: None)
        pool.close()
        late = pool.acquire(offsets([LARGE])[1])
        assert mappings() == before + 1
        assert not pool.release(late.number)
        pool.discard(late.number)
        del late
        assert mappings() == before
