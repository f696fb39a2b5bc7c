"""A call that was started: it is waited for once, or abandoned."""

import pytest
from conftest import eventually
from memory_workers import WAIT, memory_group

from rayrpc._protocol.transport import PendingReply
from rayrpc._runtime import waiting_call
from rayrpc._runtime.invocation import Invocation
from rayrpc._runtime.started_call import StartedCall
from rayrpc.errors import CallTimeoutError


class Call:
    """Notes what happens to a call.

    Args:
        ends: its value, or the error that ends it.
    """

    def __init__(self, ends):
        self.ends = ends
        self.log = []

    def wait(self, unwanted):
        self.log.append(("wait", unwanted))
        if isinstance(self.ends, BaseException):
            raise self.ends
        return self.ends

    def abandon(self):
        self.log.append("abandon")

    def started(self):
        return StartedCall(self.wait, self.abandon)


def test_it_returns_the_value_and_is_abandoned_only_then():
    call = Call(3)
    assert call.started()() == 3
    assert call.log == [("wait", None), "abandon"]


def test_it_is_told_when_its_value_is_not_wanted_any_more():
    call = Call(3)

    def unwanted():
        return False

    call.started()(unwanted)
    assert call.log[0] == ("wait", unwanted)


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_however_the_wait_ends_it_is_abandoned(error):
    call = Call(error)
    with pytest.raises(type(error)) as raised:
        call.started()()
    assert raised.value is error and call.log == [("wait", None), "abandon"]


def test_one_that_is_not_waited_for_may_be_abandoned():
    call = Call(3)
    call.started().abandon()
    assert call.log == ["abandon"]


# -- of a worker ----------------------------------------------------------------------------------

seen: list[int] = []


def note(number):
    seen.append(number)
    return number


@pytest.fixture
def a():
    seen.clear()
    with memory_group() as start:
        made = start("a")
        start("b")
        yield made


def start_call(a, func, *args):
    return a.agent.caller.start(a.find("b"), Invocation(func, args), WAIT)


def test_calls_run_beside_one_another_and_are_waited_for_in_any_order(a):
    calls = [start_call(a, note, number) for number in range(3)]
    assert [calls[number]() for number in (2, 0, 1)] == [2, 0, 1]
    assert sorted(seen) == [0, 1, 2] and a.agent.caller.active == 0


def test_an_abandoned_one_runs_all_the_same_and_is_under_way_no_more(a):
    call = start_call(a, note, 7)
    assert a.agent.caller.active == 1
    call.abandon()
    call.abandon()
    assert a.agent.caller.active == 0 and eventually(lambda: seen == [7])


def test_one_that_is_unwanted_ends_as_if_its_time_was_up(a, monkeypatch):
    monkeypatch.setattr(waiting_call, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(a.transport, "call", unanswered)
    call = start_call(a, note, 7)
    with pytest.raises(CallTimeoutError):
        call(lambda: True)
    assert a.agent.caller.active == 0


def unanswered(peer, frame):
    frame.begin_to_send()
    frame.pending = PendingReply()
    return frame.pending
