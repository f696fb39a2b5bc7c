"""What the seam of transports brings along: calls under way, late replies, replies by copy."""

import logging
import pickle
import threading
from typing import Any

import pytest
from conftest import run_in_threads

from rayrpc._concurrency.outcome import Error, Value
from rayrpc._protocol.messages import Frame, Kind, Objects
from rayrpc._protocol.transport import Deferred, Pending, PendingReply, copied, served
from rayrpc.errors import CallError, CallLostError

REQUEST = Frame(Kind.CALL, 5, 1, call_id=7)
WAIT = 60.0


def reply(data=b"reply", buffers=()):
    return Frame(Kind.VALUE, 5, 2, call_id=7, data=data, buffers=list(buffers))


def replying(made):
    """Return a callee that replies so to all calls."""
    return lambda frame, may_block=True: made


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class TestPendingReply:
    def test_it_ends_once_with_its_first_outcome(self):
        pending, seen = PendingReply(), []
        pending.on_done(seen.append)
        assert pending.complete(Value(REQUEST))
        assert not pending.complete(Error(CallLostError("too late")))
        assert pending.wait(0) is REQUEST and seen == [Value(REQUEST)]

    def test_an_error_is_raised_by_each_wait_as_a_copy(self):
        pending, error = PendingReply(), CallLostError("it was cut")
        pending.complete(Error(error))
        for _ in range(2):
            with pytest.raises(CallLostError, match="it was cut") as raised:
                pending.wait(None)
            assert raised.value is not error

    def test_after_a_timeout_it_may_be_waited_for_again_or_call_back(self):
        pending: PendingReply = PendingReply()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                pending.wait(0.001)
        seen: list[Any] = []
        pending.on_done(seen.append, urgent=False)
        pending.complete(Value(REQUEST))
        assert pending.wait(0) is REQUEST and seen == [Value(REQUEST)]

    def test_a_call_that_nobody_waits_for_any_more_hands_its_reply_over(self):
        pending, seen, late = PendingReply(), [], []
        pending.on_done(seen.append)
        pending.on_orphaned(late.append)
        pending.complete(Value(REQUEST))
        pending.on_orphaned(late.append)
        assert seen == [Value(REQUEST)] and late == seen * 2

    @pytest.mark.parametrize("outcome", [Value(REQUEST), Error(CallLostError("it was cut"))])
    @pytest.mark.parametrize("is_done", [False, True])
    def test_a_call_that_follows_another_one_ends_as_that_does(self, outcome, is_done):
        first, second = PendingReply(), PendingReply()
        if is_done:
            first.complete(outcome)
        second.follow(first)
        if not is_done:
            assert not second.is_done
            first.complete(outcome)
        assert second.value is outcome

    def test_a_call_that_has_ended_follows_no_more(self):
        first, second = PendingReply(), PendingReply()
        second.follow(first)
        second.complete(Error(CallLostError("its peer died")))
        assert first.complete(Value(REQUEST))
        with pytest.raises(CallLostError, match="its peer died"):
            second.wait(0)

    def test_of_two_threads_that_end_it_one_does(self, quick_switches):
        for _ in range(50):
            pending, ended, seen = PendingReply(), [], []
            start = threading.Barrier(3)

            def complete(outcome, pending=pending, ended=ended, start=start):
                start.wait(WAIT)
                if pending.complete(outcome):
                    ended.append(outcome)

            def look(pending=pending, seen=seen, start=start):
                start.wait(WAIT)
                pending.on_done(seen.append)

            ways = [(complete, Value(REQUEST)), (complete, Error(CallLostError("x"))), (look,)]
            run_in_threads(lambda run, *args: run(*args), ways, WAIT)
            assert len(ended) == 1 and seen == ended

    def test_other_pending_calls_take_an_orphans_reply_without_haste(self):
        class Noting(Pending):
            def wait(self, timeout):
                raise TimeoutError

            def on_done(self, callback, urgent=True):
                noted.append((callback, urgent))

        noted: list[Any] = []
        Noting().on_orphaned(print)
        assert noted == [(print, False)]


class TestServing:
    def test_a_reply_is_a_copy_of_what_the_callee_made(self):
        memory = bytearray(b"first")
        pending, made = PendingReply(), reply(buffers=[memory])
        pending.serve(replying(made), REQUEST)
        memory[:] = b"later"
        got = pending.wait(0)
        assert got is not made and got.data == b"reply" and got.buffers == [b"first"]

    def test_a_late_reply_is_a_copy_too(self):
        memory = bytearray(b"first")
        pending, deferred = PendingReply(), Deferred()
        pending.serve(replying(deferred), REQUEST)
        assert not pending.is_done
        deferred.set(reply(buffers=[memory]))
        memory[:] = b"later"
        assert pending.wait(0).buffers == [b"first"]

    def test_the_callee_is_told_whether_it_may_block(self):
        seen = []

        def serve(frame, may_block=True):
            seen.append((frame, may_block))
            return reply()

        served(serve, REQUEST)
        served(serve, REQUEST, False)
        PendingReply().serve(serve, REQUEST)
        assert seen == [(REQUEST, True), (REQUEST, False), (REQUEST, True)]

    def test_what_the_callee_returns_is_the_reply_itself(self):
        for made in (reply(), Deferred()):
            assert served(replying(made), REQUEST) is made

    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (KeyError("broken"), "KeyError: 'broken'"),
            (SystemExit(3), "SystemExit: 3"),
            (KeyboardInterrupt(), "KeyboardInterrupt: "),
            (Unprintable(), "Unprintable: <Unprintable that cannot be shown>"),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_whatever_the_callee_raises_its_reply_is_an_error_of_the_call(
        self, caplog, error, text
    ):
        def serve(frame, may_block=True):
            raise error

        made = served(serve, REQUEST)
        assert isinstance(made, Frame) and made.kind is Kind.ERROR
        assert (made.session, made.call_id) == (REQUEST.session, REQUEST.call_id)
        said, kind, name, state = pickle.loads(made.data)
        assert said == f"the call could not be served: {text}"
        assert pickle.loads(kind) is CallError and (name, state) == ("CallError", {})

    def test_an_error_of_the_callee_is_logged_with_its_traceback(self, caplog):
        def serve(frame, may_block=True):
            raise KeyError("broken")

        with caplog.at_level(logging.ERROR):
            served(serve, REQUEST)
        assert caplog.messages == ["a call could not be served"]
        assert "in serve" in caplog.text and "KeyError: 'broken'" in caplog.text


class TestDeferred:
    def test_buffers_of_a_reply_that_no_transport_waits_for_may_change_once_it_is_set(self):
        memory, deferred = bytearray(b"first"), Deferred()
        assert deferred.set(reply(buffers=[memory]))
        memory[:] = b"later"
        assert deferred.wait(0).buffers == [b"first"]

    def test_a_transport_that_waits_gets_the_very_buffers(self):
        memory, deferred, seen = bytearray(b"first"), Deferred(), []
        deferred.on_done(lambda frame: seen.append(frame.buffers[0]))
        deferred.set(reply(buffers=[memory]))
        assert seen[0] is memory

    def test_it_is_set_once(self):
        deferred, first = Deferred(), reply(b"first")
        assert deferred.set(first) and not deferred.set(reply(b"second"))
        assert deferred.wait(0) is first

    def test_a_call_begins_at_once_unless_a_transport_takes_its_beginning(self):
        began: list[int] = []
        assert Deferred().hold(lambda: began.append(1)) is False and not began
        deferred, held = Deferred(), []

        def hold(begin):
            held.append(begin)
            return True

        deferred.hold = hold
        assert deferred.hold(lambda: began.append(1)) is True and not began
        held[0]()
        assert began == [1]


class TestCopied:
    def test_it_shares_no_memory(self):
        memory = bytearray(b"first")
        meta = {"a": [1]}
        frame = Frame(Kind.CALL, 5, 1, call_id=7, meta=meta, data=b"x", buffers=[memory])
        got = copied(frame)
        assert got == frame
        memory[:] = b"later"
        meta["a"].append(2)
        assert got.buffers == [b"first"] and got.meta == {"a": [1]}

    def test_its_buffers_can_be_written_to(self):
        got = copied(reply(buffers=[b"fixed", memoryview(b"seen")]))
        for buffer in got.buffers:
            buffer[:1] = b"X"
        assert got.buffers == [b"Xixed", b"Xeen"]

    def test_references_to_objects_stay_what_they_are(self):
        ref = object()
        frame = Frame(Kind.CALL, 5, 1, call_id=7, objects=Objects((ref,), (0,)))
        objects = copied(frame).objects
        assert objects is not None and objects.refs[0] is ref
