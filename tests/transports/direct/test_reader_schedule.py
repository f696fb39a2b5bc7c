"""Which thread reads the caller's end of a connection: the decisions alone, without threads."""

import pytest

from rayrpc._transports.direct.reader_schedule import (
    BROKEN,
    CALLER_READS,
    CONNECTING,
    IDLE,
    NOTHING,
    START_DELAYED,
    START_THREAD,
    THREAD_READS,
    ReaderSchedule,
)


@pytest.fixture
def schedule():
    """A schedule whose connection is made."""
    schedule = ReaderSchedule()
    assert schedule.state == CONNECTING and schedule.release() is NOTHING
    return schedule


def test_no_thread_reads_while_connecting():
    schedule = ReaderSchedule()
    assert not schedule.claim(CALLER_READS) and schedule.add_callback(True) is NOTHING
    assert schedule.release() is START_THREAD and schedule.state == THREAD_READS


def test_the_first_caller_reads_and_the_others_follow_in_order(schedule):
    assert schedule.claim(CALLER_READS)
    for caller in "ab":
        assert not schedule.claim(CALLER_READS)
        schedule.add_caller(caller)
    assert [schedule.release(), schedule.state] == ["a", CALLER_READS]
    assert [schedule.release(), schedule.state] == ["b", CALLER_READS]
    assert schedule.release() is NOTHING and schedule.state == IDLE


def test_a_caller_that_waits_no_longer_is_not_chosen(schedule):
    assert schedule.claim(CALLER_READS)
    schedule.add_caller("a")
    schedule.remove_caller("a")
    schedule.remove_caller("a")
    assert schedule.release() is NOTHING


def test_waiting_callers_come_before_callbacks(schedule):
    assert schedule.add_callback(True) is START_THREAD
    assert schedule.add_callback(True) is NOTHING
    schedule.add_caller("a")
    assert schedule.release() == "a"
    assert schedule.release() is START_THREAD
    schedule.remove_callback()
    schedule.remove_callback()
    assert schedule.release() is NOTHING


def test_callbacks_that_are_not_urgent_share_a_delayed_start(schedule):
    assert schedule.add_callback(False) is START_DELAYED and schedule.state == IDLE
    assert schedule.add_callback(False) is NOTHING
    assert schedule.end_delay() and schedule.state == THREAD_READS


def test_a_delayed_start_does_nothing_while_others_read_or_when_they_have(schedule):
    assert schedule.add_callback(False) is START_DELAYED
    assert schedule.claim(CALLER_READS)
    assert not schedule.end_delay()
    assert schedule.release() is START_THREAD
    schedule.remove_callback()
    assert schedule.release() is NOTHING
    assert schedule.add_callback(False) is START_DELAYED
    schedule.remove_callback()
    assert not schedule.end_delay() and schedule.state == IDLE


def test_nothing_starts_on_a_broken_connection(schedule):
    schedule.add_callback(False)
    assert schedule.break_off() and not schedule.break_off()
    schedule.add_caller("a")
    assert not schedule.claim(CALLER_READS) and schedule.add_callback(True) is NOTHING
    assert schedule.release() is NOTHING and not schedule.end_delay()
    assert schedule.state == BROKEN
