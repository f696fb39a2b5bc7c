"""One connection: callers that wait or are called back, replies that come late, a cut at any byte.

Promised: each call ends once, with its own reply; none is lost unless the connection is cut; no
function runs twice; what is rerouted never ran; while replies are expected somebody reads; and all
threads end when the connection is closed.

Ctrl-C may strike the first caller anywhere. It ends the call that this one makes or waits for; the
others end all the same, with an error where the connection had to be broken off.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

from simulation import network
from simulation.primitives import Thread, monotonic, sleep, wait_for_threads
from simulation.scenario import some_of
from simulation.scheduler import ExpectedError, Scheduler, current

from rayrpc._concurrency.outcome import Outcome, Value
from rayrpc._concurrency.reader import ReaderWatchdog, release_reader
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import Deferred, PendingReply
from rayrpc._transports.direct.connection import CallerConnection
from rayrpc._transports.direct.idle_connections import IdleConnections
from rayrpc._transports.direct.reader_schedule import IDLE
from rayrpc._transports.direct.server_connection import ServerConnection
from rayrpc._transports.direct.stream import Stream
from rayrpc._transports.direct.wire import prepare
from rayrpc.errors import CallLostError

__all__ = ["Connection"]

# What the called function does.
QUICK, SLOW, BLOCKS, BRIEFLY, LATER = "quick", "slow", "blocks", "briefly", "later"
FUNCTIONS = (QUICK, SLOW, BLOCKS, BRIEFLY, LATER)
# How a caller gets its replies.
WAITS, CALLED_BACK, RAISES, GIVES_UP = "waits", "called back", "callback raises", "gives up"

CALL_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Caller:
    """A thread that calls; one call after the other, or without waiting where it is called back."""

    how: str
    functions: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Cut:
    """The connection breaks after so many bytes from one side."""

    at_caller: bool
    size: int


@dataclasses.dataclass(frozen=True)
class Program:
    """What happens on a connection.

    Args:
        callers: threads that call.
        cut: where it breaks; None: nowhere.
        trims: how often memory that is not used is freed.
        idle_seconds: a thread without a task ends after this time, and none reads a connection
            without a message.
        interrupts: when Ctrl-C strikes the first caller, one after the other, see
            ``Scheduler.interrupt_after``; empty: never.
        failed_starts: the chance of each start of a thread to fail.
    """

    callers: tuple[Caller, ...]
    cut: Cut | None = None
    trims: int = 0
    idle_seconds: float = 0.2
    interrupts: tuple[int, ...] = ()
    failed_starts: float = 0.0


class Connection:
    """The scenario; see the module."""

    name = "connection"

    def program(self, rng: random.Random) -> Program:
        functions = some_of(rng, FUNCTIONS)
        ways = some_of(rng, (WAITS, CALLED_BACK, RAISES, GIVES_UP))
        callers = tuple(
            Caller(rng.choice(ways), tuple(rng.choices(functions, k=rng.randint(1, 5))))
            for _ in range(rng.randint(1, 4))
        )
        cut = Cut(rng.random() < 0.5, rng.randint(0, 600)) if rng.random() < 0.3 else None
        trims, idle_seconds = rng.choice([0, 0, 1, 3]), rng.choice([0.002, 0.01, 0.2])
        interrupts: tuple[int, ...] = ()
        if rng.random() < 0.3:
            interrupts = tuple(int(rng.choice([30, 200, 600]) * rng.random()) for _ in range(3))
        failed_starts = rng.choice([0.05, 0.3, 0.9]) if rng.random() < 0.2 else 0.0
        return Program(callers, cut, trims, idle_seconds, interrupts, failed_starts)

    def smaller(self, program: Program) -> Iterator[Program]:
        if program.cut is not None:
            yield dataclasses.replace(program, cut=None)
        if program.trims:
            yield dataclasses.replace(program, trims=program.trims - 1)
        if program.interrupts:
            yield dataclasses.replace(program, interrupts=program.interrupts[1:])
        if program.failed_starts:
            yield dataclasses.replace(program, failed_starts=0.0)
        for index, caller in enumerate(program.callers):
            before, after = program.callers[:index], program.callers[index + 1 :]
            if before or after:
                yield dataclasses.replace(program, callers=before + after)
            for number in range(len(caller.functions)):
                functions = caller.functions[:number] + caller.functions[number + 1 :]
                if functions:
                    less = dataclasses.replace(caller, functions=functions)
                    yield dataclasses.replace(program, callers=(*before, less, *after))

    def run(self, program: Program, scheduler: Scheduler) -> None:
        _Run(program, scheduler).run()


class _Run:
    def __init__(self, program: Program, scheduler: Scheduler) -> None:
        self.program = program
        self.scheduler = scheduler
        self.ran: collections.Counter[int] = collections.Counter()
        self.rerouted: set[int] = set()
        self.ended: collections.Counter[int] = collections.Counter()
        self.lost: set[int] = set()
        self.abandoned: set[int] = set()  # by who made them, for Ctrl-C
        self.interrupts = list(program.interrupts)
        self.call_ids = itertools.count(1)
        self.near, self.far = network.connect()
        if program.cut is not None:
            end = self.near if program.cut.at_caller else self.far
            end.cut_after(program.cut.size)
        self.threads = ThreadCache("caller", 4, program.idle_seconds)
        self.callee_threads = ThreadCache("callee", 4, program.idle_seconds)
        self.watchdog, self.callee_watchdog = ReaderWatchdog(), ReaderWatchdog()
        self.connection: CallerConnection

    def run(self) -> None:
        if self.program.failed_starts:  # as a worker does: what follows needs no more threads
            for threads in (self.threads, self.callee_threads):
                threads.start()
            for watchdog in (self.watchdog, self.callee_watchdog):
                watchdog.wake()
        prepare(self.far, self.program.idle_seconds)  # type: ignore[arg-type]
        stream = Stream(self.far, self.callee_threads, lambda unsent: None, False)  # type: ignore[arg-type]
        self.idle = IdleConnections()
        server = ServerConnection(
            self.far,  # type: ignore[arg-type]
            ("caller", 1),
            stream,
            self.serve,
            None,
            self.idle,
            self.callee_threads,
            self.callee_watchdog,
        )
        server.start()
        self.connection = CallerConnection(
            Member("callee", "token", 1), self, self.threads, self.watchdog
        )
        self.connection.open()
        self.scheduler.invariants.append(self.nobody_reads)
        callers = [
            Thread(target=self.make_calls, name=f"caller {number}", args=(caller, not number))
            for number, caller in enumerate(self.program.callers)
        ]
        for thread in callers:
            thread.start()
        self.scheduler.chance_of_failed_starts = self.program.failed_starts
        for _ in range(self.program.trims):
            sleep(0.002)
            self.connection.trim()
            server.trim()
        for thread in callers:
            thread.join()
        expected = sum(len(caller.functions) for caller in self.program.callers)

        def have_ended() -> bool:
            return len(self.abandoned.union(self.ended)) == expected

        current().step("waits for the replies", have_ended, CALL_SECONDS)
        self.scheduler.chance_of_failed_starts = 0.0
        assert have_ended(), f"{expected} calls, {self.abandoned} abandoned, ended: {self.ended}"
        self.close(server)
        self.check()

    def close(self, server: ServerConnection) -> None:
        """Close all, and wait until all threads have ended."""
        self.scheduler.invariants.clear()
        self.connection.fail(CallLostError("closed"))
        server.close()
        self.idle.close()
        for each in (self.watchdog, self.callee_watchdog, self.threads, self.callee_threads):
            each.close()
        wait_for_threads(120.0)
        assert self.far.fileno() < 0, "the callee has not closed the connection"

    def check(self) -> None:
        assert set(self.ended.values()) <= {1}, f"calls ended more than once: {self.ended}"
        assert set(self.ran.values()) <= {1}, f"functions ran more than once: {self.ran}"
        both = self.rerouted & set(self.ran)
        assert not both, f"calls were rerouted that had run: {both}"
        if self.program.cut is None and not self.program.interrupts:
            assert not self.lost and not self.rerouted, (
                f"{self.lost} lost, {self.rerouted} rerouted"
            )

    def nobody_reads(self) -> str | None:
        """Say what is wrong with the schedule of readers, an invariant."""
        schedule, lock = self.connection.schedule, self.connection._lock
        if lock.locked() or schedule.state != IDLE or self.program.interrupts:
            return None  # a thread may be on its way from an interrupt to ``repair``
        if schedule._waiting:
            return "a caller waits, and nobody reads"
        if schedule.callbacks and not schedule.is_delayed:
            return "callbacks are due, and nobody reads"
        return None

    # -- the caller ---------------------------------------------------------------------------

    def make_calls(self, caller: Caller, is_main: bool) -> None:
        for function in caller.functions:
            number = next(self.call_ids)
            if is_main and self.interrupts:
                self.scheduler.current.may_be_interrupted = True
                self.scheduler.chance_of_interrupts = 0.05
                self.scheduler.interrupt_after(self.interrupts.pop(0))
            try:
                self.make_call(number, caller.how, function)
            except KeyboardInterrupt:
                self.abandoned.add(number)
            finally:
                self.scheduler.current.may_be_interrupted = False

    def make_call(self, number: int, how: str, function: str) -> None:
        me = self.scheduler.current
        frame = Frame(Kind.CALL, 0, 0, number, data=f"{number} {function}".encode())
        call = self.connection.call(frame)
        if call is None:
            may_break = self.program.cut is not None or self.program.interrupts
            assert may_break, "the connection is broken"
            self.end(number, None)
        elif how in (CALLED_BACK, RAISES):
            call.on_done(functools.partial(self.called_back, number, how), me.random.random() < 0.5)
            if me.random.random() < 0.3:
                sleep(me.random.choice([0.0001, 0.002, 0.01]))
        else:
            self.wait(number, call, how == GIVES_UP)

    def wait(self, number: int, call: Any, gives_up: bool) -> None:
        me = self.scheduler.current
        try:
            try:
                reply = call.wait(
                    me.random.choice([0.0, 0.0005, 0.003]) if gives_up else CALL_SECONDS
                )
            except TimeoutError:
                assert gives_up, f"call {number} has timed out at {monotonic()}"
                call.on_done(lambda outcome: self.end(number, outcome))
                return
        except CallLostError:
            self.lost.add(number)
            self.ended[number] += 1
            return
        self.end(number, Value(reply))

    def called_back(self, number: int, how: str, outcome: Outcome[Frame]) -> None:
        self.end(number, outcome)
        if how == RAISES:
            raise ExpectedError

    def end(self, number: int, outcome: Outcome[Frame] | None) -> None:
        """Note the end of a call."""
        assert not self.scheduler.current.locks, "a callback runs under a lock"
        if self.program.interrupts and number in self.ended:
            return  # a callback that was interrupted is called again
        self.ended[number] += 1
        if outcome is None:
            return
        try:
            reply = outcome.unwrap()
        except CallLostError:
            self.lost.add(number)
        else:
            assert reply.call_id == number, f"call {number} has the reply to {reply.call_id}"
            data = bytes(reply.data)
            assert data.startswith(b"%d " % number), f"call {number} has the reply {data!r}"

    # -- the owner of the connection ----------------------------------------------------------

    def connect(self, peer: Member, is_bulk: bool = False, pair: int = 0) -> Any:
        sleep(self.scheduler.current.random.choice([0.0, 0.001]))
        prepare(self.near)  # type: ignore[arg-type]
        return self.near

    def reroute(self, peer: Member, frame: Frame, reason: str) -> PendingReply:
        self.rerouted.add(frame.call_id)
        pending = PendingReply()
        pending.complete(Value(Frame(Kind.VALUE, 0, 1, frame.call_id, data=bytes(frame.data))))
        return pending

    def on_connection_lost(self, connection: CallerConnection, reason: str) -> None:
        def fail() -> None:
            sleep(0.001)
            connection.fail(CallLostError(reason))

        self.threads.submit(fail)

    def expect_large(self, connection: CallerConnection, call_id: int) -> Any:
        raise AssertionError("no large reply was announced")

    def expect_reply(self, call_id: int, peer: Member) -> Any:
        raise AssertionError("no reply was announced to come by another transport")

    # -- the callee ---------------------------------------------------------------------------

    def serve(self, frame: Frame, may_block: bool = True) -> Frame | Deferred:
        me = self.scheduler.current
        assert not me.locks, "a function runs under a lock"
        number, function = bytes(frame.data).decode().split()
        self.ran[int(number)] += 1
        reply = Frame(Kind.VALUE, 0, 1, frame.call_id, data=bytes(frame.data))
        if function == SLOW:  # the watchdog releases the reader
            sleep(me.random.choice([0.001, 0.003, 0.01]))
        elif function == BLOCKS:
            release_reader()
            sleep(0.004)
        elif function == BRIEFLY:
            release_reader(briefly=True)
            sleep(me.random.choice([0.0, 0.001, 0.005]))
        elif function == LATER:
            late = Deferred()

            def answer() -> None:
                sleep(0.002)
                late.set(reply)

            self.scheduler.step("starts answers later")
            self.scheduler.spawn(answer, "answers later")
            return late
        return reply
