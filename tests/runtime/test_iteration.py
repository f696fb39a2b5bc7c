"""The steps of an iterator: in order, one at a time, in whatever order threads take them."""

import asyncio
import functools
import random
import threading
from typing import Any

import pytest
from conftest import eventually

from rayrpc._concurrency.outcome import Error, Value
from rayrpc._runtime.coroutines import Coroutines
from rayrpc._runtime.iteration import AsyncSteps, Ended, Steps

WAIT = 60.0


def call(invocation):
    return invocation()


def submit(task):
    threading.Thread(target=task, daemon=True).start()


def up_to(number, log=None):
    try:
        yield from range(number)
    finally:
        if log is not None:
            log.append("closed")
    return "returned"


def taken(steps: Steps, number: int) -> Any:
    """Take a turn that is due, and return its outcome."""
    assert steps.take(number, lambda: None)
    outcome = steps.make(call)
    steps.end_step()
    return outcome


def test_values_then_what_a_generator_returned_then_the_end():
    steps = Steps(up_to(2), up_to)
    ended = [taken(steps, number) for number in range(4)]
    assert ended == [Value(0), Value(1), Value(Ended("returned")), Value(Ended())]
    assert steps.close(submit).wait(WAIT) == Value(None)


def test_an_error_ends_it():
    def fail():
        yield 1
        raise LookupError("no more")

    steps = Steps(fail(), fail)
    assert taken(steps, 0) == Value(1)
    error = taken(steps, 1)
    assert isinstance(error, Error) and isinstance(error.error, LookupError)
    assert taken(steps, 2) == Value(Ended())


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_cancelled_step_closes_the_generator(is_reached):
    log: list[str] = []

    def cancelled(invocation):
        if is_reached:
            steps._iterator.throw(asyncio.CancelledError)
        raise asyncio.CancelledError

    steps = Steps(up_to(9, log), up_to)
    assert taken(steps, 0) == Value(0)
    assert steps.take(1, lambda: None)
    error = steps.make(cancelled)
    steps.end_step()
    assert isinstance(error, Error) and isinstance(error.error, asyncio.CancelledError)
    assert log == ["closed"] and taken(steps, 2) == Value(Ended())
    assert steps.close(submit).wait(WAIT) == Value(None)


def test_a_turn_begins_when_the_step_before_has_ended():
    steps = Steps(up_to(9), up_to)
    begun: list[int] = []
    assert not steps.take(1, lambda: begun.append(1))
    assert steps.take(0, lambda: begun.append(0))
    assert steps.make(call) == Value(0)
    assert not begun  # the value may not have been sent yet
    steps.end_step()
    assert begun == [1]
    assert not steps.take(2, lambda: begun.append(2))  # 1 is running now
    assert steps.make(call) == Value(1)
    steps.end_step()
    assert begun == [1, 2]


def test_closing_ends_the_generator_and_the_turns_that_wait():
    log: list[str] = []
    steps = Steps(up_to(9, log), up_to)
    assert taken(steps, 0) == Value(0)
    begun: list[int] = []
    assert not steps.take(7, lambda: begun.append(7))
    assert steps.close(submit).wait(WAIT) == Value(None)
    assert log == ["closed"] and begun == [7]
    assert steps.make(call) == Value(Ended())
    steps.end_step()
    assert taken(steps, 1) == Value(Ended())
    assert steps.close(submit).wait(WAIT) == Value(None)


def test_closing_waits_for_the_step_that_runs():
    log: list[str] = []
    steps = Steps(up_to(9, log), up_to)
    assert steps.take(0, lambda: None)
    closed = steps.close(submit)
    assert steps.make(call) == Value(0)
    assert not log and not closed.is_done
    begun: list[int] = []
    assert not steps.take(1, lambda: begun.append(1))
    steps.end_step()
    assert closed.wait(WAIT) == Value(None)
    assert log == ["closed"] and begun == [1]


def test_an_error_of_closing_is_its_outcome():
    def stubborn():
        try:
            yield 1
        finally:
            raise LookupError("not now")

    steps = Steps(stubborn(), stubborn)
    assert taken(steps, 0) == Value(1)
    outcome = steps.close(submit).wait(WAIT)
    assert isinstance(outcome, Error) and isinstance(outcome.error, LookupError)


def test_an_iterator_without_close():
    steps = Steps(iter([1, 2]), iter)
    assert taken(steps, 0) == Value(1)
    assert steps.close(submit).wait(WAIT) == Value(None)
    assert taken(steps, 1) == Value(Ended())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("closes", [False, True])
def test_threads_that_take_turns_in_any_order(quick_switches, seed, closes):
    count, turns, threads = 200, 230, 6
    order = random.Random(seed)
    running: list[int] = []
    log: list[str] = []

    def values():
        try:
            for number in range(count):
                running.append(number)
                assert len(running) == 1, "two steps ran at a time"
                yield number
        finally:
            log.append("closed")

    steps = Steps(values(), values)
    found: dict[int, Any] = {}
    ready: list[int] = []  # turns whose time came, for any of the threads

    def finish(number):
        outcome = steps.make(call)
        running.clear()
        assert number not in found
        found[number] = outcome
        steps.end_step()

    numbers = list(range(turns))
    order.shuffle(numbers)

    def run():
        while len(found) < turns:
            try:
                number = numbers.pop()
            except IndexError:
                try:
                    finish(ready.pop())
                except IndexError:
                    threading.Event().wait(0.001)
                continue
            if steps.take(number, functools.partial(ready.append, number)):
                finish(number)

    def close():
        while len(found) < 50:
            threading.Event().wait(0.001)
        closed.append(steps.close(submit).wait(WAIT))

    closed: list[Any] = []
    workers = [threading.Thread(target=run, daemon=True) for _ in range(threads)]
    if closes:
        workers.append(threading.Thread(target=close, daemon=True))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(WAIT)
    assert len(found) == turns and log == ["closed"]
    made = [number for number in range(turns) if found[number] == Value(number)]
    assert made == list(range(len(made)))
    assert all(type(found[number].value) is Ended for number in range(len(made), turns))
    assert closed == [Value(None)] if closes else len(made) == count


# -- asynchronous iterators ---------------------------------------------------------------------


@pytest.fixture
def coroutines():
    made = Coroutines("test-loop")
    yield made
    made.close()
    assert eventually(lambda: not made._loops)


async def later(number, log):
    try:
        for each in range(number):
            await asyncio.sleep(0.001)
            yield each
        await asyncio.sleep(WAIT)
    except BaseException as error:
        log.append(type(error))
        raise
    finally:
        log.append("closed")


class Found(dict):
    def put(self, number):
        return lambda outcome: self.__setitem__(number, outcome)


def test_asynchronous_steps_run_in_order(coroutines):
    steps, found = AsyncSteps(later(5, [])), Found()
    for number in (3, 0, 4, 1, 2):
        steps.take(number, None, found.put(number), coroutines)
    assert eventually(lambda: len(found) == 5)
    assert list(found.items()) == [(number, Value(number)) for number in range(5)]


def test_closing_cancels_an_asynchronous_step(coroutines):
    log: list[Any] = []
    steps, found = AsyncSteps(later(1, log)), Found()
    for number in range(4):
        steps.take(number, None, found.put(number), coroutines)
    assert eventually(lambda: 0 in found)
    assert steps.close().wait(WAIT) == Value(None)
    assert log == [asyncio.CancelledError, "closed"]
    assert [found[number] for number in range(1, 4)] == [Value(Ended())] * 3
    steps.take(4, None, found.put(4), coroutines)
    assert found[4] == Value(Ended())


def test_closing_an_asynchronous_generator_between_steps(coroutines):
    log: list[Any] = []
    steps, found = AsyncSteps(later(9, log)), Found()
    steps.take(0, None, found.put(0), coroutines)
    assert eventually(lambda: found)
    assert steps.close().wait(WAIT) == Value(None)
    assert log == [GeneratorExit, "closed"]


def test_closing_an_asynchronous_generator_that_has_not_begun():
    assert AsyncSteps(later(1, [])).close().wait(WAIT) == Value(None)


def test_an_error_ends_an_asynchronous_generator(coroutines):
    async def fail():
        yield 1
        raise LookupError("no more")

    steps, found = AsyncSteps(fail()), Found()
    for number in range(3):
        steps.take(number, None, found.put(number), coroutines)
    assert eventually(lambda: len(found) == 3)
    assert found[0] == Value(1) and isinstance(found[1].error, LookupError)
    assert found[2] == Value(Ended())
    assert steps.close().wait(WAIT) == Value(None)


def test_an_asynchronous_generator_ends_with_its_worker():
    made, log = Coroutines("test-loop"), list[Any]()
    steps, found = AsyncSteps(later(1, log)), Found()
    for number in range(3):
        steps.take(number, None, found.put(number), made)
    assert eventually(lambda: 0 in found)
    made.close()
    assert eventually(lambda: "closed" in log and not made._loops)
