"""The one-shot core: its value is set once, and all callbacks are called."""

import logging

import pytest
from interrupting import interrupts_wait

from rayrpc._concurrency.promise import Promise


def test_an_error_of_a_callback_is_logged_and_the_others_are_called(caplog):
    promise = Promise()
    seen = []
    promise.on_done(lambda value: 1 / 0)
    promise.on_done(seen.append)
    assert promise.set(3)
    assert seen == [3]
    assert "ZeroDivisionError" in caplog.text
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_an_interrupt_in_a_callback_is_raised_when_all_were_called():
    promise = Promise()
    seen = []

    def interrupt(value):
        raise KeyboardInterrupt

    promise.on_done(interrupt)
    promise.on_done(seen.append)
    with pytest.raises(KeyboardInterrupt):
        promise.set(3)
    assert seen == [3]
    assert promise.value == 3


@pytest.mark.parametrize("timeout", [None, 600.0])
def test_a_signal_just_before_a_wait_ends_it(timeout):
    promise = Promise()
    with interrupts_wait(lambda: promise.set(1)):
        promise.wait(timeout)
    promise.set(2)
    assert promise.wait(timeout) == 2


def test_what_an_interrupt_has_left_is_done_again():
    promise = Promise()
    seen = []

    def interrupt(value):
        if not seen:
            raise KeyboardInterrupt
        seen.append("called again")

    promise.on_done(interrupt)
    promise.on_done(seen.append)
    with pytest.raises(KeyboardInterrupt):
        promise.set(3)
    promise.set_again(4)
    assert seen == [3, "called again", 3] and promise.value == 3
    promise.set_again(5)
    assert len(seen) == 3, "nothing is left"
    fresh = Promise()
    fresh.set_again(1)
    assert fresh.value == 1
