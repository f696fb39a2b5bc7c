"""Streams between workers of one process: ends, and what goes wrong at the worker."""

import threading
from typing import Any

import pytest
from conftest import eventually
from memory_workers import memory_group

from rayrpc.errors import CallError
from rayrpc.streams import open_stream

WAIT = 60.0

log: list[Any] = []
go = threading.Event()


@pytest.fixture
def pair():
    log.clear()
    go.clear()
    with memory_group() as start:
        yield start("a"), start("b")
        go.set()


def stream(worker, to, func, *args, window=8):
    return open_stream(worker.agent, to.name, func, args, None, window, WAIT)


def numbers(count):
    try:
        yield from range(count)
    finally:
        log.append("closed")


def stubborn():
    try:
        while True:
            yield 1
    finally:
        raise LookupError("not now")


def waits():
    yield 1
    go.wait(WAIT)
    yield 2


def test_a_barrier_ends_no_stream_and_leaving_does(pair):
    a, _ = pair
    opened = stream(a, a, numbers, 10**9)
    assert next(opened) == 0
    a.directory.sync = lambda tag, payload, timeout: {"a": payload}
    a.agent.sync()
    assert next(opened) == 1
    a.agent.join(shutdown=True)
    with pytest.raises(CallError, match="shut down"):
        next(opened)
    assert eventually(lambda: log == ["closed"])


def test_close_raises_what_the_generator_raises(pair):
    a, b = pair
    for _ in range(20):
        opened = stream(a, b, stubborn)
        assert next(opened) == 1
        with pytest.raises(LookupError, match="not now"):
            opened.close()


def test_an_error_of_a_generator_that_nobody_closes_is_logged(pair, caplog):
    a, b = pair
    opened = stream(a, b, stubborn, window=1)
    assert next(opened) == 1
    del opened
    assert eventually(lambda: "a generator raised an error as it was closed" in caplog.text)


def test_closing_during_a_step_waits_for_it(pair):
    a, b = pair
    opened = stream(a, b, waits)
    assert next(opened) == 1
    threading.Timer(0.2, go.set).start()
    opened.close()
    assert go.is_set()
    assert eventually(lambda: not b.agent.callee.active)


def test_a_step_for_which_no_thread_starts_is_an_error(pair, monkeypatch):
    a, b = pair
    opened = stream(a, b, waits)
    assert next(opened) == 1
    assert eventually(lambda: b.agent.callee.active == 7)

    def refuse(task):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(b.agent.slots, "submit", refuse)
    go.set()
    assert next(opened) == 2
    with pytest.raises(RuntimeError, match="can't start new thread"):
        next(opened)
    assert list(opened) == []
    monkeypatch.undo()
    assert eventually(lambda: not b.agent.callee.active)


def test_nothing_is_left_of_streams_of_all_kinds(pair):
    a, b = pair
    for to in a, b:
        for count in (0, 3, 10**9):
            opened = stream(a, to, numbers, count)
            next(opened, None)
            del opened
    assert eventually(lambda: a.is_empty() and b.is_empty())
    assert eventually(lambda: not (a.agent.callee.active or b.agent.callee.active))
    assert eventually(lambda: len(log) == 6)
    assert not a.agent.callee.streams._own and not a.agent.caller.streams
