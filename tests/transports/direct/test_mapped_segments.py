"""Received buffers in segments of shared memory: whose they are, before and after a fork."""

import fcntl
import gc
import logging
import os
import pickle
import resource
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from rayrpc._transports.direct import mapped_segments, shared_memory
from rayrpc._transports.direct.mapped_segments import MappedSegments
from rayrpc._transports.direct.shared_memory import MIN_SEGMENT_BYTES, SEALS, SegmentPool

LARGE = 100_000
WAIT_SECONDS = 60.0

pytestmark = [
    pytest.mark.skipif(
        not shared_memory.is_supported(), reason="there are no files without a name"
    ),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Link:
    """A sender's pool and its receiver, in one process; notices arrive when they are delivered."""

    def __init__(self) -> None:
        self.notices: list[tuple[int, bool]] = []
        self.mapped = MappedSegments(self.notices.append, lambda *notice: notice)
        self.pool = SegmentPool(lambda *segment: self._map(*segment))

    def _map(self, number: int, capacity: int, descriptor: int) -> None:
        self.mapped.map(number, os.dup(descriptor), capacity)

    def send(self, data: bytes) -> tuple[int, memoryview]:
        """Return the number of the segment that the data travelled in, and the received buffer."""
        segment = self.pool.acquire(len(data))
        segment.fill([memoryview(data)], [0])
        return segment.number, self.mapped.buffers(segment.number, [len(data)])[0]

    def deliver(self) -> None:
        while self.notices:
            number, reusable = self.notices.pop()
            if reusable:
                self.pool.release(number)
            else:
                self.pool.discard(number)


@pytest.fixture
def link():
    gc.collect()
    link = Link()
    yield link
    link.mapped.close()
    link.pool.close()


class Child:
    """A forked child that runs the given functions, one at a time, when it is told to."""

    def __init__(self, *steps: Any) -> None:
        self._near, far = socket.socketpair()
        self._near.settimeout(WAIT_SECONDS)
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._near.close()
                for step in steps:
                    if not far.recv(1):
                        break
                    far.sendall(pickle.dumps(step()))
            finally:
                os._exit(0)
        far.close()

    def step(self) -> Any:
        self._near.sendall(b"\0")
        return pickle.loads(self._near.recv(1 << 16))

    def end(self) -> None:
        self._near.close()
        os.waitpid(self.pid, 0)


def seen(buffer):
    """Return what is in a buffer: its only byte, or all that are in it."""
    values = set(bytes(buffer))
    return values.pop() if len(values) == 1 else values


def filled(value, size=LARGE):
    return bytes([value]) * size


def write(buffer, value):
    buffer[:] = filled(value, len(buffer))


def mappings():
    return Path("/proc/self/maps").read_text().count("memfd:rayrpc")


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.process
class TestForks:
    def test_a_child_keeps_what_the_parent_drops(self, link):
        number, buffer = link.send(filled(1))
        child = Child(lambda: seen(buffer))
        buffer = None
        link.deliver()
        others = [link.send(filled(value)) for value in range(2, 6)]
        assert number not in [other for other, _ in others]
        assert child.step() == 1
        child.end()

    def test_writes_after_a_fork_are_private_both_ways(self, link):
        _, buffer = link.send(filled(1))
        buffer[:5] = b"\7" * 5  # before it: both see them
        child = Child(
            lambda: seen(buffer), lambda: buffer.__setitem__(10, 50), lambda: buffer[:20].tolist()
        )
        buffer[11] = 60
        assert child.step() == {1, 7}
        child.step()
        assert buffer[:20].tolist() == [7] * 5 + [1] * 6 + [60] + [1] * 8
        assert child.step() == [7] * 5 + [1] * 5 + [50] + [1] * 9
        child.end()

    def test_a_childs_child_has_its_own(self, link):
        _, buffer = link.send(filled(1))

        def fork_again():
            write(buffer, 2)
            grandchild = Child(lambda: seen(buffer), lambda: write(buffer, 4))
            write(buffer, 3)
            inherited = grandchild.step()
            grandchild.step()
            grandchild.end()
            return inherited, seen(buffer)

        child = Child(fork_again)
        write(buffer, 9)
        assert child.step() == (2, 3)
        assert seen(buffer) == 9
        child.end()

    def test_a_second_child_inherits_what_the_parent_has_written_since(self, link):
        _, buffer = link.send(filled(1))
        first = Child(lambda: seen(buffer))
        write(buffer, 2)
        second = Child(lambda: seen(buffer))
        write(buffer, 3)
        assert (first.step(), second.step(), seen(buffer)) == (1, 2, 3)
        first.end()
        second.end()

    def test_a_segment_in_use_at_a_fork_is_freed_and_another_one_reused(self, link):
        link.send(filled(1))
        link.deliver()  # a free one
        before = mappings(), descriptors()
        used, buffer = link.send(filled(1))
        other, free = link.send(filled(2))
        del free
        link.deliver()
        Child().end()
        del buffer
        link.deliver()
        assert link.send(filled(3))[0] == other != used
        assert (mappings(), descriptors()) == before

    def test_a_child_unmaps_what_it_cannot_read(self, link):
        kept = link.send(filled(1))[1]
        free = link.send(filled(2))[1]
        del free
        link.deliver()

        def close():
            link.mapped.close()
            link.pool.close_after_fork()
            return mappings(), seen(kept)

        child = Child(close)
        assert child.step() == (1, 1)
        child.end()

    def test_buffers_without_a_connection_become_private_too(self):
        link = Link()
        _, buffer = link.send(filled(1))
        del link
        gc.collect()
        child = Child(lambda: seen(buffer), lambda: write(buffer, 3))
        write(buffer, 2)
        assert child.step() == 1
        child.step()
        assert seen(buffer) == 2
        child.end()

    def test_a_part_of_a_buffer_is_private_too(self, link):
        _, buffer = link.send(filled(1))
        part = buffer[500:600]
        del buffer
        child = Child(lambda: seen(part))
        write(part, 2)
        assert child.step() == 1
        child.end()

    @pytest.mark.usefixtures("quick_switches")
    def test_children_of_a_process_whose_threads_receive(self, link):
        kept: dict[int, tuple[memoryview, int]] = {}
        done = threading.Event()
        errors: list[BaseException] = []

        def receive(mine, index):
            value = 0
            try:
                while not done.is_set():
                    value = (value + 1) % 250
                    buffer = mine.send(filled(value))[1]
                    kept[index] = (buffer, value)
                    kept[index + 10] = (mine.send(filled(value, 3 * LARGE))[1], value)
                    del buffer
                    mine.deliver()
            except BaseException as exc:
                errors.append(exc)

        threads = [threading.Thread(target=receive, args=(Link(), i)) for i in range(3)]
        try:
            for thread in threads:
                thread.start()

            def wrong():
                return [
                    (seen(buffer), value)
                    for buffer, value in kept.values()
                    if seen(buffer) != value
                ]

            for _ in range(12):
                children = [Child(wrong, wrong) for _ in range(2)]
                for _ in range(2):
                    assert [child.step() for child in children] == [[], []]
                for child in children:
                    child.end()
        finally:
            done.set()
            for thread in threads:
                thread.join(WAIT_SECONDS)
        assert not errors

    def test_memory_that_cannot_be_made_private_is_reported(self, link, monkeypatch, caplog):
        def refuse(memory, descriptor):
            raise OSError("no memory")

        _, buffer = link.send(filled(1))
        monkeypatch.setattr(mapped_segments, "make_private", refuse)
        with caplog.at_level(logging.ERROR):
            Child().end()
        assert "they cannot be made private (no memory)" in caplog.text
        assert seen(buffer) == 1 and seen(link.send(filled(2))[1]) == 2


class TestDescriptors:
    """A process keeps few of them: their number is limited, and they are what forks need."""

    def test_beyond_the_limit_buffers_are_copied(self, link, monkeypatch):
        monkeypatch.setattr(mapped_segments, "MAX_DESCRIPTORS", 10)
        before = descriptors()
        kept = [link.send(filled(value))[1] for value in range(25)]
        assert descriptors() == before + 10
        assert [seen(buffer) for buffer in kept] == list(range(25))
        link.deliver()
        number, last = link.send(filled(99))
        link.deliver()
        assert number == link.send(filled(100))[0]  # released at once
        assert seen(last) == 99 and not last.readonly

    def test_a_copied_segment_is_replaced_when_there_is_room(self, link, monkeypatch):
        monkeypatch.setattr(mapped_segments, "MAX_DESCRIPTORS", 1)
        kept = link.send(filled(1))[1]
        copied = link.send(filled(2))[0]
        link.deliver()
        del kept
        link.deliver()
        assert link.mapped.has(copied)
        kept = [link.send(filled(value))[1] for value in (3, 4)]  # both are free
        link.deliver()
        monkeypatch.setattr(mapped_segments, "MAX_DESCRIPTORS", 2)
        kept.append(link.send(filled(5))[1])
        link.deliver()
        assert not link.mapped.has(copied)
        assert [seen(buffer) for buffer in kept] == [3, 4, 5]

    def test_a_part_of_the_processes_limit_is_kept(self, monkeypatch):
        monkeypatch.setattr(mapped_segments, "_mappings", set(range(20)))
        for soft, has_room in (
            (160, False),
            (176, True),
            (resource.RLIM_INFINITY, True),
        ):
            monkeypatch.setattr(resource, "getrlimit", lambda _, s=soft: (s, s))
            assert mapped_segments._has_room() is has_room

    def test_each_use_of_a_segment_ends_with_one_notice(self, link):
        number = link.send(filled(1))[0]
        link.notices.clear()
        for use in range(3):
            first, second = link.mapped.buffers(number, [10, 20])
            part = second[3:4]
            del first, second
            assert link.notices == [(number, True)] * use
            del part
            assert link.notices == [(number, True)] * (use + 1)


def memory_file(size, seals=SEALS):
    descriptor = os.memfd_create("rayrpc", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


class TestChecks:
    """A file that is too small, or becomes so, would kill the process that reads it."""

    def test_a_senders_file_has_one_size_for_ever(self):
        kept = []
        pool = SegmentPool(lambda number, capacity, descriptor: kept.append(os.dup(descriptor)))
        pool.acquire(LARGE)
        for size in (0, 2 * MIN_SEGMENT_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(kept[0], size)
        os.close(kept[0])

    @pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
    def test_a_file_that_may_shrink_is_refused(self, link, seals):
        before = descriptors()
        with pytest.raises(OSError, match="not sealed"):
            link.mapped.map(1, memory_file(MIN_SEGMENT_BYTES, seals), MIN_SEGMENT_BYTES)
        assert not link.mapped.has(1) and descriptors() == before

    @pytest.mark.parametrize("capacity", [0, MIN_SEGMENT_BYTES + 1, 1 << 62])
    def test_a_file_of_another_size_is_refused(self, link, capacity):
        with pytest.raises(OSError, match="bytes instead of"):
            link.mapped.map(1, memory_file(MIN_SEGMENT_BYTES), capacity)
        assert not link.mapped.has(1)

    def test_what_is_not_a_memory_file_is_refused(self, link, tmp_path):
        path = tmp_path / "file"
        path.write_bytes(bytes(MIN_SEGMENT_BYTES))
        with pytest.raises(OSError):
            link.mapped.map(1, os.open(path, os.O_RDWR), MIN_SEGMENT_BYTES)

    def test_buffers_beyond_the_segments_end_are_refused(self, link):
        link.mapped.map(1, memory_file(MIN_SEGMENT_BYTES), MIN_SEGMENT_BYTES)
        with pytest.raises(ValueError, match="do not fit"):
            link.mapped.buffers(1, [MIN_SEGMENT_BYTES, 1])

    def test_a_segment_in_use_takes_no_other_buffers(self, link):
        number, buffer = link.send(filled(1))
        with pytest.raises(ValueError, match="in use"):
            link.mapped.buffers(number, [10])
        assert seen(buffer) == 1
