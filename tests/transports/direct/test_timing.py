"""What the direct transport does after a while: in virtual time, under many schedules."""

import contextlib
import time
from typing import Any
from unittest import mock

import pytest
from direct_workers import connections, groups, refuse_bulk, replies_with, served_by
from simulation.scheduler import current
from simulation.separately import in_virtual_time

from rayrpc._concurrency.reader import release_reader
from rayrpc._protocol.transport import PendingReply
from rayrpc._transports.direct import (
    bulk_replies,
    message_reader,
    server,
    server_connection,
    stream,
    transport,
    unconnected_calls,
)
from rayrpc.errors import CallError, CallLostError, WorkerDiedError

WAIT_SECONDS = 300.0
BULK_BYTES = 1000
UNREAD_BYTES = 20_000
LARGE = bytes(3000)


def eventually(ready):
    return current().step("waits", lambda: bool(ready()), WAIT_SECONDS)


def served_end(callee) -> Any:
    """Return the callee's end of its only connection."""
    server = callee.transport._server
    assert eventually(lambda: server.connections)  # its first reply may be faster
    (end,) = server.connections
    return end


@contextlib.contextmanager
def pair(**options):
    """Make two workers on two nodes, for which messages are large from ``BULK_BYTES`` on."""
    with contextlib.ExitStack() as stack:
        for module in (transport, server_connection):
            stack.enter_context(mock.patch.object(module, "BULK_BYTES", BULK_BYTES))
        for module in (stream, bulk_replies):
            stack.enter_context(mock.patch.object(module, "MAX_UNREAD_BYTES", UNREAD_BYTES))
        stack.enter_context(mock.patch.object(message_reader, "CAPACITY", 600))
        make = stack.enter_context(groups())
        yield make({"node": "127.0.0.2", **options}, {"node": "127.0.0.3"})


@in_virtual_time("direct_workers")
def test_large_replies_are_lost_if_their_connection_cannot_be_made_in_time():
    with pair() as (caller, callee):
        replies_with(callee, lambda frame: [LARGE] if frame.call_id == 2 else [])
        began = refuse_bulk(caller, times=1_000_000)
        assert caller.call(callee, 1).wait(WAIT_SECONDS).data == b"x"
        with pytest.raises(CallLostError, match="refused by the test"):
            caller.call(callee, 2).wait(WAIT_SECONDS)
        assert 0 <= time.monotonic() - began[0] - bulk_replies.OPEN_SECONDS < 5
        assert caller.call(callee, 3).wait(WAIT_SECONDS).data == b"x"  # its connection lives


@pytest.mark.parametrize("times", [1, 3])
@in_virtual_time("direct_workers", seeds=40)
def test_they_arrive_if_a_large_request_makes_their_connection(times):
    with pair() as (caller, callee):
        replies_with(callee, lambda frame: [LARGE])
        refuse_bulk(caller, times)
        outcomes: list[Any] = []
        for number in range(1, 8):
            caller.call(callee, number, buffers=[LARGE] if number % 2 else []).on_done(
                outcomes.append
            )
            time.sleep(0.001)
        assert eventually(lambda: len(outcomes) == 7)
        assert all(each.unwrap().buffers[0] == LARGE for each in outcomes)
        for each in caller.transport.connections():
            assert eventually(lambda each=each: not (each._calls or each._early))


@in_virtual_time("direct_workers")
def test_they_are_lost_with_the_connection_that_announced_them():
    with pair() as (caller, callee):
        replies_with(callee, lambda frame: [LARGE])
        began = refuse_bulk(caller, times=1_000_000)
        outcomes: list[Any] = []
        caller.call(callee, 1).on_done(outcomes.append)
        assert eventually(lambda: began)
        connections(caller, callee)[0].break_off("cut by the test")
        assert eventually(lambda: outcomes)
        assert isinstance(outcomes[0].error, CallLostError)
        assert time.monotonic() - began[0] < bulk_replies.OPEN_SECONDS


@in_virtual_time("direct_workers")
def test_large_replies_of_any_size_wait_until_their_connection_is_open():
    with pair() as (caller, callee):
        replies_with(callee, lambda frame: [bytes(2 * UNREAD_BYTES)])
        connect = caller.transport.connect

        def connect_late(peer, is_bulk=False, pair=0):
            time.sleep(0.8 * bulk_replies.OPEN_SECONDS * is_bulk)
            return connect(peer, is_bulk, pair)

        caller.transport.connect = connect_late
        outcomes: list[Any] = []
        for number in range(1, 7):
            caller.call(callee, number).on_done(outcomes.append)
        assert eventually(lambda: len(outcomes) == 6)
        assert all(len(each.unwrap().buffers[0]) == 2 * UNREAD_BYTES for each in outcomes)
        assert time.monotonic() >= 0.8 * bulk_replies.OPEN_SECONDS


@in_virtual_time("direct_workers")
def test_a_peer_that_opens_no_connection_for_large_replies_loses_its_other_one():
    with pair() as (caller, callee):
        replies_with(callee, lambda frame: [LARGE])
        caller.transport.expect_large = lambda *_: PendingReply()
        outcomes: list[Any] = []
        for number in range(1, 10):
            caller.call(callee, number).on_done(outcomes.append)
        assert eventually(lambda: outcomes)
        assert time.monotonic() >= bulk_replies.OPEN_SECONDS
        assert {type(each.error) for each in outcomes} == {CallLostError}
        assert callee.served < 10


@in_virtual_time("direct_workers")
def test_no_more_requests_are_read_than_the_replies_that_the_peer_does_not_read():
    with pair() as (caller, callee):
        replies_with(callee, lambda frame: [LARGE])
        caller.call(callee, 1).wait(WAIT_SECONDS)
        _, bulk = connections(caller, callee)
        may_read: list[bool] = []
        read = bulk._stream.read
        bulk._stream.read = lambda: (eventually(lambda: may_read), read())[1]
        outcomes: list[Any] = []
        for number in range(2, 42):
            caller.call(callee, number).on_done(outcomes.append)
        (end,) = served_by(callee)[1]
        assert eventually(lambda: end._stream.has_unread)
        time.sleep(60)
        assert callee.served < 20
        may_read.append(True)
        assert eventually(lambda: len(outcomes) == 40)
        assert all(each.unwrap().buffers[0] == LARGE for each in outcomes)
        assert callee.served == 41


@in_virtual_time("direct_workers")
def test_the_reply_to_a_call_that_was_interrupted_is_read():
    with pair() as (caller, callee):
        replies_with(callee, lambda frame: [LARGE])
        caller.call(callee, 1)  # and then Ctrl-C
        caller.transport.on_interrupted_call()
        time.sleep(60)
        assert callee.served == 1 and callee.transport._server._bulk.is_empty
        assert not any(each._calls for each in caller.transport.connections())


@pytest.mark.parametrize("keeps", [False, True])
@in_virtual_time("direct_workers")
def test_a_worker_that_only_calls_frees_what_its_calls_have_used(keeps):
    with groups() as make, mock.patch.object(stream, "SHARED_BYTES", BULK_BYTES):
        caller, callee = make({}, {})
        reply = caller.call(callee, 1, buffers=[LARGE]).wait(WAIT_SECONDS)
        near = connections(caller, callee)[0]._stream
        far = served_end(callee)._stream
        assert near._mapped._segments and far._mapped._segments
        if not keeps:
            del reply
        time.sleep(60)
        assert not near._pool._used and not any(near._pool._free.values())
        assert not far._mapped._segments
        assert bool(far._pool._used) == bool(near._mapped._segments) == keeps


@pytest.mark.parametrize("broken", [0, 1], ids=["small", "large"])
@in_virtual_time("direct_workers")
def test_the_two_connections_are_lost_and_made_again_together(broken):
    with pair() as (caller, callee):
        replies_with(callee, lambda frame: [LARGE])
        caller.call(callee, 1).wait(WAIT_SECONDS)
        before = connections(caller, callee)
        before[broken].break_off("cut by the test")
        assert eventually(lambda: all(each.is_broken for each in before))
        assert eventually(lambda: connections(caller, callee)[0] is not before[0])
        assert eventually(lambda: caller.transport.routes()[callee.token].reason == "")
        assert caller.call(callee, 2).wait(WAIT_SECONDS).buffers[0] == LARGE
        assert not set(before) & set(connections(caller, callee))


@in_virtual_time("direct_workers")
def test_replies_that_arrived_before_the_loss_of_the_peer_are_read():
    with pair() as (caller, callee):
        caller.call(callee, 1).wait(WAIT_SECONDS)
        may_end: list[bool] = []
        serve = callee.serve

        def serve_some(frame, may_block=True):
            if frame.data == b"late":
                release_reader()  # which sends the replies that are held back
                eventually(lambda: may_end)
            return serve(frame)

        served = served_end(callee)
        served._serve = serve_some
        # the reader is busy with a callback while the other replies arrive
        caller.call(callee, 2).on_done(lambda outcome: time.sleep(1))
        outcomes: list[Any] = []
        for number in range(3, 40):
            caller.call(callee, number).on_done(outcomes.append)
        caller.call(callee, 40, b"late").on_done(outcomes.append)
        time.sleep(0.5)
        lost: list[Any] = []
        caller.transport.on_connection_lost = lambda *about: lost.append(about)
        error = WorkerDiedError("w1", "killed by the test")
        caller.transport.on_peer_lost(callee.member, error)
        may_end.append(True)
        assert eventually(lambda: len(outcomes) == 38)
        *in_time, late = outcomes
        assert [outcome.value.data for outcome in in_time] == [b"x"] * 37
        assert late.error is error
        assert not lost  # the transport ended it


@pytest.mark.parametrize("is_lost", [False, True])
@in_virtual_time("direct_workers")
def test_where_only_connections_may_be_used_other_calls_fail_after_a_while(is_lost):
    with groups() as make:
        caller, callee = make({"only": True}, {"is_direct": False})
        if is_lost:
            del caller.members[1]
        text = r"'w1'.*cannot be called directly.*memory transport"
        with pytest.raises(CallError, match="w1" if is_lost else text) as raised:
            caller.call(callee).wait(WAIT_SECONDS)
        assert isinstance(raised.value, WorkerDiedError) == is_lost
        assert is_lost or time.monotonic() >= unconnected_calls.LOSS_SECONDS
        assert callee.served == 0


@in_virtual_time("direct_workers", seeds=40)
def test_idle_connections_keep_no_threads():
    with pair() as (caller, callee):
        replies_with(callee, lambda frame: [LARGE])
        idle = callee.transport._server._idle
        for number in range(1, 12):
            reply = caller.call(callee, number).wait(WAIT_SECONDS)
            assert reply.buffers[0] == LARGE
            # about when the thread stops to read
            time.sleep(server.IDLE_SECONDS + current().current.random.choice([-0.001, 0, 0.001]))
        assert eventually(lambda: idle.count == 2)
        assert eventually(lambda: callee.transport._threads.size <= 1)  # which frees memory
        assert caller.call(callee, 12).wait(WAIT_SECONDS).buffers[0] == LARGE
        assert callee.served == 12


@pytest.mark.parametrize("end", ["cut", "closed"])
@in_virtual_time("direct_workers", seeds=40)
def test_connections_that_end_while_they_are_idle_are_closed(end):
    with pair() as (caller, callee):
        caller.call(callee, 1).wait(WAIT_SECONDS)
        served = served_end(callee)
        idle = callee.transport._server._idle
        time.sleep(server.IDLE_SECONDS + current().current.random.choice([-0.001, 0, 0.001, 1]))
        if end == "cut":
            connections(caller, callee)[0].break_off("cut by the test")
        else:
            callee.transport.close()
        assert eventually(lambda: served.is_closed and idle.count == 0)
        assert eventually(lambda: served.socket.fileno() < 0)  # its thread has seen the end


@pytest.mark.parametrize("lacks", ["descriptors", "threads"])
@in_virtual_time("direct_workers")
def test_they_keep_their_threads_where_the_system_cannot_wait_for_all(lacks):
    with pair() as (caller, callee):
        idle = callee.transport._server._idle
        if lacks == "threads":
            idle._thread.start = lambda: None
        else:
            idle._selector.register = mock.Mock(side_effect=OSError("no space left"))
        for number in (1, 2):
            assert caller.call(callee, number).wait(WAIT_SECONDS).data == b"x"
            time.sleep(10 * server.IDLE_SECONDS)
        assert eventually(lambda: idle.count == 0)  # but while one is tried
