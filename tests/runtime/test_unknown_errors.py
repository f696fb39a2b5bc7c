"""Errors of calls that the program never asks for are logged when Python collects them."""

import gc
import itertools
import threading

import pytest
import torch
from conftest import eventually
from memory_workers import memory_group
from torch.futures import Future, collect_all

from rayrpc._concurrency import outcome
from rayrpc.errors import RpcError
from rayrpc.futures import wait_all


@pytest.fixture
def pair(caplog, monkeypatch):
    monkeypatch.setattr(outcome, "_unknown", itertools.count(1))
    with memory_group() as start:
        yield start("a"), start("b")


def fails(text="no such row"):
    raise KeyError(text)


def made():
    return torch.ones(2)


def blocks():
    go.wait(60)


go = threading.Event()


def done(future):
    assert eventually(future.done)
    return future


def messages(caplog):
    gc.collect()
    return [each for each in caplog.messages if "has not asked" in each]


def test_the_error_of_a_future_that_nobody_asks_for_is_logged(pair, caplog):
    a, b = pair
    future = done(a.future(b, fails))
    assert not messages(caplog)
    del future
    (message,) = messages(caplog)
    assert message.startswith(
        "The call of fails on RPC worker 'b' failed, and the program has not asked for the error: "
    )
    assert "no such row" in message and "in fails" in message  # with the callee's traceback


@pytest.mark.parametrize(
    "ask",
    [
        lambda future: future.wait(),
        lambda future: future.value(),
        lambda future: future.then(lambda done: done.value()).wait(),
        lambda future: wait_all([future]),
        lambda future: torch.futures.wait_all([future]),
        lambda future: collect_all([future]).wait()[0].wait(),
    ],
)
def test_an_error_that_was_asked_for_is_not(pair, caplog, ask):
    a, b = pair
    with pytest.raises(Exception, match="no such row"):
        ask(done(a.future(b, fails)))
    assert not messages(caplog)


def test_neither_is_that_of_a_call_that_is_waited_for(pair, caplog):
    a, b = pair
    with pytest.raises(KeyError):
        a.sync(b, fails)
    assert not messages(caplog)


def test_a_future_that_the_program_completes_itself_needs_no_error(pair, caplog):
    a, b = pair
    go.clear()
    future = a.future(b, blocks, timeout=0.05)
    future.set_result("mine")
    assert eventually(lambda: not a.agent.caller.under_way()[1])
    go.set()
    assert future.wait() == "mine"
    del future
    assert not messages(caplog)


def test_a_shutdown_ends_calls_without_a_word(pair, caplog):
    a, b = pair
    go.clear()
    future = a.future(b, blocks)
    a.agent.caller.close()
    with pytest.raises(RpcError, match="shut down"):
        a.future(b, made).wait()
    done(future)
    go.set()
    del future
    assert not messages(caplog)


def test_rayrpcs_own_calls_are_not_the_programs(pair, caplog):
    a, b = pair
    future = done(a.future(b, outcome.text_of))  # fails: it needs an argument
    del future
    assert not messages(caplog)
    future = done(a.future(b, wait_all))  # so does this, which programs may call
    del future
    assert len(messages(caplog)) == 1


def test_the_error_of_a_remote_call_is_logged_by_the_owner_when_the_value_is_released(pair, caplog):
    a, b = pair
    rref = a.remote(b, fails)
    assert rref._get_future().wait() is None  # which tells nothing of the error
    assert not messages(caplog)
    del rref
    assert eventually(lambda: messages(caplog))
    (message,) = messages(caplog)
    assert message.startswith("The call of fails by remote on RPC worker 'b' failed, and")


def test_the_error_of_a_value_that_was_fetched_is_not(pair, caplog):
    a, b = pair
    rref = a.remote(b, fails)
    with pytest.raises(KeyError):
        rref.to_here()
    del rref
    assert eventually(lambda: a.is_empty() and b.is_empty())
    assert not messages(caplog)


def test_neither_is_that_of_a_value_whose_method_was_called(pair, caplog):
    a, b = pair
    rref = a.remote(b, fails)
    with pytest.raises(KeyError):
        a.sync(b, local_value, rref)
    del rref
    assert eventually(lambda: a.is_empty() and b.is_empty())
    assert not messages(caplog)


def local_value(rref):
    return rref.local_value()


def test_a_process_logs_a_hundred_of_them(pair, caplog):
    a, b = pair
    for future in [a.future(b, fails) for _ in range(105)]:
        done(future)
    del future
    assert eventually(lambda: len(messages(caplog)) == 100)
    assert "further errors" in caplog.messages[-1]


def test_errors_that_no_call_has_made_are_nobodys(caplog):
    outcome.complete(Future(), outcome.Error(KeyError("x")))
    assert not messages(caplog)
