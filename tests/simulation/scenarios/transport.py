"""Two transports: small and large messages, by shared memory or by a second connection.

Promised: each call ends once, with its own reply; the bytes of a request and of a reply are those
that were sent, for as long as the receiver keeps them, whatever the sender does with its own; no
function runs twice; none is lost unless a connection is cut or a worker dies; a peer that does not
read delays nobody else for ever; and when nothing is used any more, all memory is free.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import itertools
import random
from collections.abc import Iterator
from typing import Any

from simulation.large import Limits, limited
from simulation.network import Socket
from simulation.primitives import Thread, sleep, wait_for_threads
from simulation.scenario import some_of
from simulation.scheduler import Scheduler, current
from simulation.workers import check_connections

from rayrpc._concurrency.outcome import Outcome, Value
from rayrpc._concurrency.reader import release_reader
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import Deferred
from rayrpc._transports.direct.stream import Stream
from rayrpc._transports.direct.transport import DirectTransport
from rayrpc._transports.memory import MemoryHub, MemoryTransport
from rayrpc.errors import CallError, CallLostError, WorkerDiedError

__all__ = ["Transports"]

# How a caller gets its reply.
WAITS, CALLED_BACK, GIVES_UP = "waits", "called back", "gives up"
# What the called function does.
QUICK, SLOW, LATER = "quick", "slow", "later"
# Bytes of the buffers of a message.
SIZES = (0, 50, 400, 1500, 4000, 12_000)
LIMITS = Limits()

CALL_SECONDS = 100.0
# Then all free memory was freed: a segment's way through both ends takes up to six times the five
# seconds between two rounds of maintenance.
QUIET_SECONDS = 40.0
ERRORS = (CallError, CallLostError, WorkerDiedError)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call.

    Args:
        how: the caller gets the reply.
        function: what the callee does.
        request, reply: bytes of their buffers.
        keeps: how long the caller keeps the reply, in seconds.
    """

    how: str
    function: str
    request: int
    reply: int
    keeps: float = 0.0


@dataclasses.dataclass(frozen=True)
class User:
    """A thread of one of the two workers, which calls the other one."""

    worker: int
    calls: tuple[Call, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """What happens between two workers.

    Args:
        users: threads that call.
        near: the workers are on one node.
        limits: of large messages.
        cut: a connection, the side, and the bytes after which it breaks; None: none.
        dies: a worker that dies, and when; None: none.
        interrupts: when Ctrl-C strikes the first user; see ``Scheduler.interrupt_after``.
    """

    users: tuple[User, ...]
    near: bool = False
    limits: Limits = LIMITS
    cut: tuple[int, bool, int] | None = None
    dies: tuple[int, float] | None = None
    interrupts: tuple[int, ...] = ()

    @property
    def may_lose(self) -> bool:
        """Tell whether calls may fail."""
        return bool(self.cut or self.dies or self.interrupts)


class Transports:
    """The scenario; see the module."""

    name = "transport"

    def program(self, rng: random.Random) -> Program:
        ways = some_of(rng, (WAITS, CALLED_BACK, GIVES_UP))
        functions = some_of(rng, (QUICK, SLOW, LATER))
        sizes = some_of(rng, SIZES)

        def call() -> Call:
            request, reply = rng.choice(sizes), rng.choice(sizes)
            keeps = rng.choice([0.0, 0.0, 0.001, 0.02, 12.0])
            return Call(rng.choice(ways), rng.choice(functions), request, reply, keeps)

        users = tuple(
            User(rng.randrange(2), tuple(call() for _ in range(rng.randint(1, 5))))
            for _ in range(rng.randint(1, 3))
        )
        limits = Limits(
            unread=rng.choice([2000, 10_000]),
            receive_buffer=rng.choice([300, 600, 5000]),
            segments=rng.choice([0, 2, 8]),
            descriptors=rng.choice([0, 1, 8]),
        )
        cut = dies = None
        interrupts: tuple[int, ...] = ()
        fault = rng.random()
        if fault < 0.2:
            cut = (
                rng.randrange(4),
                rng.random() < 0.5,
                int(rng.choice([300, 3000, 30_000]) * rng.random()),
            )
        elif fault < 0.3:
            dies = rng.randrange(2), rng.random() ** 3 * 0.05
        elif fault < 0.5:
            interrupts = tuple(int(rng.choice([30, 200, 600]) * rng.random()) for _ in range(3))
        near = rng.random() < 0.5
        limits = dataclasses.replace(limits, idle_seconds=rng.choice([0.001, 0.005, 2.0]))
        return Program(users, near, limits, cut, dies, interrupts)

    def smaller(self, program: Program) -> Iterator[Program]:
        if program.cut is not None:
            yield dataclasses.replace(program, cut=None)
        if program.dies is not None:
            yield dataclasses.replace(program, dies=None)
        if program.interrupts:
            yield dataclasses.replace(program, interrupts=program.interrupts[1:])
        if program.limits != LIMITS:
            yield dataclasses.replace(program, limits=LIMITS)
        for index, user in enumerate(program.users):
            before, after = program.users[:index], program.users[index + 1 :]
            if before or after:
                yield dataclasses.replace(program, users=before + after)
            for number, call in enumerate(user.calls):
                calls = user.calls[:number], user.calls[number + 1 :]
                variants = [calls[0] + calls[1]] if any(calls) else []
                variants += [(*calls[0], simple, *calls[1]) for simple in _simpler(call)]
                for variant in variants:
                    less = dataclasses.replace(user, calls=variant)
                    yield dataclasses.replace(program, users=(*before, less, *after))

    def run(self, program: Program, scheduler: Scheduler) -> None:
        with limited(program.limits):
            _Run(program, scheduler).run()


def _simpler(call: Call) -> Iterator[Call]:
    simple = Call(WAITS, QUICK, 0, 0)
    for field in dataclasses.fields(call):
        if getattr(call, field.name) != getattr(simple, field.name):
            yield dataclasses.replace(call, **{field.name: getattr(simple, field.name)})


def _buffers(number: int, size: int) -> list[bytearray]:
    """Return buffers of a message: they differ from call to call, and from place to place."""
    if not size:
        return []
    period = bytes((number * 31 + i * 7) % 251 for i in range(251))
    data = bytearray(period * (size // 251 + 1))
    return [data[:10], data[10:size]]


class _Worker:
    def __init__(self, run: _Run, hub: MemoryHub, number: int) -> None:
        self.number = number
        node = "127.0.0.1" if run.program.near else f"127.0.0.{number + 1}"
        token = f"token-{number}"
        self.transport = DirectTransport(
            MemoryTransport(hub, token, node), token, worker=f"w{number}"
        )
        address = self.transport.address
        self.member = Member(token, f"w{number}", number, address=address, node=node)


class _Run:
    def __init__(self, program: Program, scheduler: Scheduler) -> None:
        self.program = program
        self.scheduler = scheduler
        self.call_ids = itertools.count(1)
        self.ran: collections.Counter[int] = collections.Counter()
        self.ended: collections.Counter[int] = collections.Counter()
        self.abandoned: set[int] = set()
        self.interrupts = list(program.interrupts)
        self.connected = itertools.count()
        self.streams: list[Stream] = []
        self.dead: set[int] = set()
        hub = MemoryHub()
        self.workers = [_Worker(self, hub, number) for number in range(2)]

    def run(self) -> None:
        self.scheduler.on_connected = self.on_connected
        for worker in self.workers:
            worker.transport.start(self.serve, self.find, b"secret")
        users = [
            Thread(target=self.use, name=f"user {index}", args=(user, not index))
            for index, user in enumerate(self.program.users)
        ]
        for thread in users:
            thread.start()
        if self.program.dies is not None:
            number, after = self.program.dies
            sleep(after)
            self.die(number)
        for thread in users:
            thread.join()
        expected = sum(len(user.calls) for user in self.program.users)

        def have_ended() -> bool:
            return len(self.abandoned.union(self.ended)) == expected

        current().step("waits for the replies", have_ended, CALL_SECONDS)
        assert have_ended(), f"{expected} calls, {self.abandoned} abandoned, ended: {self.ended}"
        assert set(self.ended.values()) <= {1}, f"calls ended more than once: {self.ended}"
        assert set(self.ran.values()) <= {1}, f"functions ran more than once: {self.ran}"
        if not self.program.may_lose:
            check_connections(worker.transport for worker in self.workers)
        sleep(1.0)  # until late replies are there, which are in the tracebacks of interrupts
        gc.collect()
        sleep(QUIET_SECONDS)
        self.check_memory()
        self.close()

    def on_connected(self, near: Socket, far: Socket) -> None:
        """Cut a connection after some bytes."""
        if self.program.cut is not None:
            number, at_caller, size = self.program.cut
            if next(self.connected) == number:
                (near if at_caller else far).cut_after(size)

    def find(self, worker_id: int) -> Member | None:
        return None if worker_id in self.dead else self.workers[worker_id].member

    def die(self, number: int) -> None:
        """Have a worker stop at once; the other one hears of it."""
        dead, other = self.workers[number], self.workers[1 - number]
        dead.transport.close()
        sleep(0.001)
        self.dead.add(number)
        other.transport.on_peer_lost(dead.member, WorkerDiedError(dead.member.name, "killed", ""))

    def check_memory(self) -> None:
        """Check that nothing is kept of messages that nobody uses, and no thread reads."""
        gc.collect()  # connections that were cut in the middle of a message
        for worker in self.workers:
            if worker.number in self.dead:
                continue
            memory = worker.transport._memory
            memory._collect()
            assert not memory._used, "received memory is in use"
            assert worker.transport._server._bulk.is_empty, "a large reply waits"
            connections = worker.transport.connections()
            streams = [each._stream for each in connections if each._stream and not each.is_broken]
            for connection in connections:
                kept = {} if connection.is_broken else connection._calls
                # of an interrupted call the id stays, as its reply may come
                assert len(kept) <= len(self.abandoned), "calls are kept"
                assert not any(call.frame for call in kept.values()), "frames are kept"
                assert not connection._early, "replies are kept"
            served = worker.transport._server.connections
            is_open = [each for each in served if not each.is_closed]
            idle = worker.transport._server._idle.count
            assert idle == len(is_open), f"{idle} of {len(is_open)} connections keep no thread"
            streams += [each._stream for each in is_open]
            for each in streams:
                self.check_stream(each)

    def check_stream(self, each: Stream) -> None:
        assert not each._mapped.used, "buffers of the peer are in use"
        assert not each._send_queue.pending_bytes, "bytes were not written"
        if each._pool is not None:
            assert not each._pool._used, "segments are in use"
            assert not any(each._pool._free.values()), "free segments are kept"
            assert not each._mapped._segments, "free segments are mapped"

    def close(self) -> None:
        """Close all, and wait until all threads have ended."""
        for worker in self.workers:
            worker.transport.close()
        wait_for_threads(200.0)

    # -- the callers --------------------------------------------------------------------------

    def use(self, user: User, is_first: bool) -> None:
        """Make the calls of a user."""
        for call in user.calls:
            number = next(self.call_ids)
            if is_first and self.interrupts:
                self.scheduler.current.may_be_interrupted = True
                self.scheduler.chance_of_interrupts = 0.05
                self.scheduler.interrupt_after(self.interrupts.pop(0))
            try:
                self.call(user.worker, number, call)
            except KeyboardInterrupt:
                self.abandoned.add(number)
            finally:
                self.scheduler.current.may_be_interrupted = False
                self.scheduler.current.interrupt_after = 0
            if number in self.abandoned:
                self.workers[user.worker].transport.on_interrupted_call()

    def call(self, worker: int, number: int, call: Call) -> None:
        data = f"{number} {call.function} {call.request} {call.reply}".encode()
        frame = Frame(Kind.CALL, 0, worker, number, data=data)
        buffers = frame.buffers = _buffers(number, call.request)
        waits = call.how == WAITS
        frame.is_stable = waits
        pending = self.workers[worker].transport.call(self.workers[1 - worker].member, frame)
        if not waits:  # it is the caller's
            for each in buffers:
                each[:] = bytes(len(each))
        del frame, buffers
        on_done = functools.partial(self.end, number, call)
        if call.how == CALLED_BACK:
            pending.on_done(on_done)
            return
        me = self.scheduler.current
        try:
            reply = pending.wait(CALL_SECONDS if waits else me.random.choice([0.0, 0.0005, 0.003]))
        except TimeoutError:
            assert not waits, f"call {number} has timed out"
            pending.on_done(on_done)
        except KeyboardInterrupt:
            pending.on_done(_drop)
            raise
        except ERRORS as exc:
            self.fail(number, exc)
        else:
            del pending
            on_done(Value(reply))

    def end(self, number: int, call: Call, outcome: Outcome[Frame]) -> None:
        """Take the reply of a call."""
        assert not self.scheduler.current.locks, "a callback runs under a lock"
        if self.program.interrupts and number in self.ended:
            return  # a callback that was interrupted is called again
        if not isinstance(outcome, Value):
            self.fail(number, outcome.error)
            return
        reply = outcome.value
        assert reply.call_id == number, f"call {number} has the reply to {reply.call_id}"
        assert reply.kind is Kind.VALUE, f"call {number} has failed: {bytes(reply.data)!r}"
        _check(number, call.reply, reply.buffers)
        self.ended[number] += 1
        if call.keeps:
            keep = functools.partial(self.keep, number, call, reply.buffers)
            with current().uninterrupted():
                Thread(target=keep, name=f"keeps {number}").start()

    def keep(self, number: int, call: Call, buffers: list[Any]) -> None:
        sleep(call.keeps)
        _check(number, call.reply, buffers)
        for each in buffers:  # they are the receiver's
            memoryview(each)[:] = bytes(len(each))
        buffers.clear()

    def fail(self, number: int, error: BaseException) -> None:
        assert self.program.may_lose, f"call {number} has failed: {error}"
        assert isinstance(error, ERRORS), f"call {number} has failed: {error!r}"
        self.ended[number] += 1

    # -- the callee ---------------------------------------------------------------------------

    def serve(self, frame: Frame, may_block: bool = True) -> Frame | Deferred:
        me = self.scheduler.current
        assert not me.locks, "a function runs under a lock"
        text, function, request, size = bytes(frame.data).decode().split()
        number = int(text)
        self.ran[number] += 1
        buffers, frame.buffers = frame.buffers, []  # they live no longer than the call
        _check(number, int(request), buffers)
        reply = Frame(Kind.VALUE, 0, 1 - frame.src, frame.call_id, data=frame.data)
        reply.buffers = _buffers(number, int(size))
        if function == SLOW:
            if me.random.random() < 0.5:
                release_reader()
            sleep(me.random.choice([0.001, 0.005]))
            _check(number, int(request), buffers)
        elif function == LATER:
            late = Deferred()

            def answer() -> None:
                sleep(0.002)
                begin()

            def begin() -> None:
                if late.hold(begin):  # until the caller has read replies
                    return
                _check(number, int(request), buffers)
                buffers.clear()
                late.set(reply)

            with current().uninterrupted():
                Thread(target=answer, name="answers later").start()
            return late
        return reply


def _drop(outcome: Outcome[Frame]) -> None:
    """Take the reply of a call that was interrupted."""


def _check(number: int, size: int, buffers: list[Any]) -> None:
    got = [bytearray(each) for each in buffers]
    assert got == _buffers(number, size), f"call {number}: {size} bytes have changed"
