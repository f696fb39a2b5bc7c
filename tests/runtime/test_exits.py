"""Users' code that exits while it is shown, pickled or unpickled: the call ends with an error, and
both workers go on.  Torch raises a RuntimeError too."""

import asyncio
import pickle
import threading
from typing import Any

import pytest
from conftest import eventually
from memory_workers import WAIT, MemoryWorker

from rayrpc._concurrency.outcome import text_of
from rayrpc._runtime.serialization import codec
from rayrpc._runtime.serialization.remote_errors import RemoteException, rebuild
from rayrpc._transports.memory import MemoryHub
from rayrpc.errors import CallTimeoutError, SerializationError
from rayrpc.functions import async_execution
from rayrpc.futures import Future


@pytest.fixture
def group():
    hub = MemoryHub()
    a, b = MemoryWorker(hub, "a"), MemoryWorker(hub, "b", num_worker_threads=1)
    yield a, b
    for worker in (a, b):
        worker.die()
        worker.agent.shutdown()


class ShownExits(Exception):
    def __repr__(self):
        raise SystemExit(4)

    __str__ = __repr__


class ExitThatExits(SystemExit):
    def __repr__(self):
        raise KeyboardInterrupt

    __str__ = __repr__


class TypeErrorThatExits(TypeError):
    __str__ = __repr__ = ShownExits.__repr__


class ExitsTwice(Exception):
    """Exits when it is shown, and when it is made at the caller."""

    def __init__(self, *args):
        if args:
            raise ExitThatExits

    __str__ = __repr__ = ShownExits.__repr__


class _ReduceExits(type):
    def __reduce__(cls):
        raise SystemExit(5)


class TypeThatExits(Exception, metaclass=_ReduceExits):
    pass


def exit_with(error):
    raise error()


class Unpickled:
    """An object that raises when it is unpickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return exit_with, (self.error,)


class Pickled:
    """An object that raises when it is pickled."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error()


def give(cls, error):
    return cls(error)


async def give_later(cls, error):
    await asyncio.sleep(0)
    return cls(error)


async def exit_later(error):
    await asyncio.sleep(0)
    raise error()


@async_execution
def give_by_future(cls, error):
    future: Any = Future()
    threading.Timer(0.001, lambda: future.set_result(cls(error))).start()
    return future


def take(_):
    return "taken"


_gate = threading.Event()


def wait_at_gate():
    assert _gate.wait(WAIT)


def add(x, y):
    return x + y


ERRORS = [SystemExit, KeyboardInterrupt, ShownExits, ExitThatExits, TypeErrorThatExits, ExitsTwice]
CALLS = {
    "raised": lambda error: (exit_with, error),
    "raised by a coroutine": lambda error: (exit_later, error),
    "its result is unpickled": lambda error: (give, Unpickled, error),
    "its result is pickled": lambda error: (give, Pickled, error),
    "a coroutine's result is pickled": lambda error: (give_later, Pickled, error),
    "a future's value is pickled": lambda error: (give_by_future, Pickled, error),
    "a future's value is unpickled": lambda error: (give_by_future, Unpickled, error),
    "its argument is unpickled": lambda error: (take, Unpickled(error)),
}


def assert_ends_with_an_error(get):
    """Call ``get`` in another thread: KeyboardInterrupt is the user's in the main thread."""
    kinds: list[type] = []  # pytest would show the errors themselves

    def run():
        try:
            kinds.append(type(get()))
        except BaseException as exc:
            kinds.append(type(exc))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(2 * WAIT)
    (kind,) = kinds
    assert issubclass(kind, Exception) and kind is not CallTimeoutError


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_way_to_call_ends_with_an_error(group, call):
    a, b = group
    for error in ERRORS:
        func, *args = call(error)
        for get in (
            lambda func=func, args=args: a.sync(b, func, *args),
            a.future(b, func, *args).wait,
            lambda func=func, args=args: a.remote(b, func, *args).to_here(),
        ):
            assert_ends_with_an_error(get)
        busy = a.future(b, wait_at_gate)
        assert eventually(lambda: b.agent.slots.free == 0)
        waits = a.future(b, func, *args)  # for the one slot
        assert eventually(lambda: b.agent.slots.waiting == 1)
        _gate.set()
        assert_ends_with_an_error(waits.wait)
        busy.wait()
        _gate.clear()
        assert a.sync(b, add, 1, 2) == 3
    assert eventually(lambda: b.agent.callee.active == a.agent.caller.active == 0)


def test_a_type_whose_pickling_exits_becomes_a_runtime_error(group):
    a, b = group
    with pytest.raises(Exception, match="TypeThatExits"):
        a.sync(b, raise_unpicklable)


def raise_unpicklable():
    raise TypeThatExits("x")


def test_the_error_says_what_exited(group):
    a, b = group
    with pytest.raises(RuntimeError, match="SystemExit"):
        a.sync(b, give, Unpickled, SystemExit)
    with pytest.raises(RuntimeError, match="SystemExit"):
        a.sync(b, give, Pickled, SystemExit)
    with pytest.raises(ShownExits) as caught:
        a.sync(b, exit_with, ShownExits)
    assert "ShownExits that cannot be shown" in caught.value.args[0]


def test_ctrl_c_while_the_main_thread_unpickles_is_ctrl_c(group):
    a, b = group
    with pytest.raises(KeyboardInterrupt):
        a.sync(b, give, Unpickled, KeyboardInterrupt)


def test_an_error_that_cannot_be_made_nor_shown_is_described():
    assert text_of(ShownExits("x")) == "<ShownExits that cannot be shown>"
    remote = RemoteException("the text", pickle.dumps(ExitsTwice), "ExitsTwice", {})
    error = rebuild(remote, keeps_type=True)
    assert type(error) is RuntimeError and "the text" in str(error)


def test_a_pickle_of_4_gib_is_an_error_at_both_ends(group, monkeypatch):
    a, b = group
    monkeypatch.setattr(codec, "MAX_PICKLE", 1000)
    for argument in (b"x" * 2000, [b"x" * 2000]):
        with pytest.raises(SerializationError, match=r"take on RPC worker 'b'.*its pickle has 20"):
            a.sync(b, take, argument)
    for size_of in (bytes, list_of_bytes):
        for get in (a.future(b, size_of, 2000).wait, a.remote(b, size_of, 2000).to_here):
            with pytest.raises(SerializationError, match=r"result of RPC worker 'b'.*its pickle"):
                get()
    assert a.sync(b, add, 1, 2) == 3
    assert eventually(lambda: b.agent.callee.active == a.agent.caller.active == 0)


def list_of_bytes(size):
    return [bytes(size)]
