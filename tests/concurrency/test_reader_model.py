"""Models of the hand-over of a connection's reader, run in all orders with few preemptions.

They use the real ``ReaderRole`` and ``ReaderSchedule``; around these they do what the threads of
``direct/server_connection.py`` and ``direct/connection.py`` do, one atomic step at a time.
"""

from __future__ import annotations

from typing import Any

import pytest
from interleavings import Thread, explore

from rayrpc._concurrency.reader import RELEASED, ReaderRole
from rayrpc._transports.direct.reader_schedule import (
    CALLER_READS,
    NOTHING,
    START_THREAD,
    THREAD_READS,
    ReaderSchedule,
)


class NoWatchdog:
    """The model's own watchdog is a thread of it."""

    is_asleep = False

    def add(self, role):
        pass

    def discard(self, role):
        pass


class Buffer:
    """A connection's receive buffer: messages, and who uses it."""

    def __init__(self, messages: int) -> None:
        self.messages = list(range(messages))
        self.in_use = False

    def enter(self) -> None:
        assert not self.in_use, "two threads use the receive buffer"
        self.in_use = True

    def leave(self) -> None:
        self.in_use = False

    def look(self) -> bool:
        self.enter()
        self.leave()
        return bool(self.messages)


class Serving:
    """A callee's connection: readers that serve, and a watchdog that releases them at any time.

    Args:
        looks_ahead: how a reader looks for another message after it has served one.
    """

    def __init__(self, looks_ahead: Any) -> None:
        self.buffer = Buffer(3)
        self.served: list[int] = []
        self.roles: list[ReaderRole] = []
        self.looks_ahead = looks_ahead
        self.readers: list[Thread] = []
        self.threads: list[Thread] = [self.watchdog()]
        self.start_reader()

    def start_reader(self) -> None:
        reader = self.reader()
        self.readers.append(reader)
        self.threads.append(reader)

    def reader(self) -> Thread:
        role = ReaderRole(self.start_reader, NoWatchdog())  # type: ignore[arg-type]
        self.roles.append(role)
        while True:
            self.buffer.enter()
            yield lambda: bool(self.buffer.messages)
            message = self.buffer.messages.pop(0)
            self.buffer.leave()
            yield
            role.message_received()
            yield  # the function runs
            self.served.append(message)
            yield from self.looks_ahead(role, self.buffer)
            if not role.message_done():
                return
            yield

    def watchdog(self) -> Thread:
        for _ in range(4):
            yield
            for role in self.roles:
                role.release(role.serial)

    def may_wait(self, thread: Thread) -> bool:
        return thread in self.readers

    def check(self) -> None:
        assert sorted(self.served) == [0, 1, 2]
        assert self.buffer.in_use, "nobody reads"


def looks_in_its_role(role, buffer):
    role.look_ahead(buffer.look)
    yield


def looks_after_a_check(role, buffer):
    if role.state != RELEASED:
        yield  # the role may be released here
        buffer.enter()
        yield
        buffer.leave()


def test_two_readers_of_a_callees_connection_never_use_its_buffer_at_once():
    assert explore(lambda: Serving(looks_in_its_role), preemptions=4) > 1000


def test_the_model_finds_a_look_ahead_outside_of_the_role():
    with pytest.raises(AssertionError, match="two threads use"):
        explore(lambda: Serving(looks_after_a_check))


class Calling:
    """A caller's connection: calls that wait, one that gives up, and calls by callback.

    Args:
        waiting: how many callers wait for their replies.
        callbacks: how many calls complete by callback.
        misses (bool): a caller that gives up keeps its place among those that wait.
    """

    def __init__(self, waiting: int, callbacks: int, misses: bool = False) -> None:
        self.schedule: ReaderSchedule[str] = ReaderSchedule()
        self.schedule.release()  # connected
        self.misses = misses
        self.buffer = Buffer(0)
        self.replies: set[str] = set()
        self.chosen: set[str] = set()
        names = [f"caller {number}" for number in range(waiting)]
        called = [f"callback {number}" for number in range(callbacks)]
        self.done: set[str] = set()
        self.threads: list[Thread] = [self.peer([*names, *called])]
        self.threads += [self.caller(name) for name in names]
        self.threads += [self.callback(name) for name in called]
        self.threads.append(self.impatient())

    def peer(self, names: list[str]) -> Thread:
        """Send the replies."""
        for name in names:
            self.buffer.messages.append(name)  # type: ignore[arg-type]
            yield

    def caller(self, name: str) -> Thread:
        """Do what ``CallerConnection.wait_reply`` does."""
        while name not in self.replies:
            if not self.schedule.claim(CALLER_READS, name):
                self.schedule.add_caller(name)
                yield lambda: name in self.chosen or name in self.replies
                self.schedule.remove_caller(name)
                if name not in self.chosen:
                    break
                self.chosen.discard(name)
            yield
            while name not in self.replies:
                yield from self.read()
            yield
            self.release(name)
        self.done.add(name)

    def impatient(self) -> Thread:
        """Wait for a reply that never comes, and give up."""
        name = "impatient"
        if self.schedule.claim(CALLER_READS, name):
            yield
            self.release(name)
            return
        self.schedule.add_caller(name)
        yield
        if not self.misses:
            self.schedule.remove_caller(name)
        if name in self.chosen:
            self.chosen.discard(name)
            self.release(name)

    def callback(self, name: str) -> Thread:
        """Do what ``ConnectionCall.on_done`` does."""
        if name not in self.replies:
            self.schedule.callbacks += 1
            if self.schedule.due_start(True) is START_THREAD:
                self.threads.append(self.reading_thread())
        yield

    def reading_thread(self) -> Thread:
        """Do what ``CallerConnection._read_for_callbacks`` does."""
        while self.schedule.callbacks:
            yield from self.read()
        yield
        self.release()

    def read(self) -> Thread:
        self.buffer.enter()
        yield lambda: bool(self.buffer.messages)
        name: Any = self.buffer.messages.pop(0)
        self.buffer.leave()
        self.replies.add(name)
        if name.startswith("callback"):
            self.schedule.callbacks -= 1
            self.done.add(name)

    def release(self, by: str | None = None) -> None:
        """Do what ``CallerConnection._release_reader`` does."""
        following = self.schedule.release(by)
        if following is START_THREAD:
            self.threads.append(self.reading_thread())
        elif following is not NOTHING:
            assert isinstance(following, str)
            self.chosen.add(following)

    def may_wait(self, thread: Thread) -> bool:
        return False

    def check(self) -> None:
        assert self.schedule.claim(THREAD_READS), "the connection has a reader for no call"


@pytest.mark.parametrize(
    "waiting, callbacks, preemptions", [(2, 0, 2), (1, 1, 2), (0, 2, 2), (2, 1, 1), (3, 0, 1)]
)
def test_every_call_of_a_connection_completes_and_one_thread_reads(waiting, callbacks, preemptions):
    assert explore(lambda: Calling(waiting, callbacks), preemptions) > 50


def test_the_model_finds_a_caller_that_is_chosen_after_it_gave_up():
    with pytest.raises(AssertionError):  # a deadlock, or a reader for no call
        explore(lambda: Calling(2, 0, misses=True))
