"""The caller of a worker, on a transport that replies when the test says so."""

import pickle
import threading
import time

import pytest
from conftest import eventually
from memory_workers import WAIT, memory_group

from rayrpc._concurrency.outcome import Error, Value
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import PendingReply
from rayrpc.errors import CallError, CallLostError, CallTimeoutError, CancelledError


def add(x, y):
    return x + y


class HeldTransport:
    """Keeps what is called, and replies when it is told to.

    Args:
        worker (MemoryWorker): whose calls are kept.
    """

    def __init__(self, worker):
        self._me = worker.agent.member.id
        self.frames = []
        self._pending = []
        worker.transport.call = self._call

    def _call(self, peer, frame):
        frame.pending = pending = PendingReply()
        frame.begin_to_send()
        self.frames.append(frame)
        self._pending.append(pending)
        return pending

    def reply(self, number, value):
        """Reply to a call; return False if it had a reply before."""
        frame = self.frames[number]
        made = Frame(Kind.VALUE, frame.session, 1, frame.call_id, data=pickle.dumps(value))
        return self._pending[number].complete(Value(made))

    def fail(self, number, error):
        """End a call with an error of the transport."""
        return self._pending[number].complete(Error(error))


@pytest.fixture
def a():
    with memory_group() as start:
        worker = start("a")
        start("b")
        yield worker
        vars(worker.transport).pop("call", None)  # shutdown sends


@pytest.fixture
def held(a):
    return HeldTransport(a)


@pytest.fixture
def in_thread():
    """Run a function in a thread; return the list that gets its value or error."""
    threads = []

    def start(function):
        ended = []

        def run():
            try:
                ended.append(function())
            except Exception as exc:
                ended.append(exc)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return ended

    yield start
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()


def test_each_call_has_a_number_of_its_own_and_says_who_calls(a, held):
    futures = [a.future("b", add, 1, n) for n in range(3)]
    frames = held.frames
    assert len({frame.call_id for frame in frames}) == 3
    assert {(frame.kind, frame.src) for frame in frames} == {(Kind.CALL, a.member.id)}
    for number in (2, 0, 1):  # replies come in any order
        assert held.reply(number, number)
    assert [future.wait() for future in futures] == [0, 1, 2]


def test_calls_that_wait_are_under_way_until_their_replies_come(a, held, in_thread):
    ended = in_thread(lambda: a.sync("b", add, 1, 2))
    future = a.future("b", add, 3, 4)
    assert eventually(lambda: len(held.frames) == 2)
    waiting, opened = a.agent.caller.under_way()
    assert [request.func for request in waiting] == [add]
    assert [call.request.func for call in opened] == [add]
    assert a.agent.caller.active == 2 and not ended
    for number in range(2):
        held.reply(number, number)
    future.wait()
    assert eventually(lambda: ended)
    assert a.agent.caller.active == 0 and a.agent.caller.under_way() == ([], [])


def test_a_timeout_ends_a_call_and_its_late_reply_is_dropped(a, held):
    start = time.monotonic()
    with pytest.raises(CallTimeoutError, match=r"RPC ran for more than set timeout \(50 ms\)"):
        a.sync("b", add, 1, 2, timeout=0.05)
    future = a.future("b", add, 1, 2, timeout=0.05)
    with pytest.raises(RuntimeError, match=r"RPC ran for more than set timeout \(50 ms\)"):
        future.wait()
    assert time.monotonic() - start >= 0.1
    assert a.agent.caller.active == 0
    assert held.reply(0, "late") and held.reply(1, "late")  # nobody takes them
    assert a.agent.caller.active == 0 and future.done()


def test_an_error_of_the_transport_is_that_of_the_call(a, held, in_thread):
    ended = in_thread(lambda: a.sync("b", add, 1, 2))
    future = a.future("b", add, 1, 2)
    assert eventually(lambda: len(held.frames) == 2)
    for number in range(2):
        held.fail(number, CallLostError("it was cut"))
    with pytest.raises(CallLostError, match="it was cut"):
        future.wait()
    assert eventually(lambda: ended) and isinstance(ended[0], CallLostError)


def test_a_cancelled_call_fails_at_once_and_its_late_reply_is_dropped(a, held):
    future = a.future("b", add, 1, 2)
    (call,) = a.agent.caller.under_way()[1]
    assert a.agent.caller.cancel(call)
    with pytest.raises(CancelledError, match="was cancelled"):
        future.wait()
    assert not a.agent.caller.cancel(call)
    assert held.reply(0, "late")


def test_closing_fails_the_calls_under_way(a, held, in_thread):
    ended = in_thread(lambda: a.sync("b", add, 1, 2))
    future = a.future("b", add, 1, 2)
    assert eventually(lambda: len(held.frames) == 2)
    a.agent.caller.close()
    a.agent.members.notify()
    with pytest.raises(CallError, match="RPC was shut down on this worker"):
        future.wait()
    held.fail(0, CallError("the transport is closed"))
    assert eventually(lambda: ended) and isinstance(ended[0], CallError)


def test_what_could_not_be_sent_is_not_under_way(a, held, monkeypatch):
    def call(peer, frame):
        raise OSError("as expected")

    monkeypatch.setattr(a.transport, "call", call)
    with pytest.raises(OSError, match="as expected"):
        a.sync("b", add, 1, 2)
    with pytest.raises(OSError, match="as expected"):
        a.future("b", add, 1, 2)
    assert a.agent.caller.active == 0
