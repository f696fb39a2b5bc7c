"""Calls that wait for long are logged once, with where they stand; and slots that are all taken."""

import logging
import threading

import pytest
from conftest import eventually
from memory_workers import memory_group
from torch.futures import Future

import rayrpc as rpc
from rayrpc import config
from rayrpc._observe import slow_calls
from rayrpc._observe.report import Inspector
from rayrpc._observe.slow_calls import SlowCalls
from rayrpc.functions import async_execution
from rayrpc.streams import open_stream

go = threading.Event()
later = []


@pytest.fixture
def pair(caplog):
    """Two workers with one slot each, and what looks at the calls of the first one."""
    go.clear()
    caplog.set_level(logging.WARNING)
    with memory_group() as start:
        a, b = (start(name, num_worker_threads=1) for name in "ab")
        for worker in a, b:
            worker.agent.callee.inspect = Inspector(worker.agent, False).answer
        yield a, b, SlowCalls(a.agent, 0.05)
        go.set()
        for future in later:
            future.set_result(1)
        later.clear()


def blocks():
    go.wait(60)


@async_execution
def answers_later():
    later.append(Future())
    return later[-1]


def logged(caplog, slow, count):
    """Return the messages, once there are so many; the text ends with a file's name and a line."""

    def check():
        slow.check()
        return len(caplog.messages) >= count

    assert eventually(check), caplog.messages
    slow.check()
    return caplog.messages


def test_a_call_is_logged_once_with_the_place_where_it_is(pair, caplog):
    a, b, slow = pair
    future = a.future(b, blocks)
    assert eventually(lambda: b.agent.callee.active == 1)
    (message,) = logged(caplog, slow, 1)
    assert message.startswith(
        "RPC worker 'a' has waited 0 s for 'b' to run test_slow_calls.blocks: "
    )
    assert (
        "it is at " in message
        and message.endswith(", in blocks")
        and "test_slow_calls.py" in message
    )
    go.set()
    future.wait()
    slow.check()
    assert len(caplog.messages) == 1 and not slow._noted


def test_calls_that_are_queued_or_have_a_future_say_so(pair, caplog):
    a, b, slow = pair
    a.future(b, answers_later)
    assert eventually(lambda: later)
    (message,) = logged(caplog, slow, 1)
    assert message.endswith("the value is not there yet: a Future or a coroutine is not done")
    caplog.clear()
    a.future(b, blocks)
    assert eventually(lambda: b.agent.slots.free == 0)
    logged(caplog, slow, 1)
    caplog.clear()
    a.future(b, len, "abc")
    (message,) = logged(caplog, slow, 1)
    assert message.endswith("to run len: it waits there for one of 1 slots, with 1 calls in all")


def waits():
    yield go.wait(60)


def test_values_of_streams_are_not_logged_as_they_wait_for_those_before_them(pair, caplog):
    a, b, slow = pair

    future = a.future(b, answers_later)
    assert eventually(lambda: later)  # before the stream keeps the slot
    stream = open_stream(a.agent, b.name, waits, None, None, 8, 0)
    assert eventually(lambda: b.agent.callee.active == 9)
    (message,) = logged(caplog, slow, 1)
    assert "answers_later" in message
    go.set()
    assert list(stream) == [True] and not future.done()


def test_a_worker_that_does_not_answer_is_said(pair, caplog, monkeypatch):
    a, b, slow = pair
    monkeypatch.setattr(slow_calls, "ANSWER_SECONDS", 0.2)
    b.agent.callee.inspect = lambda what: go.wait(60) and b""
    a.future(b, blocks)
    (message,) = logged(caplog, slow, 1)
    assert message.endswith("that worker does not answer")


def test_many_slow_calls_are_counted(pair, caplog):
    a, b, slow = pair
    for _ in range(slow_calls.MOST_CALLS + 3):
        a.future(b, blocks)
    slow._seconds = 0.0
    messages = logged(caplog, slow, slow_calls.MOST_CALLS + 1)
    assert len(messages) == slow_calls.MOST_CALLS + 1
    assert "for 3 more calls" in messages[-1]


def test_slots_that_are_all_taken_while_calls_wait_are_logged_once_each_time(pair, caplog):
    a, b, _ = pair
    slow = SlowCalls(b.agent, 0.05)
    for _ in range(2):
        go.clear()
        caplog.clear()
        slow.check()
        assert not caplog.messages
        futures = [a.future(b, blocks) for _ in range(2)]
        assert eventually(lambda: b.agent.slots.waiting == 1)
        (message,) = logged(caplog, slow, 1)
        assert message.startswith(
            "all 1 slots of RPC worker 'b' have been taken for 0 s, and 1 calls"
        )
        go.set()
        for future in futures:
            future.wait()


@pytest.mark.usefixtures("ray_cluster")
def test_the_setting_is_obeyed(caplog):
    before = rpc.settings()
    try:
        for seconds, count in ((0.1, 1), (0, 0)):
            rpc.configure(slow_call=seconds)
            caplog.clear()
            options = rpc.TensorPipeRpcBackendOptions(init_method="ray://alone")
            rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
            waiter = threading.Event()
            _kept.append(waiter)
            future = rpc.rpc_async("alone", _waits)
            if count:
                assert eventually(lambda: caplog.messages)
                assert "'alone' to run" in caplog.messages[0] and "in _waits" in caplog.messages[0]
            names = [thread.name for thread in threading.enumerate()]
            assert names.count("rayrpc-slow-calls") == count
            waiter.set()
            future.wait()
            rpc.shutdown()
            assert eventually(
                lambda: "rayrpc-slow-calls" not in [t.name for t in threading.enumerate()]
            )
    finally:
        config.use(before)
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown()


_kept = []


def _waits():
    _kept[-1].wait(60)
