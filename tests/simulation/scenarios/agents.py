"""Whole workers in one process: agents that call one another over simulated connections.

Promised: each call ends once, with its own value, or, if its callee has died, with an error that
says so; what is called with ``remote`` is fetched; graceful shutdown waits for all calls, leaks no
RRef, and ends all threads.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

from simulation.primitives import Thread, sleep
from simulation.scenario import some_of
from simulation.scheduler import Scheduler, current
from simulation.workers import WORKERS, Worker, shut_down, start_workers, wait
from torch.futures import Future

from rayrpc.errors import CallError
from rayrpc.functions import async_execution

__all__ = ["Agents"]

# How a call is made.
SYNC, ASYNC, REMOTE = "sync", "async", "remote"
# What the called function does: at once, after a while, or through other workers.
QUICK, SLOW, LATER, NESTED, NESTED_LATER = "quick", "slow", "later", "nested", "nested later"

LARGE_BYTES = 100_000  # goes by the connection for large messages


@dataclasses.dataclass(frozen=True)
class Call:
    """A call.

    Args:
        how: it is made.
        function: what it does.
        path: the callee, and the workers that it calls in turn.
        is_large: its argument and its value are.
    """

    how: str
    function: str
    path: tuple[int, ...]
    is_large: bool = False


@dataclasses.dataclass(frozen=True)
class User:
    """A thread of a worker, which makes calls."""

    worker: int
    calls: tuple[Call, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """What happens in a group.

    Args:
        workers: how many.
        users: threads that call.
        slots: how many functions a worker runs at a time.
        dies: a worker that dies, and when; None: none.
    """

    workers: int
    users: tuple[User, ...]
    slots: int = 16
    dies: tuple[int, float] | None = None


class Agents:
    """The scenario; see the module."""

    name = "agents"

    def program(self, rng: random.Random) -> Program:
        workers = rng.randint(1, 3)
        functions = some_of(rng, (QUICK, SLOW, LATER, NESTED, NESTED_LATER))
        ways = some_of(rng, (SYNC, ASYNC, REMOTE))
        is_nested = NESTED in functions or NESTED_LATER in functions

        def call() -> Call:
            function = rng.choice(functions)
            hops = rng.randint(2, 3) if function in (NESTED, NESTED_LATER) else 1
            path = tuple(rng.randrange(workers) for _ in range(hops))
            return Call(rng.choice(ways), function, path, rng.random() < 0.1)

        users = tuple(
            User(rng.randrange(workers), tuple(call() for _ in range(rng.randint(1, 4))))
            for _ in range(rng.randint(1, 3))
        )
        slots = 16 if is_nested else rng.choice([1, 2, 16])  # as in torch, nested calls take slots
        dies = None
        if workers > 1 and rng.random() < 0.2:
            dies = rng.randrange(workers), rng.random() ** 3 * 0.05
        return Program(workers, users, slots, dies)

    def smaller(self, program: Program) -> Iterator[Program]:
        if program.dies is not None:
            yield dataclasses.replace(program, dies=None)
        for index, user in enumerate(program.users):
            before, after = program.users[:index], program.users[index + 1 :]
            if before or after:
                yield dataclasses.replace(program, users=before + after)
            for number, call in enumerate(user.calls):
                calls = user.calls[:number], user.calls[number + 1 :]
                if any(calls):
                    less = dataclasses.replace(user, calls=calls[0] + calls[1])
                    yield dataclasses.replace(program, users=(*before, less, *after))
                for simpler in _simpler(call):
                    less = dataclasses.replace(user, calls=(*calls[0], simpler, *calls[1]))
                    yield dataclasses.replace(program, users=(*before, less, *after))

    def run(self, program: Program, scheduler: Scheduler) -> None:
        _Run(program, scheduler).run()


def _simpler(call: Call) -> Iterator[Call]:
    if call.is_large:
        yield dataclasses.replace(call, is_large=False)
    if call.how != SYNC:
        yield dataclasses.replace(call, how=SYNC)
    if call.function != QUICK:
        yield Call(call.how, QUICK, call.path[:1], call.is_large)


class _Run:
    def __init__(self, program: Program, scheduler: Scheduler) -> None:
        self.program = program
        self.scheduler = scheduler
        self.ended: collections.Counter[tuple[int, int]] = collections.Counter()

    def run(self) -> None:
        program = self.program
        start_workers(program.workers, program.slots)
        users = [
            Thread(target=self.use, name=f"user {index}", args=(index, user))
            for index, user in enumerate(program.users)
        ]
        if program.dies is not None:
            number, after = program.dies
            Thread(target=self.kill, name="killer", args=(number, after)).start()
        for thread in users:
            thread.start()
        for thread in users:
            thread.join()
        expected = sum(len(user.calls) for user in program.users)
        assert sum(self.ended.values()) == len(self.ended) == expected, f"ended: {self.ended}"
        self.shut_down()

    def use(self, index: int, user: User) -> None:
        """Make the calls of a thread, and then wait for those that are asynchronous."""
        worker = WORKERS[user.worker]
        waits = []
        for number, call in enumerate(user.calls):
            sent = f"{index}.{number}" + "x" * (LARGE_BYTES * call.is_large)
            try:
                value = start(worker, call, sent)
            except (CallError, RuntimeError) as exc:
                self.end(index, number, exc)
                continue
            if call.how == SYNC:
                self.wait(index, number, value, sent)
            else:
                waits.append((number, value, sent))
        for each in waits:
            self.wait(index, *each)

    def wait(self, index: int, number: int, value: Any, sent: str) -> None:
        try:
            got = value()
        except (CallError, RuntimeError) as exc:
            self.end(index, number, exc)
        else:
            assert got == sent, f"call {index}.{number} has the value {got[:20]!r}"
            self.ended[index, number] += 1

    def end(self, index: int, number: int, error: BaseException) -> None:
        self.ended[index, number] += 1
        if self.program.dies is None:
            raise AssertionError(f"call {index}.{number} failed: {error}") from error

    def kill(self, number: int, after: float) -> None:
        sleep(after)
        WORKERS[number].die()

    def shut_down(self) -> None:
        dies = self.program.dies
        if dies is not None:
            current().step("waits for the death", lambda: WORKERS[dies[0]].is_dead, 10.0)

        def leave(worker: Worker) -> None:
            if not worker.is_dead:
                worker.agent.join()
                if dies is None:
                    assert worker.agent.rrefs.delete_all(30.0)
                    worker.agent.join()
                    worker.agent.rrefs.check_leaks()
            worker.agent.shutdown()

        shut_down(leave)


# -- what is called ---------------------------------------------------------------------------


def quick(me: int, path: tuple[int, ...], value: Any) -> Any:
    """Return the value."""
    return value


def slow(me: int, path: tuple[int, ...], value: Any) -> Any:
    """Return the value after a while."""
    sleep(current().current.random.choice([0.001, 0.005, 0.02]))
    return value


@async_execution
def later(me: int, path: tuple[int, ...], value: Any) -> Any:
    """Return a Future that another thread completes with the value."""
    future: Any = Future()

    def complete() -> None:
        sleep(0.002)
        future.set_result(value)

    Thread(target=complete, name="completes later").start()
    return future


def nested(me: int, path: tuple[int, ...], value: Any) -> Any:
    """Return the value by a call of the next worker."""
    return _next(SYNC, path, value)()


@async_execution
def nested_later(me: int, path: tuple[int, ...], value: Any) -> Any:
    """Return the Future of a call of the next worker."""
    return _next(ASYNC, path, value).args[0]


def _next(how: str, path: tuple[int, ...], value: Any) -> Any:
    rest = path[1:]
    if how == SYNC:
        function = NESTED if len(rest) > 1 else QUICK
    else:
        function = NESTED_LATER if len(rest) > 1 else LATER
    return start(WORKERS[path[0]], Call(how, function, rest), value)


def start(worker: Worker, call: Call, value: Any) -> functools.partial[Any]:
    """Make a call, or prepare a synchronous one; return what waits for its value."""
    function = FUNCTIONS[call.function]
    to = call.path[0]
    args = call.path, value
    if call.how == SYNC:
        return functools.partial(worker.sync, to, function, *args)
    if call.how == ASYNC or WORKERS[to] is worker:  # the API makes a local RRef of a Future then
        return functools.partial(wait, worker.future(to, function, *args))
    return functools.partial(worker.remote(to, function, *args).to_here)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    QUICK: quick,
    SLOW: slow,
    LATER: later,
    NESTED: nested,
    NESTED_LATER: nested_later,
}
