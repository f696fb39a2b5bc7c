"""Results of a pool's calls, completed by hand."""

import multiprocessing
import threading
import time
from typing import Any

import pytest
from interrupting import strikes

from rayrpc._concurrency import waiting
from rayrpc.parallel.pool import (
    AsyncResult,
    IMapIterator,
    IMapUnorderedIterator,
    MapResult,
    results,
)


def test_get_waits_for_the_result():
    cache = {}
    result = AsyncResult(7, cache)
    assert cache == {7: result} and not result.ready()
    with pytest.raises(multiprocessing.TimeoutError, match=r"0\.01 s"):
        result.get(0.01)
    with pytest.raises(ValueError, match="has not ended"):
        result.successful()
    threading.Timer(0.05, result.set_outcome, (0, (True, 5))).start()
    assert result.get(60) == 5 and result.successful() and cache == {}


def test_the_first_outcome_counts():
    seen = []
    result = AsyncResult(0, {}, seen.append, seen.append)
    result.set_outcome(0, (True, 1))
    result.fail(RuntimeError("terminated"))
    assert result.get() == 1 and seen == [1]


def test_callbacks_run_before_the_result_is_ready():
    seen: list[Any] = []
    result = AsyncResult(0, {}, lambda value: seen.append((value, result.ready())), seen.append)
    result.set_outcome(0, (True, 1))
    assert seen == [(1, False)] and result.ready()
    error = KeyError("x")
    failed = AsyncResult(1, {}, seen.append, seen.append)
    failed.set_outcome(0, (False, error))
    assert seen[1:] == [error] and not failed.successful()
    with pytest.raises(KeyError):
        failed.get()


def test_an_error_of_a_callback_is_logged_and_the_result_stays(caplog):
    result = AsyncResult(0, {}, lambda value: 1 / 0)
    result.set_outcome(0, (True, 1))
    assert result.get(60) == 1 and "ZeroDivisionError" in caplog.text


def test_a_map_joins_chunks_in_any_order():
    cache = {}
    result = MapResult(0, cache, 2, 5)
    for index, value in ((2, [4]), (0, [0, 1]), (1, [2, 3])):
        assert not result.ready()
        result.set_outcome(index, (True, value))
    assert result.get(60) == [0, 1, 2, 3, 4] and cache == {}
    assert MapResult(1, cache, 2, 0).get(0) == [] and cache == {}


def test_a_map_waits_for_all_and_raises_the_first_error():
    result = MapResult(0, {}, 1, 3)
    result.set_outcome(1, (False, ValueError("first")))
    result.set_outcome(0, (False, ValueError("second")))
    assert not result.ready()
    result.set_outcome(2, (True, [1]))
    with pytest.raises(ValueError, match="first"):
        result.get(60)


def test_an_iterator_keeps_the_order():
    cache = {}
    results = IMapIterator(0, cache, 3)
    results.set_outcome(2, (True, "c"))
    with pytest.raises(multiprocessing.TimeoutError):
        results.next(0.01)
    results.set_outcome(0, (True, "a"))
    assert results.next(1) == "a"
    results.set_outcome(1, (False, KeyError("b")))
    with pytest.raises(KeyError):
        next(results)
    assert list(results) == ["c"] and cache == {}
    with pytest.raises(StopIteration):
        results.next(timeout=0)


def test_an_unordered_iterator_returns_results_as_they_come():
    results = IMapUnorderedIterator(0, {}, None)
    results.set_outcome(1, (True, "b"))
    results.set_outcome(0, (True, "a"))
    assert next(results) == "b"
    results.set_length(2)
    assert list(results) == ["a"]


def test_a_failed_iterator_returns_the_results_that_came_first():
    results = IMapIterator(0, {}, 3)
    results.set_outcome(0, (True, "a"))
    results.fail(RuntimeError("no more"))
    assert next(results) == "a"
    with pytest.raises(RuntimeError, match="no more"):
        next(results)


@pytest.mark.parametrize("iterator", [IMapIterator, IMapUnorderedIterator])
def test_an_interrupt_of_a_wait_repeats_no_result_and_loses_at_most_its_own(iterator):
    for strike in strikes([results.__file__, waiting.__file__]):
        iterate = iterator(0, {}, 3)
        seen: list[Any] = []
        iterate.set_outcome(0, (True, 0))
        is_over = threading.Event()

        def answer(iterate=iterate, is_over=is_over):
            while not (iterate._changed._waiters or is_over.is_set()):
                time.sleep(0.0002)
            iterate.set_outcome(1, (True, 1))

        thread = threading.Thread(target=answer)
        thread.start()

        def take(iterate=iterate, seen=seen):
            for _ in range(2):
                seen.append(iterate.next(60))

        strike(take)
        is_over.set()
        thread.join()
        iterate.set_outcome(2, (True, 2))
        seen += iterate
        assert seen == sorted(set(seen)) and len(seen) >= 2 and seen[-1] == 2
    assert strike.number > 20
