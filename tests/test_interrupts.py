"""A Ctrl-C that somebody swallowed."""

import contextlib
import signal

import pytest

from rayrpc.launch.interrupts import check_ctrl_c, remember_ctrl_c


@remember_ctrl_c()
def wait_as_in_a_callback_that_takes_exceptions():
    with contextlib.suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    check_ctrl_c()


def test_a_lost_ctrl_c_is_raised_again_once():
    with pytest.raises(KeyboardInterrupt):
        wait_as_in_a_callback_that_takes_exceptions()
    check_ctrl_c()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_program_stays():
    came = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(1))
    try:
        wait_as_in_a_callback_that_takes_exceptions()
        assert came == [1]
    finally:
        signal.signal(signal.SIGINT, before)
