"""Large messages between nodes: a connection of their own."""

import gc
import os
import threading
import time
from typing import Any

import numpy as np
import pytest
from conftest import eventually
from direct_workers import (
    WAIT_SECONDS,
    connections,
    groups,
    refuse_bulk,
    replies_with,
    served_by,
)

from rayrpc._protocol.messages import Frame, Kind
from rayrpc._transports.direct.bulk_replies import BULK_BYTES
from rayrpc._transports.direct.wire import message_parts
from rayrpc.errors import CallLostError, WorkerDiedError

LARGE = os.urandom(BULK_BYTES + 1)


@pytest.fixture
def pair():
    with groups() as make:
        yield make({"node": "127.0.0.2"}, {"node": "127.0.0.3"})


class TestConnection:
    def test_a_large_request_has_a_connection_of_its_own(self, pair):
        caller, callee = pair
        assert caller.call(callee).wait(WAIT_SECONDS).data == b"x"
        assert connections(caller, callee)[1] is None
        reply = caller.call(callee, 2, buffers=[LARGE]).wait(WAIT_SECONDS)
        assert bytes(reply.buffers[0]) == LARGE
        small, large = served_by(callee)
        assert len(small) == len(large) == 1
        assert not caller.fallback.calls and not callee.fallback.replies

    def test_both_are_there_before_a_call_is_served(self, pair, monkeypatch):
        caller, callee = pair
        threads = callee.transport._threads
        submit = threads.submit
        monkeypatch.setattr(threads, "submit", lambda task: (submit(task), time.sleep(0.05)))
        caller.call(callee, 1).wait(WAIT_SECONDS)
        assert served_by(callee)[0]
        caller.call(callee, 2, buffers=[LARGE]).wait(WAIT_SECONDS)
        assert served_by(callee)[1]

    def test_one_that_no_thread_reads_is_not_kept(self, pair, monkeypatch):
        caller, callee = pair
        caller.call(callee, 1).wait(WAIT_SECONDS)

        def refuse(task):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(callee.transport._threads, "submit", refuse)
        caller.transport._bulk_of(connections(caller, callee)[0])
        server = callee.transport._server
        assert eventually(lambda: all(each.is_closed for each in served_by(callee)[1]))
        assert not server._bulk._connections

    @pytest.mark.parametrize("waits", [True, False], ids=["waits", "calls back"])
    def test_so_has_a_large_reply_to_a_small_request(self, pair, waits):
        caller, callee = pair
        replies_with(callee, lambda frame: [LARGE])
        outcomes: list[Any] = []
        for number in range(1, 4):
            pending = caller.call(callee, number)
            if waits:
                reply = pending.wait(WAIT_SECONDS)
            else:
                pending.on_done(outcomes.append)
                assert eventually(lambda: outcomes)
                reply = outcomes.pop().unwrap()
            assert bytes(reply.buffers[0]) == LARGE
        assert not caller.fallback.calls and not callee.fallback.replies
        assert callee.transport._server._bulk.is_empty

    def test_many_at_once_from_threads_all_arrive_whole(self, pair):
        caller, callee = pair
        replies_with(callee, lambda frame: frame.buffers or [LARGE])
        wrong = []

        def call(thread):
            for step in range(20):
                number = 1 + thread * 100 + step
                data = np.full(300_000 if step % 2 else 10, thread, np.uint8)
                pending = caller.call(callee, number, buffers=[data] if step % 3 else [])
                want = data.tobytes() if step % 3 else LARGE
                if bytes(pending.wait(WAIT_SECONDS).buffers[0]) != want:
                    wrong.append(number)

        threads = [threading.Thread(target=call, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert not wrong and not any(thread.is_alive() for thread in threads)

    def test_small_calls_do_not_wait_for_large_ones(self, pair):
        caller, callee = pair
        caller.call(callee).wait(WAIT_SECONDS)
        held = caller.transport._bulk_of(connections(caller, callee)[0])
        assert eventually(lambda: held._stream and served_by(callee)[1])
        (end,) = served_by(callee)[1]
        release = threading.Event()
        end._stream._reader.read = lambda read=end._stream._reader.read: (release.wait(), read())[1]
        caller.call(callee, 2, buffers=[LARGE]).wait(WAIT_SECONDS)  # it reads already
        huge = caller.call(callee, 3, buffers=[bytes(64 << 20)])
        assert caller.call(callee, 4).wait(WAIT_SECONDS).data == b"x"
        assert not huge.is_done
        release.set()
        assert huge.wait(WAIT_SECONDS)

    def test_an_interrupt_leaves_no_connection_that_opens_and_is_not_used(self, pair, monkeypatch):
        caller, callee = pair
        caller.call(callee).wait(WAIT_SECONDS)
        threads = caller.transport._threads
        submit = threads.submit

        def submit_and_be_interrupted(task):
            monkeypatch.undo()
            submit(task)
            raise KeyboardInterrupt

        monkeypatch.setattr(threads, "submit", submit_and_be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            caller.call(callee, 2, buffers=[LARGE])
        reply = caller.call(callee, 3, buffers=[LARGE]).wait(WAIT_SECONDS)
        assert bytes(reply.buffers[0]) == LARGE
        assert len(served_by(callee)[1]) == 1

    def test_a_reply_that_overtakes_its_announcement_waits_for_it(self, pair):
        caller, callee = pair
        caller.call(callee, 1, buffers=[LARGE]).wait(WAIT_SECONDS)
        _, bulk = connections(caller, callee)
        (end,) = served_by(callee)[1]
        end.send_large(7, Frame(Kind.VALUE, 0, 1, 7, buffers=[LARGE]))
        caller.call(callee, 2, buffers=[LARGE]).wait(WAIT_SECONDS)  # reads it
        assert eventually(lambda: bulk._early)
        assert bytes(bulk.expect(7).wait(WAIT_SECONDS).buffers[0]) == LARGE
        assert not bulk._early


class TestLoss:
    def test_calls_under_way_on_both_are_lost(self, pair):
        caller, callee = pair
        caller.call(callee, 1, buffers=[LARGE]).wait(WAIT_SECONDS)
        assert eventually(lambda: all(served_by(callee)))  # the other one may take longer
        begun = threading.Semaphore(0)
        release = threading.Event()

        def stay(frame, may_block=True):
            begun.release()
            release.wait(WAIT_SECONDS)

        callee.transport._server._serve = callee.serve
        for ends in served_by(callee):
            ends[0]._serve = stay
        calls = [caller.call(callee, 2), caller.call(callee, 3, buffers=[LARGE])]
        outcomes: list[Any] = []
        for call in calls:
            call.on_done(outcomes.append)
        assert begun.acquire(timeout=WAIT_SECONDS) and begun.acquire(timeout=WAIT_SECONDS)
        served_by(callee)[1][0].close()
        assert eventually(lambda: len(outcomes) == 2)
        assert all(isinstance(outcome.error, CallLostError) for outcome in outcomes)
        release.set()

    def test_a_part_of_a_large_message_is_freed_with_its_connection(self, pair):
        caller, callee = pair
        caller.call(callee).wait(WAIT_SECONDS)
        small, _ = connections(caller, callee)
        large = caller.transport._bulk_of(small)
        assert eventually(lambda: large._stream and served_by(callee)[1])
        (end,) = served_by(callee)[0]
        memory = callee.transport._memory
        frame = Frame(Kind.CALL, 0, 1, 2, data=b"x")
        message = b"".join(message_parts(2, frame.pack(), [memoryview(LARGE)]))
        large.connected_socket.sendall(message[: len(message) // 2])
        assert eventually(lambda: memory._used)
        small.break_off("cut by the test")
        assert eventually(lambda: end.socket.fileno() == -1)
        large.break_off("cut by the test")
        assert eventually(lambda: (gc.collect(), memory.trim(), not memory._used)[-1])

    def test_the_loss_of_the_peer_ends_both(self, pair):
        caller, callee = pair
        caller.call(callee, 1, buffers=[LARGE]).wait(WAIT_SECONDS)
        both = connections(caller, callee)
        caller.transport.on_peer_lost(callee.member, WorkerDiedError("w1", "killed"))
        assert all(each.schedule.state == 4 for each in both)

    def test_where_there_can_be_no_second_connection_large_requests_go_by_the_fallback(
        self, pair, monkeypatch
    ):
        caller, callee = pair
        caller.call(callee).wait(WAIT_SECONDS)
        connect = caller.transport.connect

        def refuse(peer, is_bulk=False, pair=0):
            if is_bulk:
                raise OSError("no descriptor")
            return connect(peer, is_bulk, pair)

        monkeypatch.setattr(caller.transport, "connect", refuse)
        reply = caller.call(callee, 2, buffers=[LARGE]).wait(WAIT_SECONDS)
        assert bytes(reply.buffers[0]) == LARGE
        assert caller.fallback.calls == [("memory-w1", 2)]
        assert caller.call(callee, 3).wait(WAIT_SECONDS).data == b"x"
        monkeypatch.undo()
        assert caller.call(callee, 4, buffers=[LARGE]).wait(WAIT_SECONDS)
        assert len(caller.fallback.calls) == 1

    def test_large_replies_wait_until_their_connection_is_made(self, pair, monkeypatch):
        caller, callee = pair
        replies_with(callee, lambda frame: [LARGE])
        monkeypatch.setattr("rayrpc._transports.direct.transport.REOPEN_SECONDS", 0.05)
        began = refuse_bulk(caller, times=3)
        calls = [caller.call(callee, number) for number in range(1, 4)]
        assert [bytes(call.wait(WAIT_SECONDS).buffers[0]) for call in calls] == [LARGE] * 3
        assert len(began) > 3
        assert caller.call(callee, 4).wait(WAIT_SECONDS)
        assert callee.served == 4 and not caller.fallback.calls


class TestWhatTheProgramWritesLater:
    def test_a_request_that_waits_for_its_connection_is_copied(self, pair):
        caller, callee = pair
        data = bytearray(LARGE)
        pending = caller.call(callee, 1, buffers=[data])
        data[:] = bytes(len(data))
        assert bytes(pending.wait(WAIT_SECONDS).buffers[0]) == LARGE

    @pytest.mark.parametrize("behind", [False, True], ids=["alone", "behind another"])
    def test_a_request_that_the_peer_does_not_read_is_copied(self, pair, behind):
        caller, callee = pair
        caller.call(callee, 1, buffers=[LARGE]).wait(WAIT_SECONDS)
        (end,) = served_by(callee)[1]
        hold = threading.Event()
        serve = end._serve
        end._serve = lambda frame, may_block=True: (hold.wait(WAIT_SECONDS), serve(frame))[1]
        wait = end._stream.read
        end._stream.read = lambda: (hold.wait(WAIT_SECONDS), wait())[1]
        caller.call(callee, 2, buffers=[LARGE])
        first = caller.call(callee, 3, buffers=[bytes(32 << 20)]) if behind else None
        data = bytearray(os.urandom(32 << 20))
        want = bytes(data)
        pending = caller.call(callee, 4, buffers=[data])
        data[:] = bytes(len(data))
        hold.set()
        assert bytes(pending.wait(WAIT_SECONDS).buffers[0]) == want
        assert first is None or first.wait(WAIT_SECONDS)
