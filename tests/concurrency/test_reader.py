"""Hand-over of a connection's reader: when another thread reads on."""

import contextlib
import queue
import threading
import time

import pytest
from simulation.scheduler import current
from simulation.separately import in_virtual_time

from rayrpc._concurrency.reader import (
    MAINTENANCE_SECONDS,
    READING,
    RELEASED,
    TICK_SECONDS,
    ReaderRole,
    ReaderWatchdog,
    after_reply,
    is_reader,
    release_reader,
)

LONG = 60.0


@contextlib.contextmanager
def handling():
    """Have this thread handle messages; yield the role, the hand-over and the watchdog."""
    hand_over, watchdog = HandOver(), ReaderWatchdog()
    with ReaderRole(hand_over, watchdog) as role:
        yield role, hand_over, watchdog
    watchdog.close()


@pytest.fixture
def asleep():
    """A watchdog that never wakes: a slow machine must not release a reader in a test."""

    class Asleep(ReaderWatchdog):
        def wake(self):
            pass

    return Asleep()


class HandOver:
    """Counts how often it was called, and waits for that."""

    def __init__(self):
        self.event = threading.Event()
        self.count = 0

    def __call__(self):
        self.count += 1
        self.event.set()


def test_a_thread_that_handles_messages_in_time_stays_the_reader(asleep):
    hand_over = HandOver()
    with ReaderRole(hand_over, asleep) as role:
        for _ in range(100):
            role.message_received()
            assert is_reader()
            assert role.message_done()
    assert hand_over.count == 0 and not is_reader()


def test_tasks_run_after_the_reply(asleep):
    done = []
    with ReaderRole(lambda: None, asleep) as role:
        role.message_received()
        after_reply(lambda: done.append("first"))
        after_reply(lambda: done.append("second"))
        assert done == []
        assert role.message_done() and sorted(done) == ["first", "second"]
        role.message_received()
        assert role.message_done() and len(done) == 2


def test_tasks_of_a_released_thread_run_at_once(asleep):
    """Else the tasks of a long handler would pile up until it ends."""
    done = []
    after_reply(lambda: done.append("no message is handled"))
    with ReaderRole(lambda: None, asleep) as role:
        role.message_received()
        release_reader()
        after_reply(lambda: done.append("it was released"))
        assert len(done) == 2
        role.message_done()


@in_virtual_time()
def test_a_thread_that_stays_in_a_handler_is_released_once():
    with handling() as (role, hand_over, _):
        role.message_received()
        assert hand_over.event.wait(LONG)
        time.sleep(LONG)
        assert not is_reader()
        assert not role.message_done()
        assert hand_over.count == 1


@in_virtual_time()
def test_a_thread_that_waits_for_a_message_is_not_released():
    with handling() as (role, hand_over, watchdog):
        watchdog.wake()
        time.sleep(LONG)  # many ticks
        assert watchdog.is_asleep
        assert role.state == READING
        assert hand_over.count == 0


@in_virtual_time()
def test_the_watchdog_wakes_after_a_quiet_time():
    with handling() as (role, hand_over, watchdog):
        watchdog.wake()
        assert current().step("waits", lambda: watchdog.is_asleep, LONG)
        role.message_received()
        assert hand_over.event.wait(LONG)


def test_release_reader_releases_only_the_role_of_its_own_thread_and_once(asleep):
    hand_over = HandOver()
    with ReaderRole(hand_over, asleep) as role:
        role.message_received()
        other = threading.Thread(target=release_reader)
        other.start()
        other.join()
        assert hand_over.count == 0
        release_reader()
        release_reader()
        assert hand_over.count == 1 and role.state == RELEASED
    release_reader()
    assert hand_over.count == 1


def test_a_brief_release_keeps_the_role_if_messages_come_one_at_a_time(asleep):
    hand_over = HandOver()
    with ReaderRole(hand_over, asleep) as role:
        role.one_at_a_time = True
        role.message_received()
        release_reader(briefly=True)
        assert role.kept and role.state != RELEASED
        assert role.message_done()
        role.message_received()
        assert not role.kept
        role.one_at_a_time = False
        release_reader(briefly=True)
        assert role.state == RELEASED and not role.kept
    assert hand_over.count == 1


def test_a_watchdog_that_could_not_start_starts_with_the_next_message(unstartable, caplog):
    unstartable.add("rayrpc-watch")
    watchdog, hand_over = ReaderWatchdog(), HandOver()
    with ReaderRole(hand_over, watchdog) as role:
        role.message_received()
        assert watchdog.is_asleep and "can't start new thread" in caplog.text
        assert role.message_done()
        unstartable.clear()
        role.message_received()
        assert hand_over.event.wait(60)  # it stays in the handler
    watchdog.close()


class Ticks:
    """A clock and a sleep: the watchdog's thread goes on when the test says so, tick by tick."""

    def __init__(self):
        self.now = 0.0
        self._begun = queue.SimpleQueue()
        self._slept = queue.SimpleQueue()

    def sleep(self, seconds):
        self._slept.put(seconds)
        self._begun.get()
        self.now += seconds

    def wait(self):
        """Wait until the watchdog has done what it does at a tick."""
        assert self._slept.get(timeout=LONG) == TICK_SECONDS

    def pass_one(self):
        self._begun.put(None)
        self.wait()

    def end(self):
        """Let the watchdog run; close it before."""
        for _ in range(1000):
            self._begun.put(None)


@pytest.fixture
def ticks():
    made = Ticks()
    yield made
    made.end()


def watched_by(ticks, maintenance=lambda: None):
    return ReaderWatchdog(maintenance, lambda: ticks.now, ticks.sleep)


def test_a_reader_is_released_at_the_second_tick_in_one_handler(ticks):
    hand_over, watchdog = HandOver(), watched_by(ticks)
    with contextlib.closing(watchdog), ReaderRole(hand_over, watchdog) as role:
        role.message_received()
        ticks.wait()
        ticks.pass_one()
        assert hand_over.count == 0 and role.state != RELEASED
        ticks.pass_one()
        assert hand_over.count == 1 and role.state == RELEASED


def test_one_that_goes_on_to_other_messages_is_not(ticks):
    hand_over, watchdog = HandOver(), watched_by(ticks)
    with contextlib.closing(watchdog), ReaderRole(hand_over, watchdog) as role:
        role.message_received()
        ticks.wait()
        for _ in range(10):
            ticks.pass_one()
            assert role.message_done()
            role.message_received()
        assert hand_over.count == 0


def test_maintenance_comes_when_it_is_due(ticks):
    done = []
    watchdog = watched_by(ticks, lambda: done.append(ticks.now))
    with contextlib.closing(watchdog), ReaderRole(HandOver(), watchdog) as role:
        role.message_received()
        ticks.wait()
        ticks.pass_one()
        assert done == []
        ticks.now = MAINTENANCE_SECONDS
        ticks.pass_one()
        assert done == [ticks.now]
        ticks.pass_one()
        assert len(done) == 1


def test_an_error_of_maintenance_or_of_a_hand_over_does_not_end_the_watchdog(monkeypatch, caplog):
    monkeypatch.setattr("rayrpc._concurrency.reader.MAINTENANCE_SECONDS", 0.0)
    failed = threading.Event()

    def fail():
        failed.set()
        raise RuntimeError("can't start new thread")

    watchdog, hand_over = ReaderWatchdog(fail), HandOver()
    with ReaderRole(fail, watchdog) as role:
        role.message_received()
        assert failed.wait(60)
        with ReaderRole(hand_over, watchdog) as other:
            other.message_received()
            assert hand_over.event.wait(60)
    watchdog.close()
    assert "error in the maintenance of connections" in caplog.text
