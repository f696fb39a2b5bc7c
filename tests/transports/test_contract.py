"""What every transport promises, checked on each of them."""

import pickle
import threading
import time
import uuid

import numpy as np
import pytest

from rayrpc._concurrency.outcome import Error, Value
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import Deferred
from rayrpc._transports.memory import MemoryHub, MemoryTransport
from rayrpc.errors import CallError, WorkerDiedError

PATIENCE = 30.0


class Side:
    """A worker's transport, and what it serves."""

    def __init__(self, transport, name, worker_id, token):
        self.transport = transport
        self.member = Member(token, name, worker_id, address=transport.address)
        self.answer = lambda frame: frame.data
        self.deferred = {}

    def serve(self, frame, may_block=True):
        data = self.answer(frame)
        if isinstance(data, Deferred):
            return data
        return self.reply(frame, data)

    def reply(self, frame, data=b"", buffers=()):
        return Frame(Kind.VALUE, 0, self.member.id, frame.call_id, data=data, buffers=list(buffers))


def frame(call_id=1, data=b"", buffers=()):
    return Frame(Kind.CALL, 0, 0, call_id, data=data, buffers=list(buffers))


@pytest.fixture(params=["memory", "ray", "auto", "direct"])
def sides(request):
    """A caller (id 0) and a callee (id 1)."""
    tokens = [uuid.uuid4().hex[:12] for _ in range(2)]
    if request.param == "memory":
        hub = MemoryHub()
        transports = [MemoryTransport(hub, token) for token in tokens]
    else:
        request.getfixturevalue("ray_cluster")
        from rayrpc._transports.ray.transport import RayTransport

        transports = [RayTransport(f"side{i}", token, "contract") for i, token in enumerate(tokens)]
        if request.param != "ray":
            from rayrpc._transports.direct.transport import DirectTransport

            transports = [
                DirectTransport(transport, token, only=request.param == "direct")
                for transport, token in zip(transports, tokens, strict=True)
            ]
    made = [Side(t, f"side{i}", i, tokens[i]) for i, t in enumerate(transports)]
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
    assert done.wait(PATIENCE)
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
    assert caller.transport.call(callee.member, sent).wait(PATIENCE).data == b"back"
    assert seen == [(Kind.CALL, 7, {"hook": 1}, [b"x" * 10, b"y" * 300_000])]


@pytest.mark.parametrize("side", [4, 400])
def test_buffers_in_fortrans_order_travel_as_they_lie_in_memory(sides, side):
    caller, callee = sides
    array = np.asfortranarray(np.arange(side * side, dtype=np.int64).reshape(side, side))
    callee.serve_reply = callee.reply
    callee.reply = lambda f, data: callee.serve_reply(f, bytes(f.buffers[0]), f.buffers)
    reply = caller.transport.call(callee.member, frame(1, b"", [pickle.PickleBuffer(array)]))
    there = reply.wait(PATIENCE)
    assert there.data == array.tobytes("F")


def test_replies_bring_buffers_of_the_receivers_own(sides):
    caller, callee = sides
    kept = bytearray(b"z" * 200_000)
    callee.serve_reply = callee.reply
    callee.reply = lambda f, data: callee.serve_reply(f, b"", [pickle.PickleBuffer(kept)])
    (buffer,) = caller.transport.call(callee.member, frame()).wait(PATIENCE).buffers
    kept[0] = 0
    assert bytes(buffer) == b"z" * 200_000


def test_a_call_may_be_waited_for_or_call_back(sides):
    caller, callee = sides
    assert caller.transport.call(callee.member, frame(1, b"a")).wait(PATIENCE).data == b"a"
    outcome = outcome_of(caller.transport.call(callee.member, frame(2, b"b")))
    assert isinstance(outcome, Value) and outcome.value.data == b"b"


def test_many_calls_at_once_all_get_their_own_reply(sides):
    caller, callee = sides
    callee.answer = lambda f: (time.sleep(0.001), f.data)[1]
    calls = {i: caller.transport.call(callee.member, frame(i, b"%d" % i)) for i in range(1, 60)}
    assert all(call.wait(PATIENCE).data == b"%d" % i for i, call in calls.items())


def test_a_reply_may_come_later_and_out_of_order(sides):
    caller, callee = sides
    waiting = {}

    def answer(frame):
        deferred = waiting[frame.call_id] = Deferred()
        return deferred

    callee.answer = answer
    # more than any transport has threads for
    calls = {i: caller.transport.call(callee.member, frame(i, b"%d" % i)) for i in range(1, 41)}
    end = time.monotonic() + PATIENCE
    while len(waiting) < 40 and time.monotonic() < end:
        time.sleep(0.01)
    for i in reversed(list(waiting)):
        waiting[i].set(callee.reply(frame(i), b"late%d" % i))
    assert all(call.wait(PATIENCE).data == b"late%d" % i for i, call in calls.items())


def test_waiting_has_a_timeout_and_the_call_goes_on(sides):
    caller, callee = sides
    go = threading.Event()
    callee.answer = lambda f: (go.wait(PATIENCE), b"done")[1]
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
    assert pending.wait(PATIENCE).data == b"at last"


def test_the_callee_may_call_back_while_it_serves(sides):
    caller, callee = sides
    caller.answer = lambda f: b"inner"
    callee.answer = lambda f: callee.transport.call(caller.member, frame(99)).wait(PATIENCE).data
    assert caller.transport.call(callee.member, frame()).wait(PATIENCE).data == b"inner"


def test_a_call_to_a_closed_peer_says_that_it_is_gone(sides):
    caller, callee = sides
    callee.transport.close()
    # without Ray, a connection alone cannot tell whether its peer is gone or only deaf
    error = CallError if caller.kind == "direct" else WorkerDiedError
    with pytest.raises(error, match="side1"):
        caller.transport.call(callee.member, frame()).wait(PATIENCE)


def test_a_peer_known_to_be_gone_ends_the_calls_that_wait_for_it(sides):
    caller, callee = sides
    called = threading.Event()
    callee.answer = lambda f: (called.set(), Deferred())[1]
    pending = caller.transport.call(callee.member, frame())
    assert called.wait(PATIENCE)
    error = WorkerDiedError("side1", "killed")  # the news that a directory brings

    def report():
        del caller.members[1]
        caller.transport.on_peer_lost(callee.member, error)
        callee.transport.close()

    threading.Timer(0.2, report).start()
    assert isinstance(outcome_of(pending), Error)


def test_close_may_be_called_twice(sides):
    caller, _ = sides
    caller.transport.close()
    caller.transport.close()


def test_a_frame_survives_packing():
    sent = frame(3, b"d")
    sent.meta, sent.is_async = {"a": [1]}, True
    got = Frame.unpack(sent.pack())
    assert got == sent


def test_errors_of_the_callee_itself_end_the_call(sides):
    caller, callee = sides

    def answer(frame):
        raise RuntimeError("broken server")

    callee.answer = answer
    for _ in range(3):  # and the next calls, too: it goes on serving
        reply = caller.transport.call(callee.member, frame()).wait(PATIENCE)
        assert reply.kind is Kind.ERROR and b"broken server" in reply.data
