"""Turns at reading a connection: who is relieved when, and which functions are trusted."""

import threading
import time

import pytest

from rayrpc._concurrency.reader import (
    LEAST,
    MOST,
    MOST_HABITS,
    QUICK_SECONDS,
    SHORT_SECONDS,
    Habits,
    Turn,
    Watch,
    afterwards,
    called_by_name,
    has_turn,
    step_aside,
)


@pytest.fixture
def watch():
    watch = Watch()
    yield watch
    watch.close()


class Relieved:
    """Counts how often it was called, and waits for that."""

    def __init__(self):
        self.event = threading.Event()
        self.count = 0

    def __call__(self):
        self.count += 1
        self.event.set()


def test_a_thread_that_is_done_in_time_keeps_its_turn(watch):
    relieved = Relieved()
    with Turn(relieved, watch) as turn:
        for _ in range(100):
            turn.begin()
            assert has_turn()
            assert turn.ready()
    assert relieved.count == 0 and not has_turn()


def test_what_can_wait_is_done_when_the_message_was_dealt_with(watch):
    done = []
    with Turn(lambda: None, watch) as turn:
        turn.begin()
        afterwards(lambda: done.append("first"))
        afterwards(lambda: done.append("second"))
        assert done == []
        assert turn.ready() and sorted(done) == ["first", "second"]
        turn.begin()
        assert turn.ready() and len(done) == 2


def test_what_can_wait_does_not_where_the_thread_takes_long(watch):
    """Else what a function does again and again would pile up until it ends."""
    done = []
    afterwards(lambda: done.append("no message is dealt with"))
    with Turn(lambda: None, watch) as turn:
        turn.begin()
        step_aside()
        afterwards(lambda: done.append("it has stepped aside"))
        assert len(done) == 2
        turn.ready()


def test_a_thread_that_is_busy_for_long_is_relieved_once(watch):
    relieved = Relieved()
    with Turn(relieved, watch) as turn:
        turn.begin()
        assert relieved.event.wait(5)
        time.sleep(0.05)
        assert not has_turn()
        assert not turn.ready()
    assert relieved.count == 1


def test_a_thread_that_waits_for_a_message_is_not_relieved(watch):
    relieved = Relieved()
    with Turn(relieved, watch) as turn:
        turn.begin()
        assert turn.ready()
        time.sleep(0.1)
        assert not turn.over
        turn.begin()
        assert turn.ready()
    assert relieved.count == 0


def test_the_watch_wakes_again_after_a_quiet_time(watch):
    relieved = Relieved()
    with Turn(relieved, watch) as turn:
        turn.begin()
        assert turn.ready()
        end = time.monotonic() + 5
        while not watch.sleeps and time.monotonic() < end:
            time.sleep(0.01)
        assert watch.sleeps
        turn.begin()
        assert relieved.event.wait(5)


def test_whoever_steps_aside_is_relieved_at_once_and_only_in_its_own_thread(watch):
    relieved = Relieved()
    with Turn(relieved, watch) as turn:
        turn.begin()
        other = threading.Thread(target=step_aside)
        other.start()
        other.join()
        assert relieved.count == 0
        step_aside()
        step_aside()
        assert relieved.count == 1 and turn.over
    step_aside()
    assert relieved.count == 1


def test_who_knows_that_nobody_else_sends_stays_for_what_is_short(watch):
    relieved = Relieved()
    with Turn(relieved, watch) as turn:
        turn.alone = True
        turn.begin()
        step_aside(briefly=True)
        assert turn.stayed and not turn.over
        assert turn.ready()
        turn.begin()
        assert not turn.stayed
        turn.alone = False
        step_aside(briefly=True)
        assert turn.over and not turn.stayed
    assert relieved.count == 1


def quick(habits, func, times, args=()):
    for _ in range(times):
        habits.note(Habits.key(func, args), 0.0, alone=True)


def test_functions_are_trusted_after_some_quick_runs():
    habits = Habits()
    assert not habits.is_quick(Habits.key(print, ()))
    quick(habits, print, 3)
    assert habits.is_quick(Habits.key(print, ()))
    assert not habits.is_quick(Habits.key(len, ()))


def test_one_slow_run_is_made_up_for_many_are_not():
    habits, key = Habits(), Habits.key(print, ())
    quick(habits, print, 2 * MOST)
    habits.note(key, 2 * QUICK_SECONDS, alone=True)
    assert habits.is_quick(key)
    for _ in range(10):
        habits.note(key, 2 * QUICK_SECONDS, alone=True)
    assert not habits.is_quick(key)
    quick(habits, print, 3 - LEAST)
    assert habits.is_quick(key)


def test_what_counts_as_long_can_be_set():
    habits, key = Habits(SHORT_SECONDS), Habits.key(print, ())
    for _ in range(3):
        habits.note(key, 2 * QUICK_SECONDS, alone=True)
    assert habits.is_quick(key)
    habits.note(key, 2 * SHORT_SECONDS, alone=True)
    assert not habits.is_quick(key)


def test_slow_runs_among_others_say_nothing():
    habits, key = Habits(), Habits.key(print, ())
    quick(habits, print, 3)
    for _ in range(100):
        habits.note(key, 1.0, alone=False)
    assert habits.is_quick(key)


def test_methods_are_known_by_their_function_and_by_name_where_a_name_says_what_runs():
    class Thing:
        def method(self):
            pass

    @called_by_name
    def invoke(target, name):
        pass

    assert Habits.key(Thing().method, ()) == Habits.key(Thing().method, ())
    assert Habits.key(invoke, (1, "a")) == Habits.key(invoke, (2, "a"))
    assert Habits.key(invoke, (1, "a")) != Habits.key(invoke, (1, "b"))


def test_habits_do_not_grow_for_ever():
    habits = Habits()
    for number in range(3 * MOST_HABITS):
        habits.note(number, 0.0, alone=True)
    assert len(habits._scores) <= MOST_HABITS
