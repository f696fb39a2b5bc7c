"""Which thread reads the replies of a connection: waits, time-outs, interrupts and the end."""

import functools
import queue
import threading
from typing import Any

import pytest
from conftest import eventually
from interrupting import strikes

from rayrpc._concurrency.outcome import Error
from rayrpc._concurrency.reader import ReaderWatchdog, release_reader
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._transports.direct import reply_reader
from rayrpc._transports.direct.connection_call import ConnectionCall
from rayrpc._transports.direct.reader_schedule import BROKEN, IDLE
from rayrpc._transports.direct.reply_reader import ReplyReader
from rayrpc._transports.direct.wire import Message
from rayrpc.errors import CallLostError

WAIT_SECONDS = 60.0
TICK_SECONDS = 0.01  # of the stream below


class Stream:
    """What a connection receives: the numbers of calls, or an exception to raise.

    A message is read again until it is handled, as after an interrupt.
    """

    def __init__(self):
        self.received: queue.Queue = queue.Queue()
        self.is_intact = True
        self.readers = []  # idents of the threads that have read, one a message
        self.one_reads = threading.Event()
        self.overlaps = 0  # how often two threads have read at once
        self.before_first_read = lambda: None
        self._current = None
        self._in_use = threading.Lock()

    def read(self):
        before, self.before_first_read = self.before_first_read, lambda: None
        before()
        self.one_reads.set()
        if not self._in_use.acquire(blocking=False):
            self.overlaps += 1
            return self._read()
        try:
            return self._read()
        finally:
            self._in_use.release()

    def _read(self):
        if self._current is None:
            try:
                got = self.received.get(timeout=TICK_SECONDS)
            except queue.Empty:
                raise TimeoutError from None
            if isinstance(got, BaseException):
                raise got
            self._current = Message(got, Frame(Kind.VALUE, 0, 1, got))
            self.readers.append(threading.get_ident())
        return self._current

    def wait(self, seconds):
        self.one_reads.set()
        with self.received.not_empty:
            return self.received.not_empty.wait_for(
                lambda: self._current is not None or self.received.queue, seconds
            )

    def handled(self):
        self._current = None


class Connection(ReplyReader):
    """Completes the calls whose numbers arrive."""

    def __init__(self, threads, watchdog):
        super().__init__(threads, watchdog)
        stream: Any = Stream()
        self.stream = self._stream = stream
        self.calls = {}
        self.reasons = []
        self._release_reader()  # it is connected

    def call(self, number, kind=ConnectionCall):
        call = self.calls[number] = kind(self, number, None, self._lock)
        return call

    def receive(self, *what):
        for each in what:
            self.stream.received.put(each)

    def fail(self):
        """End the calls, as the owner of a broken connection does."""
        for call in list(self.calls.values()):
            call.set(Error(CallLostError("the connection broke")))

    def read_if_idle(self):
        return self._read_if_idle(self.stream)

    def reroute(self, call, reason):
        raise AssertionError("nothing is sent here")

    def _complete(self, message, is_handled=False):
        call = self.calls.get(message.number)
        if not is_handled:
            self.stream.handled()
        if call is not None:
            call.set(message)

    def _break_off(self, reason):
        with self._lock:
            if self.schedule.break_off():
                self.reasons.append(reason)


@pytest.fixture
def threads():
    threads = ThreadCache("caller", soft_limit=100, idle_seconds=0.05)
    yield threads
    threads.close()


@pytest.fixture
def connection(threads):
    watchdog = ReaderWatchdog()
    yield Connection(threads, watchdog)
    watchdog.close()


class Waiter(threading.Thread):
    """Waits for a reply in a thread of its own."""

    def __init__(self, call, timeout=WAIT_SECONDS):
        super().__init__(daemon=True)
        self._call, self._timeout = call, timeout
        self.error: BaseException | None = None
        self.start()

    def run(self):
        try:
            self._call.wait(self._timeout)
        except BaseException as exc:
            self.error = exc

    def end(self):
        """Return the error of the wait, None if it has the reply."""
        self.join(WAIT_SECONDS)
        assert not self.is_alive()
        return self.error


def waits_for_turn(call):
    return eventually(lambda: call.waiter is not None)


class TestTurns:
    def test_a_caller_that_waits_reads_itself_and_leaves_the_connection_idle(
        self, connection, threads
    ):
        call = connection.call(1)
        connection.receive(1)
        assert call.wait(WAIT_SECONDS).call_id == 1
        assert connection.stream.readers == [threading.get_ident()] and threads.size == 0
        assert connection.schedule.state == IDLE

    def test_the_first_caller_completes_the_calls_of_others_and_the_next_reads_on(self, connection):
        calls = [connection.call(number) for number in (1, 2, 3)]
        waiters = [Waiter(calls[0])]
        assert connection.stream.one_reads.wait(WAIT_SECONDS)
        for call in calls[1:]:
            waiters.append(Waiter(call))
            assert waits_for_turn(call)
        connection.receive(2)
        assert waiters[1].end() is None
        connection.receive(1)
        assert waiters[0].end() is None
        connection.receive(3)
        assert waiters[2].end() is None
        first, _, last = waiters
        assert connection.stream.readers == [first.ident, first.ident, last.ident]
        assert connection.schedule.state == IDLE

    def test_those_that_wait_read_in_the_order_in_which_they_came(self, connection):
        waiters = []
        for number in range(1, 5):
            call = connection.call(number)
            waiters.append(Waiter(call))
            if number == 1:
                assert connection.stream.one_reads.wait(WAIT_SECONDS)
            else:
                assert waits_for_turn(call)
        connection.receive(1, 2, 3, 4)
        assert [waiter.end() for waiter in waiters] == [None] * 4
        readers = connection.stream.readers
        order = [waiter.ident for waiter in waiters]
        assert readers == sorted(readers, key=order.index)

    def test_many_callers_of_all_kinds_get_their_replies(self, connection, quick_switches):
        done: queue.Queue = queue.Queue()
        numbers = iter(range(1, 10**9))
        kinds = ["waits", "waits", "urgent", "later", "gives up"]
        rounds = 100

        def call(kind):
            for _ in range(rounds):
                number = next(numbers)
                call = connection.call(number)
                connection.receive(number)
                try:
                    if kind in ("waits", "gives up"):
                        call.wait(WAIT_SECONDS if kind == "waits" else 0.0)
                        done.put(number)
                        continue
                except TimeoutError:
                    assert kind == "gives up"
                call.on_done(
                    lambda outcome: done.put(outcome.value.call_id), urgent=kind == "urgent"
                )

        callers = [threading.Thread(target=call, args=(kind,)) for kind in kinds]
        for each in callers:
            each.start()
        got = sorted(done.get(timeout=WAIT_SECONDS) for _ in range(rounds * len(kinds)))
        for each in callers:
            each.join(WAIT_SECONDS)
        assert got == list(range(1, rounds * len(kinds) + 1)) and done.empty()
        assert eventually(lambda: connection.schedule.state == IDLE)
        assert not connection.reasons and not connection.stream.overlaps


class TestTimeouts:
    def test_a_reader_that_times_out_gives_its_turn_to_one_that_waits(self, connection):
        late, other = connection.call(1), connection.call(2)
        first = Waiter(late, timeout=0.05)
        assert connection.stream.one_reads.wait(WAIT_SECONDS)
        second = Waiter(other)
        assert isinstance(first.end(), TimeoutError)
        connection.receive(2, 1)
        assert second.end() is None
        assert late.wait(WAIT_SECONDS).call_id == 1  # it may be waited for again
        assert not connection.reasons

    def test_one_that_times_out_before_its_turn_is_passed_over(self, connection):
        calls = [connection.call(number) for number in (1, 2, 3)]
        first = Waiter(calls[0])
        assert connection.stream.one_reads.wait(WAIT_SECONDS)
        gives_up = Waiter(calls[1], timeout=0.02)
        assert isinstance(gives_up.end(), TimeoutError)
        last = Waiter(calls[2])
        assert waits_for_turn(calls[2])
        connection.receive(1, 3)
        assert first.end() is None and last.end() is None
        assert connection.schedule.state == IDLE

    def test_one_that_has_timed_out_as_it_is_chosen_passes_the_turn_on(self, connection):
        happened = []

        class GivesUp(ConnectionCall):
            def end_wait(self):
                super().end_wait()
                if not happened:  # it is among those that wait still
                    assert eventually(lambda: len(readers) == 2) and waits_for_turn(calls[2])
                    connection.receive(1)
                    happened.append(readers[0].end())
                    connection.receive(3)
                    happened.append(readers[1].end())

        calls = [connection.call(1), connection.call(2, GivesUp), connection.call(3)]
        readers = [Waiter(calls[0])]
        assert connection.stream.one_reads.wait(WAIT_SECONDS)
        gives_up = Waiter(calls[1], timeout=0.04)
        assert waits_for_turn(calls[1])
        readers.append(Waiter(calls[2]))
        assert isinstance(gives_up.end(), TimeoutError)
        assert happened == [None, None]
        assert connection.schedule.state == IDLE

    def test_a_reply_that_has_arrived_is_taken_after_the_deadline_too(self, connection):
        call = connection.call(1)
        connection.receive(1)
        assert call.wait(-1.0).call_id == 1
        with pytest.raises(TimeoutError):
            connection.call(2).wait(-1.0)
        assert connection.schedule.state == IDLE

    @pytest.mark.parametrize("error", [TimeoutError(), KeyboardInterrupt()])
    def test_only_one_that_loses_received_bytes_ends_the_connection(
        self, connection, monkeypatch, error
    ):
        def strike(seconds):
            raise error

        monkeypatch.setattr(connection.stream, "wait", strike)
        for is_intact in (True, False):
            connection.stream.is_intact = is_intact
            with pytest.raises(type(error)):
                connection.call(1).wait(0.0)
            assert bool(connection.reasons) == (not is_intact)
        assert connection.reasons == [f"it could not be read: {error!r}"]


class TestEnds:
    def test_the_end_of_the_connection_ends_the_calls_by_what_its_owner_says(self, connection):
        calls = [connection.call(1), connection.call(2)]
        waiters = [Waiter(calls[0])]
        assert connection.stream.one_reads.wait(WAIT_SECONDS)
        waiters.append(Waiter(calls[1]))
        assert waits_for_turn(calls[1])
        connection.receive(EOFError("the peer has closed it"))
        assert eventually(lambda: connection.reasons)
        assert connection.reasons == ["its connection was cut (the peer has closed it)"]
        assert all(waiter.is_alive() for waiter in waiters)
        connection.fail()
        assert all(isinstance(waiter.end(), CallLostError) for waiter in waiters)

    def test_a_caller_that_comes_after_the_end_waits_for_the_owner(self, connection):
        connection.receive(EOFError("cut"))
        with pytest.raises(TimeoutError):
            connection.call(1).wait(0.02)
        assert connection.schedule.state == BROKEN and connection.stream.one_reads.is_set()
        connection.stream.one_reads.clear()
        later = connection.call(2)
        waiter = Waiter(later)
        assert waits_for_turn(later)
        connection.fail()
        assert isinstance(waiter.end(), CallLostError)
        assert not connection.stream.one_reads.is_set()

    def test_an_error_of_the_reader_is_raised_in_its_thread_and_ends_the_connection(
        self, connection
    ):
        connection.receive(ArithmeticError("unexpected"))
        with pytest.raises(ArithmeticError):
            connection.call(1).wait(WAIT_SECONDS)
        assert connection.reasons == ["it could not be read: ArithmeticError('unexpected')"]

    def test_an_error_of_a_thread_that_reads_for_callbacks_is_logged_and_ends_the_connection(
        self, connection, caplog
    ):
        outcomes = []
        connection.call(1).on_done(outcomes.append)
        connection.receive(ArithmeticError("unexpected"))
        assert eventually(lambda: connection.reasons)
        assert "unexpected" in connection.reasons[0] and "unexpected" in caplog.text
        connection.fail()
        assert isinstance(outcomes[0].error, CallLostError)


class TestCallbacks:
    @pytest.mark.parametrize("urgent", [True, False])
    def test_a_thread_reads_while_callbacks_are_due_and_no_longer(self, connection, urgent):
        done: queue.SimpleQueue = queue.SimpleQueue()
        for number in (1, 2):
            connection.call(number).on_done(done.put, urgent=urgent)
        connection.receive(1, 2)
        assert {done.get(timeout=WAIT_SECONDS).value.call_id for _ in range(2)} == {1, 2}
        assert threading.get_ident() not in connection.stream.readers
        assert eventually(lambda: connection.schedule.state == IDLE)
        connection.receive(99)  # nobody asks for it: nobody reads
        assert connection.call(3).id and not connection.stream.received.empty()

    def test_a_callers_reply_is_read_by_the_thread_that_reads_for_callbacks(self, connection):
        done: queue.SimpleQueue = queue.SimpleQueue()
        connection.call(1).on_done(done.put)
        assert connection.stream.one_reads.wait(WAIT_SECONDS)
        waiter = Waiter(connection.call(2))
        connection.receive(2)
        assert waiter.end() is None
        assert waiter.ident not in connection.stream.readers
        connection.receive(1)
        assert done.get(timeout=WAIT_SECONDS)

    @pytest.mark.parametrize("tells", [True, False])
    def test_another_thread_reads_on_while_a_callback_blocks(self, connection, threads, tells):
        """It tells so; else the watchdog finds it. The thread that blocked reads no more."""
        go, done = threading.Event(), threading.Event()

        def block(_):
            if tells:
                release_reader()
            assert go.wait(WAIT_SECONDS)

        connection.call(1).on_done(block)
        connection.call(2).on_done(lambda _: done.set())
        connection.receive(1, 2)
        try:
            assert done.wait(WAIT_SECONDS)
            first, second = connection.stream.readers
            assert first != second
            third = threading.Event()
            connection.call(3).on_done(lambda _: third.set())
        finally:
            go.set()
        assert eventually(lambda: threads.size == 1)  # the other one has ended
        connection.receive(3)
        assert third.wait(WAIT_SECONDS) and not connection.stream.overlaps
        assert eventually(lambda: connection.schedule.state == IDLE)

    def test_a_caller_reads_on_while_a_callback_blocks(self, connection):
        go = threading.Event()

        def block(_):
            release_reader()
            assert go.wait(WAIT_SECONDS)

        connection.call(1).on_done(block)
        waiter = Waiter(connection.call(2))
        connection.receive(1)
        try:
            assert eventually(lambda: connection.stream.readers)
            connection.receive(2)
            assert waiter.end() is None
        finally:
            go.set()


class TestReadIfIdle:
    def test_what_has_arrived_is_read_unless_another_thread_reads(self, connection):
        calls = [connection.call(number) for number in (1, 2)]
        connection.receive(1, 2)
        assert connection.read_if_idle() and all(call.is_done for call in calls)
        assert connection.read_if_idle() and connection.schedule.state == IDLE
        waiter = Waiter(connection.call(3))
        assert eventually(lambda: connection.schedule.state != IDLE)
        assert not connection.read_if_idle()
        connection.receive(3)
        assert waiter.end() is None

    def test_an_error_is_raised_and_ends_the_connection(self, connection):
        connection.receive(ArithmeticError("unexpected"))
        with pytest.raises(ArithmeticError):
            connection.read_if_idle()
        assert "unexpected" in connection.reasons[0]


@pytest.mark.parametrize("next_is", ["a caller", "a callback"])
def test_an_interrupt_of_the_reader_at_any_point_leaves_another_one(threads, next_is):
    watchdog = ReaderWatchdog()
    for strike in strikes([reply_reader.__file__]):
        connection = Connection(threads, watchdog)
        struck, other = connection.call(1), connection.call(2)
        done: queue.SimpleQueue = queue.SimpleQueue()
        waiters: list[Waiter] = []

        def begin(other=other, done=done, waiters=waiters):
            if next_is == "a callback":
                other.on_done(done.put)
            else:
                waiters.append(Waiter(other))
                assert waits_for_turn(other)

        connection.stream.before_first_read = begin
        connection.receive(1)
        strike(functools.partial(struck.wait, WAIT_SECONDS))
        if not connection.stream.one_reads.is_set():  # it was struck before
            connection.stream.before_first_read = lambda: None
            if next_is == "a callback":
                other.on_done(done.put)
            else:
                waiters.append(Waiter(other))
        connection.receive(2)
        if next_is == "a callback":
            assert done.get(timeout=WAIT_SECONDS), f"at point {strike.number}"
        else:
            assert waiters[0].end() is None, f"at point {strike.number}"
        assert struck.wait(WAIT_SECONDS).call_id == 1
        assert eventually(lambda: connection.schedule.state == IDLE)  # noqa: B023 - in this round
        assert not connection.reasons and not connection.stream.overlaps
    watchdog.close()
    assert strike.number > 10


def test_where_the_end_of_a_wait_is_interrupted_too_another_thread_ends_it(connection):
    struck = []

    class Struck(ConnectionCall):
        def end_wait(self):
            if not struck:
                struck.append(threading.current_thread())
                raise KeyboardInterrupt
            super().end_wait()
            struck.append(threading.current_thread())

    calls = [connection.call(1), connection.call(2, Struck), connection.call(3)]
    reader = Waiter(calls[0])
    assert connection.stream.one_reads.wait(WAIT_SECONDS)
    waiter = Waiter(calls[1], timeout=0.02)
    assert isinstance(waiter.end(), KeyboardInterrupt)
    assert eventually(lambda: len(struck) == 2) and struck[0] is not struck[1]
    last = Waiter(calls[2])
    assert waits_for_turn(calls[2])
    connection.receive(1)
    assert reader.end() is None
    connection.receive(3)
    assert last.end() is None and not connection.reasons


@pytest.mark.parametrize("comes", ["late", "early"])
def test_an_interrupt_of_one_that_waits_for_its_turn_keeps_the_next_from_none(threads, comes):
    """It is notified before it is struck, or just then."""
    watchdog = ReaderWatchdog()
    for strike in strikes([reply_reader.__file__]):
        connection = Connection(threads, watchdog)
        first, struck, last = (connection.call(number) for number in (1, 2, 3))
        reader = Waiter(first)
        assert connection.stream.one_reads.wait(WAIT_SECONDS)
        ends = threading.Timer(0.001 if comes == "late" else 0.0, connection.receive, (1, 2))
        ends.start()
        strike(functools.partial(struck.wait, WAIT_SECONDS))
        waiter = Waiter(last)
        connection.receive(3)
        assert reader.end() is None and waiter.end() is None, f"at point {strike.number}"
        ends.join()
        assert struck.wait(WAIT_SECONDS).call_id == 2
        assert eventually(lambda: connection.schedule.state == IDLE)  # noqa: B023 - in this round
        assert not connection.reasons
    watchdog.close()
    assert strike.number > 10
