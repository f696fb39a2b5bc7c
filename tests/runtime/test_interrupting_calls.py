"""Finalizers and handlers of signals that call while their thread is in the midst of a call."""

import gc
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
from conftest import eventually
from memory_workers import WAIT, memory_group

from rayrpc._concurrency.threads import ThreadCache
from rayrpc._runtime import interrupting_calls
from rayrpc.errors import CallError, RpcError


@pytest.fixture
def start():
    with memory_group() as start:
        yield start
        ran.clear()


@pytest.fixture
def a(start):
    return start("a")


@pytest.fixture
def b(a, start):
    return start("b")


ran: list[Any] = []


def run(what):
    ran.append(what)
    return what


def run_with(action):
    return actions[action]()


actions: dict[str, Any] = {}


class Finalized:
    """Garbage for the collector, whose finalizer calls."""

    def __init__(self, finalize):
        self.itself = self
        self.finalize = finalize

    def __del__(self):
        self.finalize()


def collect(finalize):
    Finalized(finalize)
    gc.collect()


def handle_signal(handler):
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        signal.raise_signal(signal.SIGUSR1)
        sum(range(3))
    finally:
        signal.signal(signal.SIGUSR1, before)


def call_interrupted(worker, other, interrupt, action):
    """Call, and run an action while a lock of this worker is held."""
    rrefs = worker.agent.rrefs
    take_pending = rrefs.take_pending

    def interrupted(to):
        rrefs.take_pending = take_pending
        with rrefs._lock:
            interrupt(action)
        return take_pending(to)

    rrefs.take_pending = interrupted
    done: list[Any] = []
    if interrupt is handle_signal:
        assert worker.sync(other, run, "outer") == "outer"
        return
    thread = threading.Thread(target=lambda: done.append(worker.sync(other, run, "outer")))
    thread.daemon = True
    thread.start()
    thread.join(WAIT)
    assert done == ["outer"], "the thread waits for a lock that it holds"


@pytest.mark.parametrize("interrupt", [collect, handle_signal])
@pytest.mark.timeout(120)
class TestInTheMidstOfACall:
    def test_an_asynchronous_call_is_made(self, a, b, interrupt):
        futures: list[Any] = []
        call_interrupted(a, b, interrupt, lambda: futures.append(a.future(b, run, "inner")))
        assert futures[0].wait() == "inner"
        assert eventually(lambda: not a.agent.caller.active)

    def test_an_error_of_an_asynchronous_call_is_that_of_its_future(self, a, b, interrupt):
        futures: list[Any] = []
        call_interrupted(
            a, b, interrupt, lambda: futures.append(a.future(b, run, threading.Lock()))
        )
        with pytest.raises(RpcError, match="cannot"):
            futures[0].wait()

    def test_a_synchronous_call_is_made_and_not_waited_for(self, a, b, interrupt):
        errors: list[Any] = []

        def act():
            with pytest.raises(RpcError, match="cannot wait") as caught:
                a.sync(b, run, "inner")
            errors.append(caught)

        call_interrupted(a, b, interrupt, act)
        assert len(errors) == 1
        assert eventually(lambda: sorted(ran) == ["inner", "outer"])
        assert eventually(lambda: not a.agent.caller.active)

    def test_rrefs_are_neither_made_nor_read(self, a, b, interrupt):
        rref = a.remote(b, run, "value")
        errors: list[Any] = []

        def act():
            for use in (lambda: a.remote(b, run, "inner"), rref.to_here):
                with pytest.raises(RpcError, match="Use rpc_async") as caught:
                    use()
                errors.append(caught)

        call_interrupted(a, b, interrupt, act)
        assert len(errors) == 2 and rref.to_here() == "value"


@pytest.mark.parametrize("interrupt", [collect, handle_signal])
def test_between_calls_they_may_wait(a, b, interrupt):
    values: list[Any] = []
    interrupt(lambda: values.append(a.sync(b, run, "inner")))
    assert values == ["inner"]


class StartingThread:
    """In the place of a thread's note that it has started: an action runs before the thread does.

    Args:
        thread: that will be started.
        action: runs as the thread begins.
    """

    def __init__(self, thread, action):
        self.note = thread._started
        self.action = action

    def __getattr__(self, name):
        return getattr(self.note, name)

    def set(self):
        self.note.set()
        self.action()


@pytest.mark.parametrize("is_ours", [True, False])
def test_in_a_thread_of_the_package_that_has_just_started_they_may_not_wait(a, b, is_ours):
    outcomes: list[Any] = []
    cache = ThreadCache("test")
    cache.close()

    def act():
        try:
            outcomes.append(a.sync(b, run, "inner"))
        except RpcError as exc:
            outcomes.append(str(exc))

    thread = threading.Thread(target=cache._watch if is_ours else lambda: None)
    thread._started = StartingThread(thread, lambda: collect(act))  # type: ignore[attr-defined]
    thread.start()
    thread.join(WAIT)
    assert len(outcomes) == 1 and ("cannot wait" in outcomes[0]) is is_ours
    assert eventually(lambda: ran == ["inner"])


def test_in_a_function_that_is_called_they_may_wait(a, b):
    values: list[Any] = []
    actions["collect"] = lambda: collect(lambda: values.append(b.sync(a, run, "inner")))
    a.sync(b, run_with, "collect")
    assert values == ["inner"]


def test_in_what_pickles_an_argument_they_may_wait(a, b):
    values: list[Any] = []

    class Argument:
        def __reduce__(self):
            collect(lambda: values.append(a.sync(b, run, "inner")))
            return str, ("outer",)

    assert a.sync(b, run, Argument()) == "outer"
    assert values == ["inner"]


def test_in_a_callback_of_a_future_they_may_wait(a, b):
    values: list[Any] = []

    def then(_):
        collect(lambda: values.append(a.sync(b, run, "inner")))

    a.future(b, run, 1).then(then).wait()
    assert values == ["inner"]


def test_calls_that_are_not_made_before_the_shutdown_fail(start):
    worker = start("w")
    calls = worker.agent.caller.interrupting
    begun, go_on = threading.Event(), threading.Event()

    def submit(task):
        begun.set()
        go_on.wait(WAIT)

    calls._submit = submit
    first, second = (calls.make(worker.future, "w", run, n) for n in range(2))
    assert begun.wait(WAIT)
    worker.agent.shutdown()
    third = calls.make(worker.future, "w", run, 2)
    go_on.set()
    for future in (first, second, third):
        with pytest.raises(CallError, match="shut down"):
            future.wait()
    assert len(calls) == 0 and not ran


def test_collections_are_followed_once_and_only_when_there_is_a_worker(start):
    code = "import gc, rayrpc._runtime.caller; print(len(gc.callbacks))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0\n", done.stderr
    before = len(gc.callbacks)
    start("a"), start("b")
    assert len(gc.callbacks) <= before + 1
    assert gc.callbacks.count(interrupting_calls._on_collection) == 1
