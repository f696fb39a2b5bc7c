"""What every transport promises, checked on each implementation."""

import functools
import itertools
import pickle
import threading
import time
import uuid
from typing import Any

import numpy as np
import pytest
from conftest import eventually

from rayrpc._concurrency.outcome import Error, Value
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind, Objects
from rayrpc._protocol.transport import Deferred
from rayrpc._transports.memory import MemoryHub, MemoryTransport
from rayrpc.errors import CallError, WorkerDiedError

WAIT_SECONDS = 60.0


class Side:
    """A worker's transport, and what it serves."""

    def __init__(self, transport, name, worker_id, token):
        self.transport = transport
        self.member = Member(token, name, worker_id, address=transport.address)
        self.answer = lambda frame: frame.data
        self.deferred = {}

    def serve(self, frame, may_block=True):
        data = self.answer(frame)
        if isinstance(data, (Deferred, Frame)):
            return data
        return self.reply(frame, data)

    def reply(self, frame, data=b"", buffers=()):
        return Frame(Kind.VALUE, 0, self.member.id, frame.call_id, data=data, buffers=list(buffers))


def frame(call_id=1, data=b"", buffers=()):
    return Frame(Kind.CALL, 0, 0, call_id, data=data, buffers=list(buffers))


def memory_pair(tokens):
    hub = MemoryHub()
    return [MemoryTransport(hub, token, "127.0.0.1") for token in tokens]


def ray_pair(tokens):
    from rayrpc._transports.ray.transport import RayTransport

    return [RayTransport(f"side{i}", token, "contract") for i, token in enumerate(tokens)]


def over(fallbacks, tokens, only=False):
    from rayrpc._transports.direct.transport import DirectTransport

    return [
        DirectTransport(fallback, token, only=only)
        for fallback, token in zip(fallbacks, tokens, strict=True)
    ]


PAIRS = {
    "memory": memory_pair,
    "memory-auto": lambda tokens: over(memory_pair(tokens), tokens),
    "memory-direct": lambda tokens: over(memory_pair(tokens), tokens, only=True),
    "ray": ray_pair,
    "auto": lambda tokens: over(ray_pair(tokens), tokens),
    "direct": lambda tokens: over(ray_pair(tokens), tokens, only=True),
}


@pytest.fixture(params=PAIRS)
def sides(request):
    """A caller (id 0) and a callee (id 1)."""
    if not request.param.startswith("memory"):
        request.getfixturevalue("ray_cluster")
    tokens = [uuid.uuid4().hex[:12] for _ in range(2)]
    transports = PAIRS[request.param](tokens)
    made: list[Any] = [Side(t, f"side{i}", i, tokens[i]) for i, t in enumerate(transports)]
    members = {side.member.id: side.member for side in made}
    for side in made:
        side.members = members
        side.kind = request.param
        side.transport.start(side.serve, members.get, b"secret")
    yield made
    for side in made:
        side.transport.close()


def outcome_of(pending):
    done, outcomes = threading.Event(), []
    pending.on_done(lambda outcome: (outcomes.append(outcome), done.set()))
    assert done.wait(WAIT_SECONDS)
    time.sleep(0.05)
    assert len(outcomes) == 1  # and never a second time
    return outcomes[0]


def test_a_frame_and_its_reply_arrive_whole(sides):
    caller, callee = sides
    seen = []

    def answer(frame):
        seen.append((frame.kind, frame.call_id, frame.meta, [bytes(b) for b in frame.buffers]))
        return b"back"

    callee.answer = answer
    sent = frame(7, b"there", [pickle.PickleBuffer(b"x" * 10), pickle.PickleBuffer(b"y" * 300_000)])
    sent.meta = {"hook": 1}
    assert caller.transport.call(callee.member, sent).wait(WAIT_SECONDS).data == b"back"
    assert seen == [(Kind.CALL, 7, {"hook": 1}, [b"x" * 10, b"y" * 300_000])]


def references(side):
    """Return two references to objects, as the side's transport can send them."""
    if side.kind.startswith("memory"):
        return "one", "two"
    import ray

    return ray.put("one"), ray.put("two")


@pytest.mark.parametrize("is_late", [False, True])
def test_references_to_objects_arrive_with_requests_and_replies(sides, is_late):
    caller, callee = sides
    refs = references(caller)
    seen = []

    def answer(request):
        seen.append((request.objects, [bytes(b) for b in request.buffers]))
        reply = callee.reply(request, b"back", [pickle.PickleBuffer(b"r" * 300_000)])
        reply.objects = Objects(refs[1:])
        if not is_late:
            return reply
        deferred = Deferred()
        threading.Timer(0.1, lambda: deferred.set(reply)).start()
        return deferred

    callee.answer = answer
    for wait in (lambda pending: pending.wait(WAIT_SECONDS), lambda p: outcome_of(p).unwrap()):
        sent = frame(8 + len(seen), b"there", [pickle.PickleBuffer(b"y" * 300_000)])
        sent.objects = Objects(refs, (1,))
        reply = wait(caller.transport.call(callee.member, sent))
        assert (reply.kind, reply.data, reply.objects) == (Kind.VALUE, b"back", Objects(refs[1:]))
        assert [bytes(b) for b in reply.buffers] == [b"r" * 300_000]
        assert seen[-1] == (Objects(refs, (1,)), [b"y" * 300_000])


@pytest.mark.parametrize("side", [4, 400])
def test_buffers_in_fortrans_order_travel_as_they_lie_in_memory(sides, side):
    caller, callee = sides
    array: Any = np.asfortranarray(np.arange(side * side, dtype=np.int64).reshape(side, side))
    callee.serve_reply = callee.reply
    callee.reply = lambda f, data: callee.serve_reply(f, bytes(f.buffers[0]), f.buffers)
    reply = caller.transport.call(callee.member, frame(1, b"", [pickle.PickleBuffer(array)]))
    there = reply.wait(WAIT_SECONDS)
    assert there.data == array.tobytes("F")


def test_replies_bring_buffers_of_the_receivers_own(sides):
    caller, callee = sides
    kept = bytearray(b"z" * 200_000)
    callee.serve_reply = callee.reply
    callee.reply = lambda f, data: callee.serve_reply(f, b"", [pickle.PickleBuffer(kept)])
    (buffer,) = caller.transport.call(callee.member, frame()).wait(WAIT_SECONDS).buffers
    kept[0] = 0
    assert bytes(buffer) == b"z" * 200_000


def test_bytes_are_counted_by_way_at_both_sides(sides):
    caller, callee = sides
    callee.serve_reply = callee.reply
    callee.reply = lambda f, data: callee.serve_reply(f, data, f.buffers)
    for count, size in enumerate([10_000, 300_000], 1):
        call = frame(count, b"there", [pickle.PickleBuffer(b"x" * size)])
        caller.transport.call(callee.member, call).wait(WAIT_SECONDS)
    if caller.kind == "ray":
        expected = {"ray": 310_000}
    elif caller.kind == "memory":
        expected = {}
    else:  # large buffers are shared, and the rest is written
        expected = {"connection": 10_000, "shared_memory": 300_000}
        if not caller.kind.startswith("memory"):
            expected["ray"] = 0
    for side in sides:
        sent = side.transport.sent_bytes
        assert eventually(functools.partial(_are_sent, sent, sum(expected.values())))
        assert sent().keys() == expected.keys()
        for way, count in expected.items():  # heads come on top
            assert count <= sent()[way] <= count + 2000 * (way != "shared_memory"), way


def _are_sent(sent, count):
    return sum(sent().values()) >= count


def test_a_call_may_be_waited_for_or_call_back(sides):
    caller, callee = sides
    assert caller.transport.call(callee.member, frame(1, b"a")).wait(WAIT_SECONDS).data == b"a"
    outcome = outcome_of(caller.transport.call(callee.member, frame(2, b"b")))
    assert isinstance(outcome, Value) and outcome.value.data == b"b"


@pytest.mark.parametrize("sides", ["ray"], indirect=True)
def test_a_call_by_ray_does_not_wait_until_the_endpoint_is_found(sides, monkeypatch):
    caller, callee = sides
    from rayrpc._transports.ray.endpoint import Address

    found, find = threading.Event(), Address.find

    def find_late(address):
        assert found.wait(WAIT_SECONDS)
        return find(address)

    monkeypatch.setattr(Address, "find", find_late)
    callee.answer = lambda f: bytes(f.buffers[0])
    calls = []
    for number in (1, 2, 3):
        data = bytearray(b"%d" % number)
        calls.append(caller.transport.call(callee.member, frame(number, b"", [data])))
        data[:] = b"-"  # the program goes on
    with pytest.raises(TimeoutError):
        calls[0].wait(0.2)
    found.set()
    assert [call.wait(WAIT_SECONDS).data for call in calls] == [b"1", b"2", b"3"]


def test_many_calls_at_once_all_get_their_own_reply(sides):
    caller, callee = sides
    callee.answer = lambda f: (time.sleep(0.001), f.data)[1]
    calls = {i: caller.transport.call(callee.member, frame(i, b"%d" % i)) for i in range(1, 60)}
    assert all(call.wait(WAIT_SECONDS).data == b"%d" % i for i, call in calls.items())


def test_a_reply_may_come_later_and_out_of_order(sides):
    caller, callee = sides
    waiting = {}

    def answer(frame):
        deferred = waiting[frame.call_id] = Deferred()
        return deferred

    callee.answer = answer
    # more than any transport has threads for
    calls = {i: caller.transport.call(callee.member, frame(i, b"%d" % i)) for i in range(1, 41)}
    end = time.monotonic() + WAIT_SECONDS
    while len(waiting) < 40 and time.monotonic() < end:
        time.sleep(0.01)
    for i in reversed(list(waiting)):
        waiting[i].set(callee.reply(frame(i), b"late%d" % i))
    assert all(call.wait(WAIT_SECONDS).data == b"late%d" % i for i, call in calls.items())


@pytest.mark.parametrize("size", [100, 300_000, 3_000_000])
def test_the_buffers_of_a_late_reply_may_change_once_it_is_set(sides, size):
    caller, callee = sides

    def answer(frame, refs, at_once):
        deferred = Deferred()

        def end():
            buffer = bytearray(b"r" * size)
            reply = callee.reply(frame, b"late", [pickle.PickleBuffer(buffer)])
            reply.objects = Objects(refs) if refs else None
            deferred.set(reply)
            buffer[:] = b"x" * size

        if at_once:
            end()
        else:
            threading.Timer(0.05, end).start()
        return deferred

    numbers = itertools.count(30)
    for refs, at_once in itertools.product([(), references(caller)], [True, False]):
        callee.answer = functools.partial(answer, refs=refs, at_once=at_once)
        for number in itertools.islice(numbers, 3):
            reply = caller.transport.call(callee.member, frame(number)).wait(WAIT_SECONDS)
            assert [bytes(b) for b in reply.buffers] == [b"r" * size], (refs, at_once)


def test_waiting_has_a_timeout_and_the_call_goes_on(sides):
    caller, callee = sides
    go = threading.Event()
    callee.answer = lambda f: (go.wait(WAIT_SECONDS), b"done")[1]
    pending = caller.transport.call(callee.member, frame())
    with pytest.raises(TimeoutError):
        pending.wait(0.1)
    go.set()
    assert isinstance(outcome_of(pending), Value)


def test_a_late_reply_may_be_waited_for_again_and_again(sides):
    caller, callee = sides
    deferred = Deferred()
    callee.answer = lambda f: deferred
    pending = caller.transport.call(callee.member, frame(5))
    for _ in range(3):
        with pytest.raises(TimeoutError):
            pending.wait(0.3)
    deferred.set(callee.reply(frame(5), b"at last"))
    assert pending.wait(WAIT_SECONDS).data == b"at last"


def test_the_callee_may_call_back_while_it_serves(sides):
    caller, callee = sides
    caller.answer = lambda f: b"inner"
    callee.answer = lambda f: (
        callee.transport.call(caller.member, frame(99)).wait(WAIT_SECONDS).data
    )
    assert caller.transport.call(callee.member, frame()).wait(WAIT_SECONDS).data == b"inner"


def test_a_call_to_a_closed_peer_says_that_it_is_gone(sides, monkeypatch):
    caller, callee = sides
    if not caller.kind.startswith("memory"):
        from rayrpc._transports.ray import transport

        # of a member that was not reported as lost, it may just be starting
        monkeypatch.setattr(transport, "ATTACH_SECONDS", 0.5)
    callee.transport.close()
    # a connection alone cannot tell whether its peer has ended or does not accept
    error = CallError if caller.kind.endswith("direct") else WorkerDiedError
    with pytest.raises(error, match="side1"):
        caller.transport.call(callee.member, frame()).wait(WAIT_SECONDS)


def test_a_peer_known_to_be_gone_ends_the_calls_that_wait_for_it(sides):
    caller, callee = sides
    called = threading.Event()
    callee.answer = lambda f: (called.set(), Deferred())[1]
    pending = caller.transport.call(callee.member, frame())
    assert called.wait(WAIT_SECONDS)
    error = WorkerDiedError("side1", "killed")  # as a directory reports it

    def report():
        del caller.members[1]
        caller.transport.on_peer_lost(callee.member, error)
        callee.transport.close()

    threading.Timer(0.2, report).start()
    assert isinstance(outcome_of(pending), Error)


class TestRepliesApartFromTheirCalls:
    """The request went by another transport, which announced that the reply goes by this one."""

    @staticmethod
    def send(callee, call_id):
        buffers = [pickle.PickleBuffer(b"r" * 200_000)]
        callee.transport.send_reply(frame(call_id), callee.reply(frame(call_id), b"apart", buffers))

    @staticmethod
    def assert_whole(reply):
        assert (reply.data, [bytes(b) for b in reply.buffers]) == (b"apart", [b"r" * 200_000])

    def test_a_reply_completes_the_call_that_expects_it(self, sides):
        caller, callee = sides
        pending = caller.transport.expect_reply(5, callee.member)
        other = caller.transport.expect_reply(6, callee.member)
        with pytest.raises(TimeoutError):
            pending.wait(0.2)
        self.send(callee, 5)
        self.assert_whole(pending.wait(WAIT_SECONDS))
        self.send(callee, 6)
        self.assert_whole(outcome_of(other).unwrap())

    def test_a_reply_may_arrive_before_it_is_expected(self, sides):
        caller, callee = sides
        self.send(callee, 7)
        time.sleep(0.5)
        self.assert_whole(caller.transport.expect_reply(7, callee.member).wait(WAIT_SECONDS))

    def test_the_loss_of_the_callee_ends_the_wait(self, sides):
        caller, callee = sides
        pending = caller.transport.expect_reply(8, callee.member)
        del caller.members[1]
        caller.transport.on_peer_lost(callee.member, WorkerDiedError("side1", "killed"))
        with pytest.raises(WorkerDiedError, match="side1"):
            pending.wait(WAIT_SECONDS)

    def test_a_callee_that_was_lost_before_ends_the_wait_at_once(self, sides):
        caller, callee = sides
        del caller.members[1]
        caller.transport.on_peer_lost(callee.member, WorkerDiedError("side1", "killed"))
        with pytest.raises(WorkerDiedError, match="side1"):
            caller.transport.expect_reply(9, callee.member).wait(WAIT_SECONDS)

    def test_closing_ends_the_wait(self, sides):
        caller, callee = sides
        pending = caller.transport.expect_reply(10, callee.member)
        caller.transport.close()
        assert isinstance(outcome_of(pending).error, CallError)

    def test_a_caller_that_has_left_is_ignored(self, sides):
        caller, callee = sides
        del caller.members[0]
        self.send(callee, 11)


def test_workers_of_one_node_share_its_identifier(sides):
    caller, callee = sides
    assert caller.transport.node_id == callee.transport.node_id != ""


class TestFlushReplies:
    """Peers that learn that a worker has left end their calls to it, so it replies before."""

    def test_it_waits_for_the_calls_that_are_served(self, sides):
        caller, callee = sides
        begun = threading.Event()
        callee.answer = lambda frame: (begun.set(), time.sleep(0.3), frame.data)[2]
        calls = [caller.transport.call(callee.member, frame(n, b"%d" % n)) for n in range(1, 4)]
        assert begun.wait(WAIT_SECONDS)
        callee.transport.flush_replies(WAIT_SECONDS)
        error = WorkerDiedError("side1", "it has left the group", "here")
        caller.transport.on_peer_lost(callee.member, error)
        assert calls[0].wait(WAIT_SECONDS).data == b"1"

    def test_it_has_a_timeout(self, sides):
        caller, callee = sides
        begun, release = threading.Event(), threading.Event()
        callee.answer = lambda frame: (begun.set(), release.wait(WAIT_SECONDS), b"")[2]
        call = caller.transport.call(callee.member, frame())
        assert begun.wait(WAIT_SECONDS)
        callee.transport.flush_replies(0.1)
        assert not release.is_set()
        release.set()
        call.wait(WAIT_SECONDS)

    def test_a_served_call_does_not_wait_for_itself(self, sides):
        caller, callee = sides
        callee.answer = lambda frame: (callee.transport.flush_replies(10**6), b"done")[1]
        call = caller.transport.call(callee.member, frame())
        assert call.wait(WAIT_SECONDS).data == b"done"


def test_close_may_be_called_twice(sides):
    caller, _ = sides
    caller.transport.close()
    caller.transport.close()


def test_errors_of_the_callee_itself_end_the_call(sides):
    caller, callee = sides

    def answer(frame):
        raise RuntimeError("broken server")

    callee.answer = answer
    for _ in range(3):  # and the next calls, too: it goes on serving
        reply = caller.transport.call(callee.member, frame()).wait(WAIT_SECONDS)
        assert reply.kind is Kind.ERROR and b"broken server" in reply.data
