"""Handles that Python collects are reported, in whatever way that happens."""

import gc
import queue
import threading

import pytest

from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._runtime.rrefs.collected import CollectedHandles


class Handle:
    """Stands for the handle of a fork."""

    itself: object = None


@pytest.fixture
def reported():
    return queue.SimpleQueue()


@pytest.fixture
def handles(reported):
    return CollectedHandles(reported.put)


def fork(number):
    return GloballyUniqueId(0, number)


def taken(reported):
    found = []
    while not reported.empty():
        found.append(reported.get_nowait().fork_id)
    return found


def test_a_handle_is_reported_by_its_fork_once_it_is_collected(handles, reported):
    handle, other = Handle(), Handle()
    handles.watch(handle, fork(1))
    handles.watch(other, fork(2))
    assert len(handles) == 2 and reported.empty()
    del handle
    assert taken(reported) == [fork(1)]
    del other
    assert taken(reported) == [fork(2)]


def test_one_in_a_cycle_is_reported_when_that_is_collected(handles, reported):
    handle = Handle()
    handle.itself = handle
    handles.watch(handle, fork(1))
    del handle
    assert reported.empty()
    gc.collect()
    assert taken(reported) == [fork(1)]


def test_a_reference_stays_until_it_is_forgotten(handles, reported):
    handles.watch(Handle(), fork(1))
    ref = reported.get_nowait()
    assert ref() is None and len(handles) == 1
    handles.forget(ref)
    handles.forget(ref)
    assert len(handles) == 0


def test_two_handles_of_one_fork_are_reported_each(handles, reported):
    first, second = Handle(), Handle()
    handles.watch(first, fork(1))
    handles.watch(second, fork(1))
    del first, second
    assert taken(reported) == [fork(1), fork(1)] and len(handles) == 2


def test_handles_that_are_equal_are_told_apart(handles, reported):
    class Equal(Handle):
        def __eq__(self, other):
            return True

        def __hash__(self):
            return 1

    first, second = Equal(), Equal()
    handles.watch(first, fork(1))
    handles.watch(second, fork(2))
    del first
    handles.forget(reported.get_nowait())
    del second
    assert taken(reported) == [fork(2)]


def test_threads_that_drop_handles_lose_no_report(handles, reported, quick_switches):
    made = [[Handle() for _ in range(100)] for _ in range(4)]
    for thread_number, some in enumerate(made):
        for number, handle in enumerate(some):
            handles.watch(handle, fork(100 * thread_number + number))
    del handle, some
    threads = [threading.Thread(target=some.clear) for some in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(taken(reported)) == [fork(number) for number in range(400)]
