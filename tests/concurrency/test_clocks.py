"""How another host's clock differs from this one's, as its answers tell."""

import math
import os

import pytest

from rayrpc._concurrency import clocks
from rayrpc._concurrency.clocks import Clock, clock, measure


class Hosts:
    """Two hosts, and the ways between them.

    Args:
        ahead: by how many seconds the other clock is.
        ways: how long each question, and each answer, takes in seconds.
    """

    def __init__(self, ahead, ways):
        self.now = 1000.0
        self.ahead = ahead
        self.ways = iter(ways)

    def monotonic(self):
        return self.now

    def ask(self):
        there, back = next(self.ways)
        self.now += there
        answer = "there", self.now + self.ahead
        self.now += back
        return answer


@pytest.fixture
def hosts(monkeypatch):
    """Return what makes two hosts, with the time of this one."""

    def make(ahead, ways):
        made = Hosts(ahead, ways)
        monkeypatch.setattr(clocks, "time", made)
        return made

    return make


@pytest.mark.parametrize("ahead", [5000.0, 0.0, -12.5])
def test_ways_of_equal_length_tell_the_offset_exactly(hosts, ahead):
    found = measure(hosts(ahead, [(0.25, 0.25)] * clocks.ASKS).ask)
    assert found == (ahead, 0.25)


def test_the_quickest_answer_counts(hosts):
    ways = [(4.0, 1.0), (0.125, 0.125), (0.0, 3.0)] * 3
    assert measure(hosts(100.0, ways).ask) == (100.0, 0.125)


@pytest.mark.parametrize("way", [(1.0, 0.0), (0.0, 1.0), (0.75, 0.25)])
def test_the_error_is_never_above_what_is_told(hosts, way):
    found = measure(hosts(100.0, [way] * clocks.ASKS).ask)
    assert abs(found.offset - 100.0) <= found.error == 0.5


def test_it_asks_some_times_and_no_more(hosts):
    made = hosts(100.0, [(0.5, 0.5)] * clocks.ASKS)
    measure(made.ask)
    assert next(made.ways, None) is None


def test_the_same_clock_needs_one_question_and_has_no_error():
    asked = []

    def ask():
        asked.append(1)
        return clock()

    assert measure(ask) == Clock(0.0, 0.0) and len(asked) == 1


def test_a_clock_has_one_identity_and_goes_on():
    (first, earlier), (second, later) = clock(), clock()
    assert first == second and first and math.isfinite(earlier) and earlier <= later


def test_without_linux_each_process_has_a_clock_of_its_own(monkeypatch):
    def refuse(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(clocks, "open", refuse, raising=False)
    mine, _ = clock()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    other, _ = clock()
    assert mine != other and mine.rpartition("-")[0] == other.rpartition("--")[0]
