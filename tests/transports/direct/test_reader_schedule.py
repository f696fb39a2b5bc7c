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


def add_callback(schedule, urgent):
    """Do what ``ConnectionCall.on_done`` does."""
    schedule.callbacks += 1
    return schedule.due_start(urgent)


def test_no_thread_reads_while_connecting():
    schedule = ReaderSchedule()
    assert not schedule.claim(CALLER_READS) and add_callback(schedule, True) is NOTHING
    assert schedule.release() is START_THREAD and schedule.state == THREAD_READS


def test_the_first_caller_reads_and_the_others_follow_in_order(schedule):
    assert schedule.claim(CALLER_READS, "first")
    for caller in ("a", "b"):
        assert not schedule.claim(CALLER_READS, caller)
        schedule.add_caller(caller)
    assert [schedule.release("first"), schedule.state] == ["a", CALLER_READS]
    assert [schedule.release("a"), schedule.state] == ["b", CALLER_READS]
    assert schedule.release("b") is NOTHING and schedule.state == IDLE


def test_who_does_not_read_releases_nothing(schedule):
    assert schedule.claim(CALLER_READS, "first")
    schedule.add_caller("a")
    assert schedule.release("a") is NOTHING and schedule.release() is NOTHING
    assert schedule.release("first") == "a" and schedule.reader == "a"
    assert schedule.release("first") is NOTHING and schedule.reader == "a"


def test_a_thread_begins_once_however_often_it_is_started(schedule):
    assert add_callback(schedule, True) is START_THREAD
    first = schedule.start
    assert first and schedule.begin(first) and not schedule.begin(first)
    assert schedule.release() is START_THREAD and schedule.start not in (0, first)
    assert not schedule.begin(first) and schedule.begin(schedule.start)


def test_a_start_that_was_not_made_is_due_still(schedule):
    schedule.callbacks += 1  # an interrupt came before its start
    assert schedule.due_start(urgent=True) is START_THREAD


def test_a_caller_that_waits_no_longer_is_not_chosen(schedule):
    assert schedule.claim(CALLER_READS, "first")
    schedule.add_caller("a")
    schedule.remove_caller("a")
    schedule.remove_caller("a")
    assert schedule.release("first") is NOTHING


def test_waiting_callers_come_before_callbacks(schedule):
    assert add_callback(schedule, True) is START_THREAD
    assert add_callback(schedule, True) is NOTHING
    schedule.add_caller("a")
    assert schedule.release() == "a"
    assert schedule.release("a") is START_THREAD
    schedule.callbacks -= 1
    schedule.callbacks -= 1
    assert schedule.release() is NOTHING


def test_callbacks_that_are_not_urgent_share_a_delayed_start(schedule):
    assert add_callback(schedule, False) is START_DELAYED and schedule.state == IDLE
    assert add_callback(schedule, False) is NOTHING
    assert schedule.end_delay() and schedule.state == THREAD_READS


def test_a_delayed_start_does_nothing_while_others_read_or_when_they_have(schedule):
    assert add_callback(schedule, False) is START_DELAYED
    assert schedule.claim(CALLER_READS, "first")
    assert not schedule.end_delay()
    assert schedule.release("first") is START_THREAD
    schedule.callbacks -= 1
    assert schedule.release() is NOTHING
    assert add_callback(schedule, False) is START_DELAYED
    schedule.callbacks -= 1
    assert not schedule.end_delay() and schedule.state == IDLE


def test_nothing_starts_on_a_broken_connection(schedule):
    add_callback(schedule, False)
    assert schedule.break_off() and not schedule.break_off()
    schedule.add_caller("a")
    assert not schedule.claim(CALLER_READS) and add_callback(schedule, True) is NOTHING
    assert schedule.release() is NOTHING and not schedule.end_delay()
    assert schedule.state == BROKEN
