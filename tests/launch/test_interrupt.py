"""The end of a run by Ctrl-C: when its timers end it, and what it writes before."""

import faulthandler
import os
import sys
import threading
import types

import pytest

from rayrpc.launch import interrupt


class Timer:
    """Does not run."""

    made: list = []

    def __init__(self, seconds, function):
        self.seconds, self.function = seconds, function
        self.daemon = self.is_started = False
        Timer.made.append(self)

    def start(self):
        self.is_started = True


@pytest.fixture
def clock(monkeypatch):
    """The seconds that it is; nothing ends this process."""
    now = types.SimpleNamespace(seconds=100.0, hard_ends=[], uncaught=[])
    monkeypatch.setattr(interrupt, "time", types.SimpleNamespace(monotonic=lambda: now.seconds))
    monkeypatch.setattr(interrupt, "_noted_at", None)
    monkeypatch.setattr(sys, "excepthook", lambda kind, *_: now.uncaught.append(kind))
    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.setattr(Timer, "made", [])

    def dump_later(seconds, exit, file):
        assert exit and os.fstat(file)
        now.hard_ends.append(seconds)

    monkeypatch.setattr(faulthandler, "dump_traceback_later", dump_later)
    return now


def end_by(error):
    sys.excepthook(type(error), error, None)


def test_an_interrupt_that_nothing_catches_ends_the_process_by_the_time_it_was_noted(clock):
    interrupt.note_interrupt()
    clock.seconds += 2.0  # to end the ranks
    end_by(KeyboardInterrupt())
    (timer,) = Timer.made
    assert timer.is_started and timer.daemon
    assert timer.seconds == pytest.approx(interrupt.END_SECONDS - 2.0)
    assert clock.hard_ends == [pytest.approx(interrupt.HARD_END_SECONDS - 2.0)]
    assert clock.uncaught == [KeyboardInterrupt]  # it is shown first


def test_one_that_the_program_catches_ends_nothing(clock):
    interrupt.note_interrupt()
    assert not Timer.made and not clock.hard_ends
    end_by(ValueError())  # later, and for another reason
    assert not Timer.made and clock.uncaught == [ValueError]


def test_several_are_one_hook_and_the_last_counts(clock):
    for _ in range(3):
        interrupt.note_interrupt()
        clock.seconds += 10.0
    end_by(KeyboardInterrupt())
    assert clock.uncaught == [KeyboardInterrupt] and len(Timer.made) == 1
    assert Timer.made[0].seconds == 0.5  # late, but with time to flush


def test_a_hook_that_the_program_sets_meanwhile_is_kept(clock, monkeypatch):
    interrupt.note_interrupt()
    ours, seen = sys.excepthook, []

    def programs(kind, error, trace):
        seen.append(kind)
        ours(kind, error, trace)

    monkeypatch.setattr(sys, "excepthook", programs)
    end_by(KeyboardInterrupt())
    assert seen == [KeyboardInterrupt] and len(Timer.made) == 1


def test_without_a_note_the_time_begins_with_the_end(clock):
    interrupt.exit_in_time()
    assert Timer.made[0].seconds == interrupt.END_SECONDS
    assert clock.hard_ends == [pytest.approx(interrupt.HARD_END_SECONDS)]


def test_long_after_the_note_the_process_still_has_a_moment(clock):
    interrupt.note_interrupt()
    clock.seconds += 1000.0
    interrupt.exit_in_time()
    assert Timer.made[0].seconds == 0.5 and clock.hard_ends == [1.0]


def test_the_timer_flushes_the_output_and_exits_with_the_status_of_a_shell(clock, monkeypatch):
    done = []

    class Stream:
        def __init__(self, name):
            self.name = name

        def flush(self):
            done.append(self.name)
            raise ValueError("it is closed")

    monkeypatch.setattr(os, "_exit", done.append)
    monkeypatch.setattr(sys, "stdout", Stream("out"))
    monkeypatch.setattr(sys, "stderr", Stream("err"))
    interrupt.exit_in_time()
    Timer.made[0].function()
    assert done == ["out", "err", 130]
