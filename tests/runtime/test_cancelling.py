"""Calls that are cancelled: queued, running, nested, as coroutines, and just as they end."""

import asyncio
import random
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from collecting import PROGRAM
from conftest import eventually, in_thread
from memory_workers import memory_group

from rayrpc._runtime import cancelling, current
from rayrpc._runtime.invocation import Invocation
from rayrpc.errors import CancelledError
from rayrpc.functions import async_execution
from rayrpc.futures import Future

WAIT = 60.0
# Threads start while another one's frames are read.
LOOK = """
from rayrpc._runtime import cancelling
from rayrpc._runtime.served_call import ServedCall

def start_threads():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

start(start_threads, start_threads)
call = ServedCall(0, 0, thread=threading.get_ident())
for _ in range(1000):
    assert not cancelling._interrupt(call)
print("looked", flush=True)
os._exit(0)  # the threads never end
"""

log: list[Any] = []
go = threading.Event()
workers: dict[str, Any] = {}


@pytest.fixture
def pair():
    """Two workers, the second with two slots."""
    log.clear()
    go.clear()
    with memory_group() as start:
        a, b = start("a"), start("b", num_worker_threads=2)
        workers.update(a=a, b=b)
        yield a, b
        go.set()
    workers.clear()


def cancel(worker, future):
    return worker.agent.cancelling.cancel(future, False)


def knows(worker):
    """Tell whether a worker knows that a call is cancelled."""
    return any(call.is_cancelled for call in worker.agent.callee.under_way())


def spin():
    """Run until interrupted."""
    log.append("begun")
    try:
        while not go.is_set():
            pass
        return "done"
    except BaseException as error:
        log.append(type(error))
        raise
    finally:
        log.append("ended")


class Endless:
    """Its finalizer runs until it is interrupted, which Python ignores there."""

    def __del__(self):
        log.append("finalizer")
        while not go.is_set():
            pass


def drop_and_spin():
    Endless()
    log.append("dropped")
    return spin()


def note(what):
    log.append(what)
    return what


def block():
    log.append("blocks")
    go.wait(WAIT)


async def sleep():
    log.append("begun")
    try:
        await asyncio.sleep(WAIT)
    except BaseException as error:
        log.append(type(error))
        raise


def is_cancelled(future):
    with pytest.raises(CancelledError, match="was cancelled"):
        future.wait()
    return True


def is_idle(*idle):
    return eventually(
        lambda: all(not w.agent.callee.active and not w.agent.caller.active for w in idle)
    )


def test_a_function_that_runs_is_interrupted(pair):
    a, b = pair
    future = a.future(b, spin)
    assert eventually(lambda: log)
    assert cancel(a, future) and is_cancelled(future)
    assert eventually(lambda: log == ["begun", asyncio.CancelledError, "ended"])
    assert not cancel(a, future)
    assert is_idle(a, b) and a.sync(b, max, 1, 2) == 2


def test_a_function_is_interrupted_again_if_a_finalizer_loses_the_interrupt(pair, capfd):
    a, b = pair
    future = a.future(b, drop_and_spin)
    assert eventually(lambda: log == ["finalizer"])
    assert cancel(a, future)
    assert eventually(lambda: log[-1] == "ended")
    assert log == ["finalizer", "dropped", "begun", asyncio.CancelledError, "ended"]
    assert is_idle(a, b)
    assert "ignored" not in capfd.readouterr().err


def test_other_errors_of_finalizers_are_reported_as_before(pair, monkeypatch):
    reported: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    a, b = pair
    for _ in range(2):
        future = a.future(b, spin)
        assert eventually(lambda: log == ["begun"])
        assert cancel(a, future)
        assert eventually(lambda: log[-1] == "ended") and is_idle(a, b)
        log.clear()

    class Fails:
        def __init__(self, error):
            self.error = error

        def __del__(self):
            raise self.error

    Fails(KeyError("x"))
    Fails(asyncio.CancelledError())
    assert [each.exc_type for each in reported] == [KeyError, asyncio.CancelledError]


def test_a_queued_call_does_not_run(pair):
    a, b = pair
    for _ in range(2):
        a.future(b, block)
    assert eventually(lambda: len(log) == 2)
    queued = [a.future(b, note, number) for number in range(3)]
    assert cancel(a, queued[1]) and is_cancelled(queued[1])
    assert eventually(lambda: knows(b))
    go.set()
    assert [queued[0].wait(), queued[2].wait()] == [0, 2]
    assert is_idle(a, b) and 1 not in log


def test_a_call_that_arrives_after_its_cancellation_does_not_run(pair):
    a, b = pair
    number = a.agent.caller.new_id() + 1
    b.agent.cancelling.serve(a.member.id, number, b.agent.callee.under_way)
    future = a.future(b, note, "late")
    with pytest.raises(CancelledError):
        future.wait()
    assert not log and a.sync(b, note, "next") == "next"


def test_a_coroutine_is_cancelled(pair):
    a, b = pair
    future = a.future(b, sleep)
    assert eventually(lambda: log)
    assert cancel(a, future) and is_cancelled(future)
    assert eventually(lambda: log == ["begun", asyncio.CancelledError]) and is_idle(a, b)


def test_a_future_that_has_ended_is_not_cancelled(pair):
    a, b = pair
    future = a.future(b, note, 1)
    assert future.wait() == 1 and not cancel(a, future) and future.wait() == 1
    other: Any = Future()
    assert not cancel(a, other) and not other.done()


def waits_for(to, func):
    """Call another worker from this one, and wait."""
    return workers["b"].sync(to, func)


@async_execution
def passes_on(to, func):
    return workers["b"].future(to, func)


@pytest.mark.parametrize("way", [waits_for, passes_on])
@pytest.mark.parametrize("func", [spin, sleep])
def test_nested_calls_are_cancelled_with_it(pair, way, func):
    a, b = pair
    future = a.future(b, way, "a", func)
    assert eventually(lambda: log)
    assert cancel(a, future) and is_cancelled(future)
    assert eventually(lambda: asyncio.CancelledError in log)
    assert is_idle(a, b)


def test_other_calls_of_the_same_worker_go_on(pair):
    a, b = pair
    kept = a.future(b, spin)
    assert eventually(lambda: log)
    future = a.future(b, spin)
    assert eventually(lambda: len(log) == 2)
    assert cancel(a, future) and is_cancelled(future)
    assert eventually(lambda: asyncio.CancelledError in log)
    go.set()
    assert kept.wait() == "done" and log.count(asyncio.CancelledError) == 1


def test_an_rref_of_a_cancelled_call_raises_its_error(pair):
    a, b = pair
    rref = a.remote(b, spin)
    assert eventually(lambda: log)
    (call,) = a.agent.caller.under_way()[1]
    assert a.agent.cancelling._cancel(call)
    assert eventually(lambda: asyncio.CancelledError in log)
    with pytest.raises(CancelledError):
        rref.to_here()
    assert is_idle(a, b)


def test_what_a_function_keeps_is_released_when_it_does_not_run(pair):
    a, b = pair
    for _ in range(2):
        a.future(b, block)
    assert eventually(lambda: len(log) == 2)
    rref = a.remote(a, note, "value")
    rref.to_here()
    future = a.future(b, note, rref)
    assert cancel(a, future)
    assert eventually(lambda: knows(b))
    go.set()
    assert is_idle(a, b)
    assert not [each for each in log if each is not None and each not in ("blocks", "value")]
    del rref, future
    assert eventually(lambda: a.is_empty() and b.is_empty())


def brief(number):
    """Run for a while that is about as long as a cancellation takes."""
    end = time.perf_counter() + number
    while time.perf_counter() < end:
        pass
    return number


@pytest.mark.parametrize("seed", range(4))
def test_cancellations_that_race_with_replies(pair, quick_switches, seed):
    a, b = pair
    order = random.Random(seed)
    outcomes: list[tuple[bool, Any]] = []

    def run(seed):
        order = random.Random(seed)
        for _ in range(30):
            seconds = order.uniform(0, 0.02)
            future = a.future(b, brief, seconds)
            time.sleep(order.uniform(0, 0.025))
            was_cancelled = cancel(a, future)
            try:
                outcomes.append((was_cancelled, future.wait() == seconds))
            except CancelledError as error:
                outcomes.append((was_cancelled, error))

    threads = [threading.Thread(target=run, args=(order.random(),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert len(outcomes) == 120
    for was_cancelled, outcome in outcomes:
        assert isinstance(outcome, CancelledError) if was_cancelled else outcome is True
    assert {each[0] for each in outcomes} == {True, False}
    assert is_idle(a, b)
    # no thread of the worker is interrupted later
    assert [a.sync(b, brief, 0.001) for _ in range(50)] == [0.001] * 50
    assert b.agent.slots.free == 2


def test_an_interrupt_that_a_finalizer_loses_is_dropped_all_the_same(monkeypatch):
    set_exception = cancelling._set_exception
    interrupts: list[type] = []

    def lose_the_first(thread, kind):
        interrupts.append(kind)
        if len(interrupts) > 1:
            set_exception(thread, kind)

    monkeypatch.setattr(cancelling, "_set_exception", lose_the_first)
    outcome = in_thread(lambda: cancelling._take_back(threading.get_ident()))
    assert outcome(WAIT) is None and len(interrupts) == 2


def test_an_interrupted_wait_cancels_its_call(pair):
    a, b = pair
    a.agent.caller.on_interrupted_wait = a.agent.cancelling.notify
    started = a.agent.caller.start(a.find(b), Invocation(spin), WAIT)
    assert eventually(lambda: log)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        started(interrupt)
    assert eventually(lambda: asyncio.CancelledError in log) and is_idle(a, b)


def test_the_call_for_which_a_thread_runs_is_forgotten(pair):
    a, b = pair
    assert a.sync(b, _has_parent) is True
    assert not _has_parent() and not current.agents()


def _has_parent():
    from rayrpc._runtime.current_call import current_call

    return current_call.get() is not None


def test_whether_a_thread_may_be_interrupted_is_found_while_threads_start():
    code = PROGRAM + LOOK
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, b"looked\n"), done.stderr.decode()[-2000:]


def test_a_thread_may_be_traced_after_cancellations(pair):
    """Python 3.11 enters no function under tracing while an interrupt is looked for."""
    a, b = pair
    for number in range(5):
        future = a.future(b, brief, 0.02)
        time.sleep(0.005 * number)
        cancel(a, future)
    assert is_idle(a, b)
    entered: list[str] = []

    def run():
        sys.settrace(lambda frame, event, argument: entered.append(frame.f_code.co_name))
        brief(0.0)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT / 6)
    assert not thread.is_alive() and "brief" in entered
