"""Memory of large buffers that arrive by TCP, used again when the last buffer in it is deleted."""

import gc
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from rayrpc._transports.direct.received_memory import ReceivedMemory

WAIT_SECONDS = 60.0


def address_of(buffer):
    return np.frombuffer(buffer, np.uint8).ctypes.data


def interrupted_at(number, function, call):
    """Call, and raise KeyboardInterrupt at a line of a function; return False if fewer run."""
    left = number

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code is not function.__code__:
            return None
        left -= event == "line"
        if not left:
            raise KeyboardInterrupt
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(outer)
    return False


def test_memory_is_used_again_when_the_last_buffer_in_it_is_deleted():
    memory = ReceivedMemory()
    first = memory.acquire(1 << 20)
    first[:3] = b"abc"
    part = first[1:3]
    address = np.frombuffer(first, np.uint8).ctypes.data
    del first
    other = memory.acquire(1 << 20)
    assert np.frombuffer(other, np.uint8).ctypes.data != address
    assert bytes(part) == b"bc"
    del part
    gc.collect()
    again = memory.acquire((1 << 20) - 100)
    assert np.frombuffer(again, np.uint8).ctypes.data == address
    assert len(again) == (1 << 20) - 100 and not again.readonly


def test_what_is_free_for_a_while_is_freed(monkeypatch):
    memory = ReceivedMemory()
    memory.acquire(1 << 20)  # deleted at once
    memory.trim()
    assert memory._free_bytes >= 1 << 20
    monkeypatch.setattr("rayrpc._transports.direct.received_memory.MAX_FREE_SECONDS", -1.0)
    memory.trim()
    assert memory._free_bytes == 0 and not memory._free


def test_no_more_is_kept_than_the_limit(monkeypatch):
    monkeypatch.setattr("rayrpc._transports.direct.received_memory.MAX_FREE_BYTES", 3 << 20)
    memory = ReceivedMemory()
    buffers = [memory.acquire(1 << 20) for _ in range(5)]
    del buffers
    memory.trim()
    assert 0 < memory._free_bytes <= 3 << 20


def test_an_interrupt_while_memory_is_taken_back_keeps_none_in_use():
    for number in range(1, 200):
        memory: Any = ReceivedMemory()
        for _ in range(2):
            memory.acquire(1 << 20)  # deleted at once
        if not interrupted_at(number, ReceivedMemory._collect, memory.trim):
            break
        memory.trim()
        assert not memory._used and not memory._deleted
        assert memory._free_bytes in (0, 1 << 20, 2 << 20)
        assert sum(map(len, memory._free.values())) << 20 == memory._free_bytes
    assert 5 < number < 199


def test_threads_get_memory_of_their_own():
    memory = ReceivedMemory()
    wrong = []

    def use(number):
        for step in range(300):
            buffer = memory.acquire(70_000)
            buffer[:2] = buffer[-2:] = bytes([number, step % 256])
            time.sleep(0)
            if bytes(buffer[:2]) != bytes(buffer[-2:]) or buffer[0] != number:
                wrong.append((number, step))

    threads = [threading.Thread(target=use, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert not wrong


def test_a_buffer_of_another_size_has_other_memory():
    memory = ReceivedMemory()
    first = memory.acquire(1 << 20)
    address = address_of(first)
    del first
    larger = memory.acquire(8 << 20)
    assert address_of(larger) != address and len(larger) == 8 << 20
    assert address_of(memory.acquire(1 << 20)) == address  # it is free still


def test_the_one_that_was_freed_last_is_used_first():
    """Its pages are most likely in a cache."""
    memory = ReceivedMemory()
    buffers = [memory.acquire(1 << 20) for _ in range(2)]
    addresses = [address_of(buffer) for buffer in buffers]
    while buffers:
        del buffers[0]
        memory.trim()
    assert address_of(memory.acquire(1 << 20)) == addresses[1]


def test_an_array_on_a_buffer_keeps_its_memory_and_a_cycle_frees_it_later():
    memory = ReceivedMemory()
    array: Any = np.frombuffer(memory.acquire(1 << 20), np.uint8)
    address = address_of(array)
    array[:] = 7
    holder: list[Any] = [array]
    holder.append(holder)
    del array
    other = memory.acquire(1 << 20)
    assert address_of(other) != address
    other[:] = bytes(1 << 20)
    assert (holder[0] == 7).all()
    del holder
    gc.collect()
    assert address_of(memory.acquire(1 << 20)) == address


def test_a_size_for_which_there_is_no_memory_is_an_error_and_no_more():
    memory = ReceivedMemory()
    with pytest.raises((MemoryError, ValueError)):
        memory.acquire(1 << 60)
    assert len(memory.acquire(10)) == 10


def test_memory_that_was_used_again_is_not_freed_as_old(monkeypatch):
    memory = ReceivedMemory()
    memory.acquire(1 << 20)
    monkeypatch.setattr("rayrpc._transports.direct.received_memory.MAX_FREE_SECONDS", -1.0)
    buffer = memory.acquire(1 << 20)
    buffer[:3] = b"abc"
    memory.trim()
    assert bytes(buffer[:3]) == b"abc" and len(buffer) == 1 << 20
