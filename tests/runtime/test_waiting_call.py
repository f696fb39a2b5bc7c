"""A call that a thread waits for: how long it waits, and what ends the wait, in which order."""

import functools
import math
from typing import Any

import pytest

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import PendingReply
from rayrpc._runtime import waiting_call
from rayrpc._runtime.open_call import Request
from rayrpc._runtime.waiting_call import LOSS_POLLS, POLL_SECONDS, await_reply
from rayrpc.errors import CallError, CallLostError, CancelledError, WorkerDiedError

CALLEE = Member("token", "b", 1, None, "address")
REPLY = Frame(Kind.VALUE, 0, 1, 7)
DEATH = WorkerDiedError("b", "it was killed")


class Clock:
    """Time that passes while a reply is waited for."""

    def __init__(self):
        self.now = 1000.0


class SlowReply(PendingReply):
    """A reply that arrives after some seconds of a clock; notes how long it was waited for.

    Args:
        clock (Clock): shows the time.
        seconds: until the reply arrives.
        ends (Exception, optional): what arrives instead.
    """

    def __init__(self, clock, seconds, ends=None):
        super().__init__()
        self.clock = clock
        self.arrives = clock.now + seconds
        self.ends = ends
        self.waits: list[Any] = []

    def wait(self, timeout):
        self.waits.append(timeout)
        if self.clock.now + timeout < self.arrives:
            self.clock.now += timeout
            raise TimeoutError
        self.clock.now = self.arrives
        if self.ends is not None:
            raise self.ends
        return REPLY


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    deadline = functools.partial(Deadline, clock=lambda: made.now)
    monkeypatch.setattr(waiting_call, "Deadline", deadline)
    return made


@pytest.fixture
def request_(clock):
    return Request(CALLEE, 7, None, func=sorted)


def wait(request, pending, death=None, closed=False, unwanted=None):
    def death_of(member):
        assert member is CALLEE
        return death

    return await_reply(request, pending, death_of, lambda: closed, unwanted)


class TestTime:
    @pytest.mark.parametrize("seconds", [0, 0.1, POLL_SECONDS, 3.3, 1000])
    def test_a_call_without_a_timeout_waits_as_long_as_it_takes(self, clock, request_, seconds):
        pending = SlowReply(clock, seconds)
        assert wait(request_, pending) is REPLY
        assert clock.now == 1000 + seconds and set(pending.waits) == {POLL_SECONDS}

    @pytest.mark.parametrize("timeout", [0.001, 0.2, POLL_SECONDS, 1.2, 7.75])
    def test_a_timeout_ends_the_wait_just_then(self, clock, request_, timeout):
        request_.timeout = timeout
        pending = SlowReply(clock, math.inf)
        with pytest.raises(TimeoutError):
            wait(request_, pending)
        assert clock.now == pytest.approx(1000 + timeout) and max(pending.waits) <= POLL_SECONDS

    def test_a_reply_within_the_last_part_of_a_timeout_is_in_time(self, clock, request_):
        request_.timeout = 1.2
        pending = SlowReply(clock, 1.19)
        assert wait(request_, pending) is REPLY
        assert pending.waits == [POLL_SECONDS, POLL_SECONDS, pytest.approx(0.2)]

    def test_a_short_timeout_takes_one_wait(self, clock, request_):
        request_.timeout = 0.1
        pending = SlowReply(clock, math.inf)
        with pytest.raises(TimeoutError):
            wait(request_, pending)
        assert pending.waits == [pytest.approx(0.1)]

    def test_the_time_of_a_request_counts_from_the_wait(self, clock, request_):
        request_.timeout = 1.0
        clock.now += 50  # a call that was started before, and is waited for now
        assert wait(request_, SlowReply(clock, 0.9)) is REPLY


class TestEnds:
    def test_the_calls_own_error_comes_as_it_is(self, clock, request_):
        error = CallLostError("it was cut")
        with pytest.raises(CallLostError) as raised:
            wait(request_, SlowReply(clock, 3, error))
        assert raised.value is error

    def test_the_shutdown_of_this_worker_ends_it_at_the_next_look(self, clock, request_):
        with pytest.raises(CallError, match=r"^RPC was shut down on this worker before the call"):
            wait(request_, SlowReply(clock, math.inf), closed=True)
        assert clock.now == 1000 + POLL_SECONDS

    def test_a_cancellation_ends_it_with_the_names_of_function_and_worker(self, clock, request_):
        request_.is_cancelled = True
        text = r"^the call of sorted on RPC worker 'b' was cancelled$"
        with pytest.raises(CancelledError, match=text):
            wait(request_, SlowReply(clock, math.inf))
        assert clock.now == 1000 + POLL_SECONDS

    def test_a_cancelled_fetch_says_that_it_is_one(self, clock, request_):
        request_.is_cancelled, request_.func = True, None
        with pytest.raises(CancelledError, match=r"^a fetch from RPC worker 'b' was cancelled$"):
            wait(request_, SlowReply(clock, math.inf))

    def test_the_death_of_the_callee_ends_it_after_some_looks(self, clock, request_):
        pending = SlowReply(clock, math.inf)
        with pytest.raises(WorkerDiedError) as raised:
            wait(request_, pending, DEATH)
        assert raised.value is DEATH and len(pending.waits) == LOSS_POLLS + 1

    def test_a_reply_that_arrived_before_the_death_is_still_read(self, clock, request_):
        assert wait(request_, SlowReply(clock, LOSS_POLLS * POLL_SECONDS + 0.1), DEATH) is REPLY

    def test_a_timeout_may_end_it_before_the_death_does(self, clock, request_):
        request_.timeout = POLL_SECONDS * 1.5
        with pytest.raises(TimeoutError):
            wait(request_, SlowReply(clock, math.inf), DEATH)

    def test_a_reply_that_is_there_comes_before_all_that_could_end_it(self, clock, request_):
        request_.is_cancelled = True
        pending = SlowReply(clock, 0)
        assert wait(request_, pending, DEATH, closed=True, unwanted=lambda: True) is REPLY

    @pytest.mark.parametrize(
        ("ends", "error"),
        [
            ({"closed": True, "death": DEATH}, "RPC was shut down"),
            ({"death": DEATH}, "was cancelled"),
        ],
    )
    def test_its_own_shutdown_comes_before_a_cancellation_and_that_before_a_death(
        self, clock, request_, ends, error
    ):
        request_.is_cancelled = True
        with pytest.raises(CallError, match=error):
            wait(request_, SlowReply(clock, math.inf), unwanted=lambda: True, **ends)

    @pytest.mark.parametrize("end", ["closed", "cancelled", "death"])
    def test_an_error_does_not_show_the_look_that_found_it(self, clock, request_, end):
        request_.is_cancelled = end == "cancelled"
        with pytest.raises(CallError) as raised:
            wait(
                request_,
                SlowReply(clock, math.inf),
                WorkerDiedError("b", "x") if end == "death" else None,
                closed=end == "closed",
            )
        assert raised.value.__suppress_context__ and raised.value.__cause__ is None


class TestUnwanted:
    def test_it_is_asked_at_each_look_until_it_says_so(self, clock, request_):
        answers = iter([False, False, True])
        pending = SlowReply(clock, math.inf)
        with pytest.raises(TimeoutError):
            wait(request_, pending, unwanted=lambda: next(answers))
        assert len(pending.waits) == 3 and next(answers, None) is None

    def test_it_is_not_asked_while_the_reply_is_there(self, clock, request_):
        def fail():
            raise AssertionError("it was asked")

        assert wait(request_, SlowReply(clock, 0.4), unwanted=fail) is REPLY

    def test_it_is_not_asked_once_the_time_is_up(self, clock, request_):
        request_.timeout = POLL_SECONDS / 2
        asked: list[int] = []
        with pytest.raises(TimeoutError):
            wait(request_, SlowReply(clock, math.inf), unwanted=lambda: asked.append(1))
        assert not asked
