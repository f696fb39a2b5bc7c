"""Observers of a group's members are called in the order of the changes, one at a time."""

import threading
from concurrent.futures import ThreadPoolExecutor

from conftest import eventually

from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.membership import Change, Member
from rayrpc._runtime.observers import Observers


def change(number):
    return Change(number, "joined", Member(str(number), f"w{number}", number))


def submitted_to(threads):
    return lambda task: threads.submit(task)


def in_a_thread(task):
    threading.Thread(target=task).start()


def test_each_is_called_for_each_change_in_order(quick_switches):
    with ThreadPoolExecutor(4) as threads:
        observers = Observers(submitted_to(threads))
        seen: dict[str, list[int]] = {"one": [], "other": []}
        observers.add(lambda change: seen["one"].append(change.version))
        observers.add(lambda change: seen["other"].append(change.version))
        for number in range(2000):
            observers.report(change(number))
        assert eventually(lambda: len(seen["other"]) == 2000)
    assert seen == {"one": list(range(2000)), "other": list(range(2000))}


def test_one_may_be_called_for_some_kinds_of_changes():
    started = []

    def submit(task):
        started.append(task)
        task()

    observers = Observers(submit)
    deaths, others = [], []
    observers.add(deaths.append, "died")
    observers.report(change(0))
    assert not started and not deaths
    remove = observers.add(others.append, "joined", "left")
    for number, kind in enumerate(("joined", "died", "left")):
        observers.report(change(number)._replace(kind=kind))
    assert [each.kind for each in deaths] == ["died"]
    assert [each.kind for each in others] == ["joined", "left"]
    remove()
    observers.report(change(3))
    assert len(others) == 2 and len(started) == 3


def test_no_two_are_called_at_once(quick_switches):
    running = threading.Lock()
    count = []

    def observe(change):
        assert running.acquire(blocking=False)
        count.append(change)
        running.release()

    with ThreadPoolExecutor(8) as threads:
        observers = Observers(submitted_to(threads))
        observers.add(observe)
        reporters = [
            threading.Thread(target=lambda: [observers.report(change(i)) for i in range(500)])
            for _ in range(4)
        ]
        for each in reporters:
            each.start()
        for each in reporters:
            each.join(60)
        assert eventually(lambda: len(count) == 2000)


def test_one_that_fails_is_logged_and_the_others_are_called(caplog):
    observers = Observers(in_a_thread)
    seen = []

    def fail(change):
        raise ArithmeticError("as expected")

    observers.add(fail)
    observers.add(seen.append)
    observers.report(change(7))
    assert eventually(lambda: seen == [change(7)])
    assert "as 'w7' joined" in caplog.text and "as expected" in caplog.text


def test_one_that_was_removed_is_not_called():
    observers = Observers(in_a_thread)
    seen, kept = [], []
    remove = observers.add(seen.append)
    observers.add(kept.append)
    remove()
    remove()
    observers.report(change(1))
    assert eventually(lambda: kept == [change(1)])
    assert seen == []


def test_a_change_is_kept_where_no_thread_can_be_started(caplog):
    fails = [True]

    def submit(task):
        if fails:
            raise RuntimeError("can't start new thread")
        task()

    observers = Observers(submit)
    seen = []
    observers.add(seen.append)
    observers.report(change(1))
    assert seen == [] and "are not called yet" in caplog.text
    fails.clear()
    observers.report(change(2))
    assert seen == [change(1), change(2)]


def test_an_observer_may_wait_while_threads_are_reported(caplog):
    cache = ThreadCache("test")
    cache.start()
    goes_on = threading.Event()
    seen = []
    observers = Observers(cache.submit)
    observers.add(lambda change: (goes_on.wait(20), seen.append(change)))
    for number in range(3):
        observers.report(change(number))  # does not wait
    assert seen == []
    goes_on.set()
    assert eventually(lambda: len(seen) == 3)
    cache.close()
