"""A call on a connection: its reply, its waits to read, and its way to another transport."""

import functools
import threading

import pytest
from interrupting import strikes

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.outcome import Error, Value
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import PendingReply
from rayrpc._transports.direct import connection_call
from rayrpc._transports.direct.connection_call import READ, ConnectionCall, take_unsent
from rayrpc._transports.direct.reader_schedule import START_DELAYED, START_THREAD, ReaderSchedule
from rayrpc._transports.direct.wire import Message
from rayrpc.errors import CallLostError

WAIT_SECONDS = 60.0
LOST = Error(CallLostError("the connection broke"))


class Connection:
    """Records what its calls ask of it; nothing is read."""

    def __init__(self):
        self.lock = threading.Lock()
        self.schedule: ReaderSchedule = ReaderSchedule()
        self.schedule.release()  # it is connected
        self.deadlines, self.started, self.rerouted = [], [], []
        self.repairs = 0

    def call(self, call_id=1, frame=None):
        return ConnectionCall(self, call_id, frame, self.lock)

    def wait_reply(self, call, deadline):
        self.deadlines.append(deadline)

    def start_reader(self, start):
        self.started.append(start)

    def repair(self):
        self.repairs += 1

    def reroute(self, call, reason):
        self.rerouted.append((call.id, reason))


@pytest.fixture
def connection():
    return Connection()


def request(call_id=1):
    return Frame(Kind.CALL, 0, 0, call_id, data=b"request")


def reply(data=b"reply", call_id=1):
    return Message(call_id, Frame(Kind.VALUE, 0, 1, call_id, data=data))


class TestReplies:
    def test_a_wait_returns_the_frame_or_raises_the_error(self, connection):
        call, lost = connection.call(1), connection.call(2)
        call.set(reply())
        lost.set(LOST)
        assert call.wait(None).data == b"reply"
        with pytest.raises(CallLostError, match="the connection broke"):
            lost.wait(None)

    def test_a_wait_without_a_timeout_has_no_deadline(self, connection):
        call = connection.call()
        call.set(reply())
        assert call.wait(None) and call.wait(WAIT_SECONDS)
        none, deadline = connection.deadlines
        assert none.remaining() is None and 0 < deadline.remaining() <= WAIT_SECONDS

    def test_a_reply_that_comes_elsewhere_is_waited_for_there_until_the_same_deadline(
        self, connection
    ):
        timeouts = []

        class Elsewhere(PendingReply):
            def wait(self, timeout):
                timeouts.append(timeout)
                return super().wait(0.0)

        elsewhere = Elsewhere()
        call = connection.call()
        call.set(elsewhere)
        with pytest.raises(TimeoutError):
            call.wait(-1.0)  # the announcement has taken all of the time
        with pytest.raises(TimeoutError):
            call.wait(None)
        assert timeouts == [0.0, None]
        elsewhere.complete(Value(reply(b"elsewhere").frame()))
        assert call.wait(None).data == b"elsewhere"

    def test_it_is_called_back_with_what_comes_elsewhere_when_that_is_there(self, connection):
        call, elsewhere, outcomes = connection.call(), PendingReply(), []
        call.on_done(outcomes.append)
        call.set(elsewhere)
        assert not outcomes and connection.schedule.callbacks == 0  # none reads for it any more
        elsewhere.complete(LOST)
        assert outcomes == [LOST]

    def test_the_first_reply_is_the_reply(self, connection):
        call, outcomes = connection.call(), []
        call.on_done(outcomes.append)
        assert call.set(reply(b"first")) and not call.set(LOST)
        assert call.wait(None).data == b"first"
        assert [outcome.unwrap().data for outcome in outcomes] == [b"first"]

    def test_a_reply_ends_the_reference_to_the_request(self, connection):
        call = connection.call(frame=request())
        assert call.frame is not None
        call.set(reply())
        assert call.frame is None

    @pytest.mark.parametrize("comes_first", [True, False])
    def test_an_error_of_a_callback_is_logged_and_not_raised(self, connection, caplog, comes_first):
        def fail(_):
            raise RuntimeError("of the program")

        call = connection.call()
        if comes_first:
            call.set(reply())
        call.on_done(fail)
        if not comes_first:
            assert call.set(reply())
        assert "of the program" in caplog.text


class TestCallbacks:
    @pytest.mark.parametrize(("urgent", "start"), [(True, START_THREAD), (False, START_DELAYED)])
    def test_a_callback_starts_a_reader_until_the_reply_is_there(self, connection, urgent, start):
        call = connection.call()
        call.on_done(lambda _: None, urgent=urgent)
        assert connection.started == [start] and connection.schedule.callbacks == 1
        call.set(reply())
        assert connection.schedule.callbacks == 0

    def test_a_second_call_that_calls_back_starts_no_second_reader(self, connection):
        for number in (1, 2):
            connection.call(number).on_done(lambda _: None)
        assert connection.started == [START_THREAD] and connection.schedule.callbacks == 2

    def test_a_callback_after_the_reply_runs_at_once_and_starts_no_reader(self, connection):
        call, outcomes = connection.call(), []
        call.set(reply())
        call.on_done(outcomes.append)
        assert outcomes[0].unwrap().data == b"reply"
        assert not connection.started and connection.schedule.callbacks == 0

    def test_an_orphaned_call_starts_no_reader_and_calls_back_beside_another_callback(
        self, connection
    ):
        call, orphaned, outcomes = connection.call(), [], []
        call.on_orphaned(orphaned.append)
        assert not connection.started and connection.schedule.callbacks == 0
        call.on_done(outcomes.append)
        call.set(reply())
        assert orphaned == outcomes and orphaned[0].unwrap().data == b"reply"

    def test_a_callback_and_a_reply_at_once_meet(self, connection, quick_switches):
        rounds = 500
        outcomes: list = []
        calls = [connection.call(number) for number in range(rounds)]
        barrier = threading.Barrier(2)

        def call_back():
            for call in calls:
                barrier.wait(WAIT_SECONDS)
                call.on_done(lambda outcome: outcomes.append(outcome.value.call_id))

        def complete():
            for call in calls:
                barrier.wait(WAIT_SECONDS)
                call.set(reply(call_id=call.id))

        threads = [threading.Thread(target=each) for each in (call_back, complete)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        assert sorted(outcomes) == list(range(rounds))
        assert connection.schedule.callbacks == 0

    def test_an_interrupt_as_a_reader_is_started_has_the_connection_repaired(self, connection):
        def interrupt(start):
            raise KeyboardInterrupt

        connection.start_reader = interrupt
        with pytest.raises(KeyboardInterrupt):
            connection.call().on_done(lambda _: None)
        assert connection.repairs == 1

    @pytest.mark.parametrize("is_struck", ["on_done", "set"])
    def test_after_an_interrupt_at_any_point_the_callback_is_due_or_was_called(self, is_struck):
        for strike in strikes([connection_call.__file__]):
            connection, outcomes = Connection(), []
            call = connection.call(frame=request())
            on_done = functools.partial(call.on_done, outcomes.append)
            if is_struck == "on_done":
                strike(on_done)
                assert strike.missed or connection.repairs or connection.schedule.callbacks == 0
                was_added = connection.schedule.callbacks == 1
                assert was_added or not strike.missed
                call.set(reply())
                assert len(outcomes) == was_added, f"at point {strike.number}"
            else:
                on_done()
                strike(functools.partial(call.set, reply()))
                call.set_again(reply(b"again"))
                assert outcomes and len({each.unwrap().data for each in outcomes}) == 1
            assert connection.schedule.callbacks == 0, f"at point {strike.number}"
        assert strike.number > 3


class TestWaits:
    def test_a_waiter_that_is_to_read_waits_no_longer(self, connection):
        call = connection.call()
        waiter = call.new_waiter()
        assert waiter.set(READ)
        assert call.wait_notified(Deadline(None)) and not call.is_done
        later = call.new_waiter()
        call.set(reply())
        assert later.value is None  # only the wait for it would have told it
        assert call.wait_notified(Deadline(None)) is False

    def test_the_reply_ends_the_wait_from_another_thread(self, connection):
        call = connection.call()
        call.new_waiter()
        reads = []
        thread = threading.Thread(target=lambda: reads.append(call.wait_notified(Deadline(None))))
        thread.start()
        call.set(reply())
        thread.join(WAIT_SECONDS)
        assert reads == [False]

    def test_a_wait_that_has_ended_is_not_notified_and_the_reply_arrives(self, connection):
        call = connection.call()
        waiter = call.new_waiter()
        with pytest.raises(TimeoutError):
            call.wait_notified(Deadline(-1.0))
        call.end_wait()
        call.end_wait()
        assert waiter.set(READ) is False and waiter.value is not READ
        assert call.set(reply()) and call.wait(None).data == b"reply"

    def test_a_waiter_that_was_notified_before_its_wait_ends_stays_so(self, connection):
        call = connection.call()
        waiter = call.new_waiter()
        waiter.set(READ)
        call.end_wait()
        assert waiter.value is READ

    def test_a_call_without_a_waiter_ends_no_wait(self, connection):
        connection.call().end_wait()


class TestUnsentCalls:
    def test_those_with_their_frame_are_taken_and_the_others_stay(self, connection):
        there, elsewhere, other = (
            connection.call(1, request(1)),
            connection.call(2),  # another connection sends it
            connection.call(3, request(3)),
        )
        calls = {call.id: call for call in (there, elsewhere, other)}
        assert take_unsent(calls, [1, 2, 99], "cut") == [there]
        assert set(calls) == {2, 3} and not connection.rerouted

    def test_one_that_is_being_sent_is_rerouted_by_the_thread_that_sends_it(self, connection):
        call = connection.call(1, request())
        call.is_sending = True
        calls = {1: call}
        assert take_unsent(calls, [1], "cut") == [] and not calls
        assert not connection.rerouted
        call.kept()
        assert connection.rerouted == [(1, "cut")]

    def test_one_whose_frame_is_kept_is_rerouted_by_who_finds_the_cut(self, connection):
        call = connection.call(1, request())
        call.is_sending = True
        call.kept()
        assert not connection.rerouted
        assert take_unsent({1: call}, [1], "cut") == [call]

    def test_the_cut_and_the_end_of_the_sending_at_once_reroute_it_once(
        self, connection, quick_switches
    ):
        calls = [connection.call(number, request(number)) for number in range(500)]
        by_id = {call.id: call for call in calls}
        taken = []
        barrier = threading.Barrier(2)
        for call in calls:
            call.is_sending = True

        def send():
            for call in calls:
                barrier.wait(WAIT_SECONDS)
                call.kept()

        def cut():
            for call in calls:
                barrier.wait(WAIT_SECONDS)
                with connection.lock:
                    taken.extend(take_unsent(by_id, [call.id], "cut"))

        threads = [threading.Thread(target=each) for each in (send, cut)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        rerouted = [call_id for call_id, _ in connection.rerouted] + [call.id for call in taken]
        assert sorted(rerouted) == list(range(500)) and not by_id
