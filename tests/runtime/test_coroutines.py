"""Event loops of async functions: what ends a coroutine must not end its loop."""

import asyncio
import contextlib
import inspect
import threading
from typing import Any

import pytest
from conftest import eventually
from memory_workers import WAIT, MemoryWorker

from rayrpc._concurrency.outcome import Error, Value
from rayrpc._runtime.coroutines import Coroutines, stepwise
from rayrpc._transports.memory import MemoryHub


@pytest.fixture
def runner():
    runner = Coroutines("test")
    yield runner
    runner.close()


class Leaver(BaseException):
    pass


async def leave(error, steps=1):
    for _ in range(steps):
        await asyncio.sleep(0)
    raise error


async def leave_in_a_task(error):
    await asyncio.create_task(leave(error))


async def leave_in_a_callback(error):
    def callback():
        raise error

    asyncio.get_running_loop().call_soon(callback)
    await asyncio.sleep(0.01)
    return "after the callback"


async def stop_the_loop(_):
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    return "after the stop"


class Ends:
    """The outcomes of coroutines."""

    def __init__(self, runner):
        self.runner = runner
        self.seen: dict[str, Any] = {}

    def submit(self, name, coroutine):
        self.runner.submit(coroutine, lambda outcome: self.seen.update({name: outcome}))

    def wait(self, *names):
        assert eventually(lambda: self.seen.keys() >= set(names)), self.seen
        return [self.seen[name] for name in names]


async def thread_id():
    return threading.get_ident()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Leaver(), GeneratorExit()])
@pytest.mark.parametrize("how", [leave, leave_in_a_task])
def test_a_coroutine_that_exits_ends_with_that_error_and_its_loop_goes_on(runner, error, how):
    ends = Ends(runner)
    gate: list[asyncio.Event] = []

    async def wait_at_gate():
        gate.append(asyncio.Event())
        await gate[0].wait()
        return threading.get_ident()

    async def open_gate():
        gate[0].set()
        return threading.get_ident()

    ends.submit("waits", wait_at_gate())
    assert eventually(lambda: gate != [])
    for number in range(5):
        ends.submit(f"exits {number}", how(error))
    ends.submit("opens", open_gate())
    waits, opens, *exits = ends.wait("waits", "opens", *(f"exits {n}" for n in range(5)))
    assert waits == opens and isinstance(waits, Value)  # one loop, in one thread
    assert all(isinstance(end, Error) and end.error is error for end in exits)


@pytest.mark.parametrize("how", [leave_in_a_callback, stop_the_loop])
def test_what_a_coroutine_leaves_in_its_loop_does_not_end_it(runner, how):
    ends = Ends(runner)
    ends.submit("first", how(SystemExit(3)))
    (first,) = ends.wait("first")
    assert isinstance(first, Value)
    ends.submit("second", thread_id())
    assert isinstance(ends.wait("second")[0], Value)


def test_close_ends_a_loop_whose_coroutines_exit_when_cancelled(runner):
    ends, started = Ends(runner), threading.Semaphore(0)

    async def exit_when_cancelled():
        started.release()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise SystemExit(3) from None

    before = threading.active_count()
    for number in range(3):
        ends.submit(f"{number}", exit_when_cancelled())
    assert all(started.acquire(timeout=WAIT) for _ in range(3))
    runner.close()
    ends.wait("0", "1", "2")
    assert eventually(lambda: threading.active_count() <= before)


def test_without_a_thread_for_a_loop_a_coroutine_ends_with_the_error(runner, monkeypatch):
    start = threading.Thread.start

    def limited(thread):
        if thread.name.startswith("test-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    ends = Ends(runner)
    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", limited)
        ends.submit("none", thread_id())
        (none,) = ends.wait("none")
        assert isinstance(none, Error) and "can't start" in str(none.error)
    ends.submit("one", thread_id())
    assert isinstance(ends.wait("one")[0], Value)


def exit_plainly():
    raise SystemExit(3)


async def wait_forever():
    await asyncio.sleep(600)


async def double(x):
    await asyncio.sleep(0)
    return 2 * x


def test_an_async_target_that_exits_is_an_error_as_a_plain_one_and_others_go_on():
    hub = MemoryHub()
    a, b = MemoryWorker(hub, "a"), MemoryWorker(hub, "b")
    try:
        pending = a.future(b, wait_forever)
        for func, args in ((exit_plainly, ()), (leave, (SystemExit(3),))):
            with pytest.raises(RuntimeError, match=r"SystemExit\(3\)"):
                a.sync(b, func, *args)
        with pytest.raises(RuntimeError, match=r"KeyboardInterrupt"):
            a.sync(b, leave, KeyboardInterrupt())
        assert a.sync(b, double, 21) == 42
        assert not pending.done()
    finally:
        for worker in (a, b):
            worker.die()
            worker.agent.shutdown()


async def adds_in_steps(x):
    await asyncio.sleep(0)
    with contextlib.suppress(KeyError):
        await leave(KeyError("once"))
    return x + 1


def test_a_coroutine_runs_step_by_step_in_a_context_each(runner):
    entered = []

    @contextlib.contextmanager
    def within():
        entered.append(threading.get_ident())
        yield

    ends = Ends(runner)
    stepped = stepwise(adds_in_steps(1), within)
    assert inspect.iscoroutine(stepped)  # from Python 3.12 on a task takes nothing else
    ends.submit("value", stepped)
    ends.submit("error", stepwise(leave(ValueError("x")), within))
    assert eventually(lambda: len(ends.seen) == 2)
    assert ends.seen["value"] == Value(2)
    assert isinstance(ends.seen["error"].error, ValueError)
    assert len(entered) == 5 and len(set(entered)) == 1
