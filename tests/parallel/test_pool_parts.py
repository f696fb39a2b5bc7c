"""The parts of pools that need no workers: results, and who does which task."""

import multiprocessing
import threading
import time

import pytest

from rayrpc.parallel.pool import AsyncResult, IMapIterator, IMapUnorderedIterator, MapResult
from rayrpc.parallel.pool.scheduler import LATE_SECONDS, Scheduler

# -- results --------------------------------------------------------------------------------------


def test_a_result_is_waited_for():
    cache = {}
    result = AsyncResult(7, cache)
    assert cache == {7: result} and not result.ready()
    with pytest.raises(multiprocessing.TimeoutError, match=r"0\.01 s"):
        result.get(0.01)
    with pytest.raises(ValueError, match="has not ended"):
        result.successful()
    threading.Timer(0.05, result._set, (0, (True, 5))).start()
    assert result.get(5) == 5 and result.successful() and cache == {}


def test_a_result_ends_once():
    seen = []
    result = AsyncResult(0, {}, seen.append, seen.append)
    result._set(0, (True, 1))
    result._fail(RuntimeError("terminated"))
    assert result.get() == 1 and seen == [1]


def test_callbacks_come_before_the_result_is_ready():
    seen = []
    result = AsyncResult(0, {}, lambda value: seen.append((value, result.ready())), seen.append)
    result._set(0, (True, 1))
    assert seen == [(1, False)] and result.ready()
    error = KeyError("x")
    failed = AsyncResult(1, {}, seen.append, seen.append)
    failed._set(0, (False, error))
    assert seen[1:] == [error] and not failed.successful()
    with pytest.raises(KeyError):
        failed.get()


def test_a_callback_that_fails_is_told_and_harms_nobody(caplog):
    result = AsyncResult(0, {}, lambda value: 1 / 0)
    result._set(0, (True, 1))
    assert result.get(1) == 1 and "ZeroDivisionError" in caplog.text


def test_a_map_joins_chunks_in_any_order():
    cache = {}
    result = MapResult(0, cache, 2, 5)
    for index, value in ((2, [4]), (0, [0, 1]), (1, [2, 3])):
        assert not result.ready()
        result._set(index, (True, value))
    assert result.get(1) == [0, 1, 2, 3, 4] and cache == {}
    assert MapResult(1, cache, 2, 0).get(0) == [] and cache == {}


def test_a_map_waits_for_all_and_raises_the_first_error():
    result = MapResult(0, {}, 1, 3)
    result._set(1, (False, ValueError("first")))
    result._set(0, (False, ValueError("second")))
    assert not result.ready()
    result._set(2, (True, [1]))
    with pytest.raises(ValueError, match="first"):
        result.get(1)


def test_an_iterator_keeps_the_order():
    cache = {}
    results = IMapIterator(0, cache, 3)
    results._set(2, (True, "c"))
    with pytest.raises(multiprocessing.TimeoutError):
        results.next(0.01)
    results._set(0, (True, "a"))
    assert results.next(1) == "a"
    results._set(1, (False, KeyError("b")))
    with pytest.raises(KeyError):
        next(results)
    assert list(results) == ["c"] and cache == {}
    with pytest.raises(StopIteration):
        results.next(timeout=0)


def test_an_unordered_iterator_does_not():
    results = IMapUnorderedIterator(0, {}, None)
    results._set(1, (True, "b"))
    results._set(0, (True, "a"))
    assert next(results) == "b"
    results._set_length(2)
    assert list(results) == ["a"]


def test_an_iterator_that_fails_first_gives_what_came():
    results = IMapIterator(0, {}, 3)
    results._set(0, (True, "a"))
    results._fail(RuntimeError("no more"))
    assert next(results) == "a"
    with pytest.raises(RuntimeError, match="no more"):
        next(results)


# -- the scheduler -----------------------------------------------------------------------------


def task(index):
    return (0, index, max, (index, 0), {})


def results_of(tasks):
    return [(job, index, (True, index)) for job, index, *_ in tasks]


@pytest.fixture
def done():
    return []


@pytest.fixture
def scheduler(done):
    scheduler = Scheduler(done.append)
    scheduler.add("a", None)
    scheduler.add("b", None)
    return scheduler


def test_who_asks_gets_the_next_task(scheduler, done):
    asked = scheduler.take("a", [])
    assert not asked.done()
    scheduler.put(task(0))
    assert asked.value() == [task(0)]
    scheduler.put(task(1))
    scheduler.put(task(2))
    assert scheduler.take("b", []).value() == [task(1)]
    assert scheduler.take("a", results_of([task(0)])).value() == [task(2)]
    assert done == results_of([task(0)])


def test_a_result_counts_once(scheduler, done):
    scheduler.put(task(0))
    scheduler.take("a", [])
    scheduler.report("a", results_of([task(0)]))
    scheduler.take("a", results_of([task(0)]))
    assert done == results_of([task(0)])


def test_short_tasks_go_together_and_long_ones_alone(scheduler):
    for index in range(2000):
        scheduler.put(task(index))
    given = scheduler.take("a", []).value()
    assert len(given) == 1
    for _ in range(12):  # it answers at once, so its tasks are short
        given = scheduler.take("a", results_of(given)).value()
    assert len(given) > 20
    time.sleep(0.01 * len(given))
    assert len(scheduler.take("a", results_of(given)).value()) == 1


def test_a_worker_that_dies_fails_what_it_has(scheduler, done):
    scheduler.put(task(0))
    scheduler.put(task(1))
    scheduler.take("a", [])
    error = RuntimeError("it died")
    assert scheduler.remove("a", error)
    assert done == [(0, 0, (False, error))]
    assert scheduler.take("a", []).value() is None
    assert scheduler.take("b", []).value() == [task(1)]


def test_a_worker_that_never_asked_is_told_apart(scheduler):
    assert not scheduler.remove("a", RuntimeError())
    scheduler.take("b", [])
    assert scheduler.remove("b", RuntimeError())


def test_nobody_gets_more_than_it_has_room_for(done):
    scheduler = Scheduler(done.append)
    scheduler.add("a", 3)
    for index in range(1000):
        scheduler.put(task(index))
    given, total = scheduler.take("a", []).value(), 0
    for _ in range(2):
        total += len(given)
        given = scheduler.take("a", results_of(given)).value() if total < 3 else []
    assert total + len(given) == 3


def many_given(scheduler, count=400):
    for index in range(count):
        scheduler.put(task(index))
    given = scheduler.take("a", []).value()
    while len(given) < 5:
        given = scheduler.take("a", results_of(given)).value()
    return given


def test_what_a_slow_worker_has_not_begun_goes_to_others(scheduler, done):
    given = many_given(scheduler)
    rest = scheduler.take("b", []).value()
    while rest is not None and rest[-1][1] < 399:
        rest = scheduler.take("b", results_of(rest)).value()
    idle = scheduler.take("b", results_of(rest))
    assert not idle.done() and scheduler.late() == []
    time.sleep(1.2 * LATE_SECONDS)
    assert [each[::2] for each in scheduler.late()] == [("a", True)]
    scheduler.give_back("a", scheduler._workers["a"].turn, [each[:2] for each in given[2:]])
    assert idle.value() == [given[2]]
    before = len(done)
    scheduler.take("a", results_of(given[:2]))
    assert done[before:] == results_of(given[:2])


def test_what_is_given_back_late_is_not_lost(scheduler, done):
    scheduler._seconds = 1e-6
    for index in range(12):
        scheduler.put(task(index))
    given = scheduler.take("a", []).value()
    assert len(given) == 3
    others = scheduler.take("b", [])
    while others.done():
        others = scheduler.take("b", results_of(others.value()))
    time.sleep(1.2 * LATE_SECONDS)
    ((name, turn, is_wanted),) = scheduler.late()
    assert (name, is_wanted) == ("a", True)
    asked = scheduler.take("a", results_of(given[:1]))  # before what it gives back is here
    assert others.value() + asked.value() == given[1:]
    scheduler.give_back("a", turn, [each[:2] for each in given[1:]])  # of an earlier turn
    scheduler.report("b", results_of(given[1:2]))
    assert done[-1] == results_of(given[1:2])[0]


def test_a_slow_worker_is_asked_once_while_all_have_something_to_do(scheduler):
    many_given(scheduler)
    scheduler.take("b", [])
    time.sleep(1.2 * LATE_SECONDS)
    assert ("a", False) in [each[::2] for each in scheduler.late()]
    assert scheduler.late() == []


def test_what_was_given_but_never_came_is_given_again(scheduler, done):
    given = many_given(scheduler)
    again = scheduler.take("a", results_of(given[:1])).value()
    assert again[0] == given[1] and done[-1] == results_of(given[:1])[0]


def test_who_asks_twice_is_answered_once(scheduler):
    lost = scheduler.take("a", [])
    asked = scheduler.take("a", [])
    assert lost.value() is None
    scheduler.put(task(0))
    assert asked.value() == [task(0)]
    scheduler.put(task(1))
    assert scheduler.take("b", []).value() == [task(1)]


def test_at_the_end_there_is_nothing_more(scheduler):
    scheduler.put(task(0))
    waiting = scheduler.take("a", [])
    second = scheduler.take("b", [])
    scheduler.close()
    assert waiting.value() == [task(0)] and second.value() is None
    assert scheduler.take("a", results_of([task(0)])).value() is None


def test_dropped_tasks_go_to_nobody(scheduler):
    scheduler.put(task(0))
    scheduler.close(drop=True)
    assert scheduler.take("a", []).value() is None
