"""The callee of a worker, given frames as a transport does: when it replies, and with what."""

import contextlib
import dataclasses
import gc
import pickle
import threading
import weakref

import pytest
from conftest import eventually
from memory_workers import WAIT, memory_group

from rayrpc._concurrency.outcome import Error, Value
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import Deferred, PendingReply, copied
from rayrpc._runtime.serialization.remote_errors import RemoteException

threads = []
released = threading.Event()


def add(x, y):
    threads.append(threading.get_ident())
    return x + y


def wait_until_released():
    released.wait(WAIT)
    return "released"


def fail():
    raise KeyError("as expected")


class Tracked:
    """An argument of which each copy is known while it is alive."""

    alive: "weakref.WeakSet[Tracked]" = weakref.WeakSet()

    def __init__(self):
        self.alive.add(self)

    def __reduce__(self):
        return Tracked, ()


def fail_with_a_cause(argument):
    try:
        raise KeyError(type(argument).__name__)
    except KeyError as exc:
        raise ValueError("as expected") from exc


def make_lock():
    return threading.Lock()


@pytest.fixture
def a(start):
    return start("a")


@pytest.fixture
def b(a, start):
    """Worker b, which runs one user's function at a time."""
    return start("b", num_worker_threads=1)


@pytest.fixture
def start():
    released.clear()
    threads.clear()
    with memory_group() as start:
        yield start
        released.set()


@pytest.fixture
def requests(a, b, monkeypatch):
    """Return what makes the frames of calls from a to b, which no transport sends."""

    def request(func, *args, way="future"):
        frames = []

        def keep(peer, frame):
            frames.append(copied(frame))
            frame.begin_to_send()
            return PendingReply()

        with monkeypatch.context() as patch:
            patch.setattr(a.transport, "call", keep)
            kept.append(getattr(a, way)("b", func, *args))
        return frames[0]

    kept = []  # else their RRefs are deleted
    return request


def value_of(reply):
    assert reply.kind is Kind.VALUE
    return pickle.loads(reply.data)


def error_of(reply):
    assert reply.kind is Kind.ERROR
    return RemoteException(*pickle.loads(reply.data))


class TestSlots:
    def test_a_function_runs_in_the_thread_that_serves_if_that_may_block(self, requests, b):
        reply = b.agent.callee.serve(requests(add, 1, 2))
        assert value_of(reply) == 3 and threads == [threading.get_ident()]

    def test_else_it_runs_in_another_one_and_the_reply_is_late(self, requests, b):
        deferred = b.agent.callee.serve(requests(add, 1, 2), may_block=False)
        assert isinstance(deferred, Deferred)
        replies = []
        deferred.on_done(replies.append)
        assert eventually(lambda: replies)
        assert value_of(replies[0]) == 3 and threads != [threading.get_ident()]

    def test_a_call_waits_for_a_slot_and_holds_no_thread_of_the_transport(self, requests, b):
        serve = b.agent.callee.serve
        replies = []
        serve(requests(wait_until_released), may_block=False).on_done(replies.append)
        assert eventually(lambda: not b.agent.slots.free)
        serve(requests(add, 1, 2)).on_done(replies.append)
        assert not replies and not threads and b.agent.callee.active == 2
        released.set()
        assert eventually(lambda: len(replies) == 2)
        assert [value_of(reply) for reply in replies] == ["released", 3]
        assert b.agent.callee.active == 0

    @pytest.mark.parametrize("number", [1, 2], ids=["at first", "when its peer reads again"])
    def test_a_call_for_which_no_thread_starts_is_an_error(self, requests, b, monkeypatch, number):
        submits, slots, held = [], b.agent.slots, []
        submit = slots.submit

        def fail_at(task):
            submits.append(task)
            if len(submits) == number:
                raise RuntimeError("can't start new thread")
            submit(task)

        def hold(begin):
            held.append(begin)
            return len(held) == 1

        monkeypatch.setattr(Deferred, "hold", property(lambda _: hold, lambda *_: None))
        monkeypatch.setattr(slots, "submit", fail_at)
        replies: list[Frame] = []
        b.agent.callee.serve(requests(add, 1, 2), may_block=False).on_done(replies.append)
        if number == 2:
            assert eventually(lambda: held)
            held[0]()
        assert eventually(lambda: replies) and "can't start new thread" in error_of(replies[0])[0]
        assert b.agent.callee.active == 0

    def test_an_inspection_takes_no_slot(self, requests, a, b):
        b.agent.callee.inspect = lambda data: data + b" inspected"
        b.agent.callee.serve(requests(wait_until_released), may_block=False)
        assert eventually(lambda: not b.agent.slots.free)
        request = requests(add, 1, 2)
        frame = Frame(Kind.INSPECT, request.session, a.member.id, 7, data=b"b is")
        reply = b.agent.callee.serve(frame)
        assert (reply.call_id, reply.data) == (7, b"b is inspected")


class TestRefusals:
    def test_a_call_of_another_session_is_refused(self, requests, b):
        request = requests(add, 1, 2)
        request.session += 1
        assert "for an earlier run of its group" in error_of(b.agent.callee.serve(request)).msg
        assert not threads and b.agent.callee.served == 0

    def test_a_call_that_was_cancelled_before_it_arrived_never_runs(self, requests, a, b):
        request = requests(add, 1, 2)
        b.agent.cancelling.serve(a.member.id, request.call_id, b.agent.callee.under_way)
        assert "CancelledError" in error_of(b.agent.callee.serve(request)).msg
        assert not threads


class TestReplies:
    def test_an_error_is_described_with_where_it_came_from(self, requests, b):
        b.agent.callee.replies.prints_errors = False
        described = error_of(b.agent.callee.serve(requests(fail)))
        assert "as expected" in described.msg and "in fail" in described.msg

    def test_a_result_that_cannot_be_sent_is_an_error(self, requests, b):
        b.agent.callee.replies.prints_errors = False
        text = error_of(b.agent.callee.serve(requests(make_lock))).msg
        assert "A result of RPC worker 'b' cannot be sent to another worker" in text

    def test_tasks_run_before_the_reply_in_the_order_in_which_they_were_given(self, requests, b):
        ended = []
        b.agent.callee.before_reply(lambda call, outcome: ended.append((1, call.func, outcome)))
        b.agent.callee.before_reply(lambda call, outcome: ended.append((2, call.func, outcome)))
        b.agent.callee.serve(requests(add, 1, 2))
        assert ended == [(1, add, Value(3)), (2, add, Value(3))]
        b.agent.callee.replies.prints_errors = False
        b.agent.callee.serve(requests(fail))
        assert isinstance(ended[-1][2], Error)

    def test_functions_run_within_the_contexts_of_around(self, requests, b):
        entered = []

        @contextlib.contextmanager
        def around(invocation):
            entered.append(invocation.func)
            yield
            entered.append("left")

        b.agent.callee.around.append(around)
        assert value_of(b.agent.callee.serve(requests(add, 1, 2))) == 3
        assert entered == [add, "left"]


class TestRemote:
    def test_it_is_confirmed_when_its_value_is_there_and_a_fetch_waits_for_it(self, requests, b):
        serve = b.agent.callee.serve
        made = requests(wait_until_released, way="remote")
        replies = []
        serve(made, may_block=False).on_done(replies.append)
        fetch = dataclasses.replace(made, kind=Kind.FETCH, fork_id=None, data=b"", call_id=99)
        deferred = serve(fetch)
        deferred.on_done(replies.append)
        assert not replies and len(b.agent.callee.under_way()) == 2
        released.set()
        assert eventually(lambda: len(replies) == 2)
        values = {reply.call_id: value_of(reply) for reply in replies}
        assert values == {made.call_id: None, 99: "released"}
        assert not b.agent.callee.under_way()


def test_an_rref_whose_function_failed_keeps_no_argument_of_it(a, b):
    rref = a.remote(b, fail_with_a_cause, Tracked())
    with pytest.raises(ValueError, match="as expected"):
        rref.to_here()

    def is_gone():
        gc.collect()
        return not Tracked.alive

    assert eventually(is_gone)
    with pytest.raises(ValueError, match="as expected"):
        rref.to_here()
