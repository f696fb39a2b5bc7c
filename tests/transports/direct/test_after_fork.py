"""What a forked child closes of its parent's transports."""

import gc
import os

import pytest

from rayrpc._transports.direct import after_fork

pytestmark = pytest.mark.process


class Transport:
    """Holds the end of a pipe, as a stand-in for its descriptors."""

    def __init__(self):
        self.end, self.other = os.pipe()
        self.closes = 0

    def close_after_fork(self):
        self.closes += 1
        os.close(self.end)

    def close(self):
        os.close(self.end)
        os.close(self.other)


class Broken(Transport):
    def close_after_fork(self):
        raise RuntimeError("half made")


@pytest.fixture
def make():
    """Make a transport that forked children close."""
    made = []

    def make(kind=Transport):
        transport = kind()
        made.append(transport)
        after_fork.register(transport)
        return transport

    yield make
    for transport in made:
        after_fork.unregister(transport)
        transport.close()


def seen_by_child(*functions):
    """Return what functions return in a forked child."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writable, repr([each() for each in functions]).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with open(readable) as file:
        text = file.read()
    assert os.waitpid(pid, 0)[1] == 0
    return text


def is_open(transport):
    try:
        os.fstat(transport.end)
    except OSError:
        return False
    return True


def test_the_child_closes_all_and_the_parent_keeps_its_own(make):
    first, second = make(), make()
    after_fork.register(second)  # again: it is closed once
    child = seen_by_child(
        lambda: is_open(first), lambda: is_open(second), lambda: (first.closes, second.closes)
    )
    assert child == "[False, False, (1, 1)]"
    assert is_open(first) and is_open(second) and first.closes == 0


def test_an_error_of_one_keeps_no_other_open(make):
    transports = [make(Broken if number % 2 else Transport) for number in range(8)]
    whole = transports[::2]
    assert seen_by_child(lambda: [is_open(each) for each in whole]) == f"[{[False] * 4}]"


def test_one_that_was_closed_or_collected_is_left_alone(make):
    closed, kept = make(), make()
    after_fork.unregister(closed)
    after_fork.unregister(closed)
    gone = Transport()
    after_fork.register(gone)
    end, other = gone.end, gone.other
    del gone
    gc.collect()

    def end_is_open():
        os.fstat(end)
        return True

    child = seen_by_child(lambda: is_open(closed), lambda: is_open(kept), end_is_open)
    assert child == "[True, False, True]"
    os.close(end)
    os.close(other)


def test_a_childs_child_closes_what_the_child_has_made_only(make):
    inherited = make()

    def of_grandchild():
        own = Transport()
        after_fork.register(own)
        return seen_by_child(lambda: is_open(own), lambda: inherited.closes)

    assert seen_by_child(of_grandchild) == repr(["[False, 1]"])
