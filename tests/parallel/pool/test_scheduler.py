"""Which worker gets which task: no worker runs, and the clock stands until it is moved."""

import pytest

from rayrpc.parallel.pool.scheduler import BATCH_SECONDS, MAX_BATCH, OVERDUE_SECONDS, Scheduler


def task(index):
    return (0, index, max, (index, 0), {})


def results_of(tasks):
    return [(job, index, (True, index)) for job, index, *_ in tasks]


def keys_of(tasks):
    return [each[:2] for each in tasks]


class Clock:
    """A clock that is moved by hand, in seconds."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def done():
    return []


@pytest.fixture
def scheduler(done, clock):
    scheduler = Scheduler(done.append, clock=clock)
    scheduler.add_worker("a", None)
    scheduler.add_worker("b", None)
    return scheduler


def request_all(scheduler, name, tasks=()):
    """Request tasks until there are none at the moment; return the last request."""
    request = scheduler.request(name, results_of(tasks))
    while request.done():
        request = scheduler.request(name, results_of(request.value()))
    return request


def batch_of_several(scheduler, count=400):
    """Submit tasks, and have worker "a" run so many in no time that it is given several."""
    for index in range(count):
        scheduler.submit(task(index))
    given = scheduler.request("a", []).value()
    while len(given) < 5:
        given = scheduler.request("a", results_of(given)).value()
    return given


def test_a_request_is_answered_with_the_next_task(scheduler, done):
    request = scheduler.request("a", [])
    assert not request.done()
    scheduler.submit(task(0))
    assert request.value() == [task(0)]
    scheduler.submit(task(1))
    scheduler.submit(task(2))
    assert scheduler.request("b", []).value() == [task(1)]
    assert scheduler.request("a", results_of([task(0)])).value() == [task(2)]
    assert done == results_of([task(0)])


def test_a_result_counts_once(scheduler, done):
    scheduler.submit(task(0))
    scheduler.request("a", [])
    scheduler.report("a", results_of([task(0)]))
    scheduler.request("a", results_of([task(0)]))
    assert done == results_of([task(0)])


def test_short_tasks_are_given_together_and_long_ones_alone(scheduler, clock):
    for index in range(2000):
        scheduler.submit(task(index))
    given = scheduler.request("a", []).value()
    assert len(given) == 1
    for _ in range(12):
        given = scheduler.request("a", results_of(given)).value()
    assert 20 < len(given) <= MAX_BATCH
    clock.now += 2 * BATCH_SECONDS * len(given)
    assert len(scheduler.request("a", results_of(given)).value()) == 1


def test_the_tasks_of_a_worker_that_dies_fail(scheduler, done):
    scheduler.submit(task(0))
    scheduler.submit(task(1))
    scheduler.request("a", [])
    error = RuntimeError("it died")
    assert scheduler.remove_worker("a", error)
    assert done == [(0, 0, (False, error))]
    assert scheduler.request("a", []).value() is None
    assert scheduler.request("b", []).value() == [task(1)]


def test_a_removed_worker_gets_no_tasks(scheduler):
    request = scheduler.request("a", [])
    assert scheduler.remove_worker("a", RuntimeError())
    assert request.value() is None
    scheduler.submit(task(0))
    assert scheduler.request("b", []).value() == [task(0)]


def test_a_worker_that_never_requested_tasks_is_recognised(scheduler):
    assert not scheduler.remove_worker("a", RuntimeError())
    scheduler.request("b", [])
    assert scheduler.remove_worker("b", RuntimeError())


def test_a_worker_is_given_no_more_tasks_than_it_may_run(done, clock):
    scheduler = Scheduler(done.append, clock=clock)
    scheduler.add_worker("a", 3)
    for index in range(1000):
        scheduler.submit(task(index))
    given, total = scheduler.request("a", []).value(), 0
    for _ in range(2):
        total += len(given)
        given = scheduler.request("a", results_of(given)).value() if total < 3 else []
    assert total + len(given) == 3


def test_tasks_that_an_overdue_worker_has_not_begun_go_to_idle_workers(scheduler, done, clock):
    given = batch_of_several(scheduler)
    rest = scheduler.request("b", []).value()
    while rest[-1][1] < 399:
        rest = scheduler.request("b", results_of(rest)).value()
    idle = scheduler.request("b", results_of(rest))
    assert not idle.done() and scheduler.find_overdue() == []
    clock.now += 1.2 * OVERDUE_SECONDS
    ((name, batch, revoke),) = scheduler.find_overdue()
    assert (name, revoke) == ("a", True)
    scheduler.return_tasks("a", batch, keys_of(given[2:]))
    assert idle.value() == [given[2]]
    before = len(done)
    scheduler.request("a", results_of(given[:2]))
    assert done[before:] == results_of(given[:2])


def test_tasks_returned_after_the_next_request_are_not_lost(scheduler, done, clock):
    given = batch_of_several(scheduler)
    idle = request_all(scheduler, "b")
    clock.now += 1.2 * OVERDUE_SECONDS
    ((name, batch, revoke),) = scheduler.find_overdue()
    assert (name, revoke) == ("a", True)
    request = scheduler.request("a", results_of(given[:1]))  # arrives before the revoked tasks
    again = idle.value() + request.value()
    assert again == given[1 : 1 + len(again)]
    scheduler.return_tasks("a", batch, keys_of(given[1:]))  # of a former batch
    scheduler.report("b", results_of(given[1:2]))
    assert done[-1] == results_of(given[1:2])[0]
    before = len(done)
    scheduler.request("a", results_of(request.value()))
    assert done[before:] == results_of(request.value()), "they were not queued a second time"


def test_an_overdue_worker_is_found_once_while_no_worker_is_idle(scheduler, clock):
    batch_of_several(scheduler)
    scheduler.request("b", [])
    clock.now += 1.2 * OVERDUE_SECONDS
    assert ("a", False) in [each[::2] for each in scheduler.find_overdue()]
    assert scheduler.find_overdue() == []


def test_an_overdue_worker_is_found_again_while_others_are_idle(scheduler, clock):
    batch_of_several(scheduler)
    request_all(scheduler, "b")
    clock.now += 1.2 * OVERDUE_SECONDS
    found = scheduler.find_overdue()
    assert [each[::2] for each in found] == [("a", True)]
    assert scheduler.find_overdue() == found


def test_tasks_that_did_not_arrive_are_given_again(scheduler, done):
    given = batch_of_several(scheduler)
    again = scheduler.request("a", results_of(given[:1])).value()
    assert again[0] == given[1] and done[-1] == results_of(given[:1])[0]


def test_only_the_last_request_of_a_worker_is_given_tasks(scheduler):
    lost = scheduler.request("a", [])
    request = scheduler.request("a", [])
    assert lost.value() is None
    scheduler.submit(task(0))
    assert request.value() == [task(0)]
    scheduler.submit(task(1))
    assert scheduler.request("b", []).value() == [task(1)]


def test_a_closed_scheduler_gives_the_queued_tasks_and_then_none(scheduler):
    scheduler.submit(task(0))
    waiting = scheduler.request("a", [])
    second = scheduler.request("b", [])
    scheduler.close()
    assert waiting.value() == [task(0)] and second.value() is None
    assert scheduler.request("a", results_of([task(0)])).value() is None


def test_dropped_tasks_are_given_to_no_worker(scheduler):
    scheduler.submit(task(0))
    scheduler.close(drop=True)
    assert scheduler.request("a", []).value() is None
