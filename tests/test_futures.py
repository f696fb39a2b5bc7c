"""wait_all: all values, or the first error as soon as it is there."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import targets
import torch
from interrupting import interrupted, interrupts_wait

import rayrpc as rpc
from rayrpc import futures
from rayrpc.futures import Future, collect_all, wait_all

WAIT = 60.0


def done(value):
    future = Future()
    future.set_result(value)
    return future


def test_futures_are_torchs_own():
    assert Future is torch.futures.Future
    assert collect_all is torch.futures.collect_all
    assert futures.__all__ == ["Future", "as_completed", "collect_all", "wait_all"]


def test_of_nothing_there_is_nothing():
    assert wait_all([]) == torch.futures.wait_all([]) == []


def test_values_come_in_the_order_of_the_futures():
    first, second = Future(), Future()
    threading.Timer(0.02, second.set_result, [2]).start()
    threading.Timer(0.04, first.set_result, [1]).start()
    assert wait_all([first, second, done(3)]) == [1, 2, 3]


def test_one_future_may_be_there_twice():
    future = done(1)
    assert wait_all([future, future]) == [1, 1]


@pytest.mark.parametrize("late", [False, True])
def test_the_first_error_is_raised_though_others_are_not_done(late):
    never, failing = Future(), Future()
    seen = []

    def wait():
        with pytest.raises(KeyError, match="first"):
            wait_all([never, failing, done(1)])
        seen.append("raised")

    if not late:
        failing.set_exception(KeyError("first"))
    waiter = threading.Thread(target=wait)
    waiter.start()
    if late:
        failing.set_exception(KeyError("first"))
    waiter.join(WAIT)
    assert seen == ["raised"]
    never.set_result(None)


def test_of_two_errors_the_earlier_is_raised():
    first, second = Future(), Future()
    second.set_exception(KeyError("earlier"))
    waiter = threading.Timer(0.02, first.set_exception, [ValueError("later")])
    waiter.start()
    with pytest.raises(KeyError, match="earlier"):
        wait_all([first, second])
    waiter.join()


@pytest.mark.parametrize("make", [Future, lambda: Future().then(lambda done: done.value())])
def test_an_interrupt_ends_a_wait_in_the_main_thread(make):
    futures.extend_futures()
    future = make()
    with interrupts_wait(lambda: future.set_result(1)):
        future.wait()
    assert not future.done()
    threading.Timer(0.1, future.set_result, (2,)).start()
    assert future.wait() == 2


@pytest.mark.parametrize("wait", [wait_all, lambda futures: next(iter(rpc.as_completed(futures)))])
def test_an_interrupt_ends_a_wait_for_several_in_the_main_thread(wait):
    future = Future()
    with interrupts_wait(lambda: future.set_result(1)):
        wait([future])
    assert not future.done()


class DoneMeanwhile(Future):
    """A Future that is set as soon as somebody is about to wait for it."""

    def add_done_callback(self, callback):
        self.set_result(1)
        super().add_done_callback(callback)  # which prints the errors of the callback


def test_an_interrupt_as_it_becomes_done_does_not_keep_a_wait():
    futures.extend_futures()
    number = 1
    while interrupted(lambda: DoneMeanwhile().wait(), {futures.__file__}, number):
        number += 1
    assert number > 5


def test_extending_futures_again_changes_nothing():
    futures.extend_futures()
    base: Any = torch.futures.Future.__mro__[1]
    before = base.wait
    futures.extend_futures()
    assert base.wait is before


class TestRepr:
    """Of torch's class, once rayrpc has extended it."""

    @pytest.fixture(autouse=True)
    def extended(self):
        futures.extend_futures()

    def test_tells_the_value_or_the_error(self):
        pending = Future()
        assert repr(pending) == "<Future: pending>"
        pending.set_result([1, "two"])
        assert repr(pending) == "<Future: done, [1, 'two']>"
        failed = Future()
        failed.set_exception(KeyError("why"))
        assert repr(failed).startswith("<Future: failed with KeyError('why")
        later = done(1).then(lambda future: future.value() / 0)
        assert "ZeroDivisionError" in repr(later)

    def test_is_short(self):
        assert len(repr(done("x" * 10_000))) < 300 and len(repr(done([*range(10_000)]))) < 300
        assert repr(done(torch.ones(2))) == "<Future: done, tensor([1., 1.])>"
        assert len(repr(done(torch.arange(900.0)))) < 300

    def test_tells_which_call_it_is_of(self, workers):
        future = rpc.rpc_async("alice", targets.wait_until_kept, args=("shown",))
        call = "the call of wait_until_kept on RPC worker 'alice'"
        assert re.fullmatch(rf"<Future of {call}: pending for \d\.\d s>", repr(future))
        rpc.rpc_sync("alice", targets.keep, args=("shown", True))
        assert future.wait() is None and repr(future) == "<Future: done, None>"
        rpc.rpc_sync("alice", targets.drop, args=("shown",))
        with pytest.raises(ValueError, match="as expected"):
            (failed := rpc.rpc_async("alice", targets.fail)).wait()
        assert repr(failed).startswith("<Future: failed with ValueError(")
