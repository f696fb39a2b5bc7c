"""Messages of a worker that has left, and whose id another one has now."""

import pickle
from typing import Any

import pytest
from memory_workers import memory_group

from rayrpc._concurrency.outcome import Value
from rayrpc._protocol.ids import EPOCH_BITS
from rayrpc._protocol.membership import Change
from rayrpc._protocol.messages import Frame, Kind, UserDelete
from rayrpc._protocol.transport import PendingReply


@pytest.fixture
def start():
    with memory_group() as start:
        yield start


@pytest.fixture
def a(start):
    return start("a")


@pytest.fixture
def former(start, a):
    worker = start("b")
    assert a.sync("b", max, 1, 2) == 2
    return worker


@pytest.fixture
def successor(start, former):
    former.agent.shutdown()
    worker = start("b")
    assert worker.member.id == former.member.id and worker.member.epoch == 1
    return worker


def applied(worker, monkeypatch):
    """Return the list of RRef messages that a worker applies from now on."""
    messages: list[Any] = []
    monkeypatch.setattr(worker.agent.rrefs, "on_control", lambda *args: messages.append(args))
    return messages


def test_calls_are_numbered_anew_by_each_holder_of_an_id(former, successor):
    assert former.agent.caller.new_id() >> EPOCH_BITS == 0
    assert successor.agent.caller.new_id() >> EPOCH_BITS == 1
    assert successor.sync("a", max, 1, 2) == 2


@pytest.mark.parametrize("kind", [Kind.CALL, Kind.REMOTE, Kind.FETCH, Kind.CONTROL])
def test_a_late_call_of_the_former_one_is_refused(a, former, successor, monkeypatch, kind):
    rref_id, fork_id = former.agent.rrefs.new_id(), former.agent.rrefs.new_id()
    messages = applied(a, monkeypatch)
    session = a.agent._snapshot.session
    table = a.table
    table._enqueue(1, UserDelete, rref_id, fork_id)  # for the successor
    control = (UserDelete(0, rref_id, fork_id),)
    frame = Frame(kind, session, 1, 7, rref_id=rref_id, fork_id=fork_id, ack=9, control=control)
    reply = a.agent.callee.serve(frame)
    assert reply.kind is Kind.ERROR and reply.control == ()
    text = pickle.loads(reply.data)[0]
    assert "'a' refuses the call of a worker that is no member" in text and "'b'" in text
    assert messages == [] and rref_id not in table.owned and a.agent.callee.active == 0
    assert table.pending_workers() == [1]


def test_the_rref_messages_of_its_late_replies_are_dropped(start, a, former, monkeypatch):
    messages = applied(a, monkeypatch)
    sent: list[PendingReply] = []

    def call(peer, frame):
        sent.append(PendingReply())
        return sent[-1]

    def reply(pending):
        pending.complete(Value(Frame(Kind.VALUE, 0, 1, 7, ack=9)))

    with monkeypatch.context() as patched:
        patched.setattr(a.transport, "call", call)
        a.agent.caller.send_control(former.member)
        former.agent.shutdown()
        successor = start("b")
        reply(sent[0])
        assert messages == []
        a.agent.caller.send_control(successor.member)
        reply(sent[1])
        assert messages == [(1, 9, ())]


def test_a_successor_may_call_before_it_is_reported(start, a, former):
    a.directory.close()  # from now on it gets no changes by itself
    former.agent.shutdown()
    a.agent._apply([Change(3, "left", former.member)])
    successor = start("b")
    a.agent.members._fetch = successor.directory.members
    rref = successor.remote("a", max, 1, 2)
    assert rref.to_here() == 2
