"""Waits that threads have noted: of each thread the innermost, until it ends."""

import threading

from conftest import eventually

from rayrpc._runtime.noted_waits import NotedWaits


def now(waits):
    return {ident: (wait.where, [*wait.workers()]) for ident, wait in waits.now().items()}


def test_the_innermost_wait_of_a_thread_counts_until_it_ends():
    waits, me = NotedWaits(), threading.get_ident()
    assert now(waits) == {}
    with waits.noted("shutdown", lambda: ["a"]):
        with waits.noted("a backward pass", lambda: ["b", "c"]):
            assert now(waits) == {me: ("a backward pass", ["b", "c"])}
        assert now(waits) == {me: ("shutdown", ["a"])}
    assert now(waits) == {}


def test_a_wait_that_fails_has_ended():
    waits = NotedWaits()
    try:
        with waits.noted("shutdown", lambda: ["a"]):
            raise ValueError
    except ValueError:
        assert now(waits) == {}


def test_each_thread_has_waits_of_its_own():
    waits, go = NotedWaits(), threading.Event()

    def wait(name):
        with waits.noted("shutdown", lambda: [name]):
            go.wait(60)

    threads = {name: threading.Thread(target=wait, args=(name,)) for name in "ab"}
    for thread in threads.values():
        thread.start()
    try:
        expected = {thread.ident: ("shutdown", [name]) for name, thread in threads.items()}
        assert eventually(lambda: now(waits) == expected)
    finally:
        go.set()
        for thread in threads.values():
            thread.join(60)
    assert now(waits) == {}
