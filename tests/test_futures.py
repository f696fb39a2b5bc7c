"""wait_all: all values, or the first error as soon as it is there."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from interrupting import interrupted

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
    timers = [
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)),
        threading.Timer(4 * WAIT, future.set_result, (1,)),  # ends a test that fails
    ]
    for timer in timers:
        timer.start()
    with pytest.raises(KeyboardInterrupt):
        future.wait()
    for timer in timers:
        timer.cancel()
        timer.join()
    assert not future.done()
    threading.Timer(0.1, future.set_result, (2,)).start()
    assert future.wait() == 2


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
