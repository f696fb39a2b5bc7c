"""The wait for Python's lock at the beginning of each call, as torch counts it."""

import pytest
from memory_workers import memory_group

from rayrpc._runtime import gil_waits
from rayrpc._runtime.gil_waits import GilWaits


class Time:
    """A clock, and a sleep that gives the lock up for so many seconds.

    Args:
        waits: of each sleep, in seconds.
    """

    def __init__(self, waits):
        self.now = 100.0
        self.waits = iter(waits)

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        assert seconds == 0
        self.now += next(self.waits)


@pytest.fixture
def waits(monkeypatch):
    """Return what makes the time with these waits that of the module."""

    def make(*seconds):
        made = Time(seconds)
        monkeypatch.setattr(gil_waits, "time", made)
        return made

    return make


def test_without_a_call_it_is_zero():
    assert GilWaits().average_us == 0


def test_it_is_the_average_of_all_calls_in_microseconds(waits):
    measuring = GilWaits()
    waits(0.001, 0.0, 0.005)
    for _ in range(3):
        with measuring.measured(None):
            pass
    assert measuring.average_us == pytest.approx(2000)


def test_it_is_measured_before_the_function_runs_and_without_its_time(waits):
    measuring = GilWaits()
    time = waits(0.001)
    with measuring.measured(None):
        assert measuring.average_us == pytest.approx(1000)
        time.now += 50
    assert measuring.average_us == pytest.approx(1000)


def test_a_call_that_fails_counts_and_raises(waits):
    measuring = GilWaits()
    waits(0.001)
    with pytest.raises(KeyError):
        with measuring.measured(None):
            raise KeyError
    assert measuring.average_us == pytest.approx(1000)


def test_it_is_around_all_functions_of_a_callee(waits):
    measuring = GilWaits()
    waits(0.001, 0.003)
    with memory_group() as start:
        a, b = start("a"), start("b")
        b.agent.callee.around.append(measuring.measured)
        for number in (-1, 2):
            assert a.sync(b, abs, number) == abs(number)
    assert measuring.average_us == pytest.approx(2000)
