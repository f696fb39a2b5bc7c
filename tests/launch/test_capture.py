"""Capturing a process's output: collectors that refuse, stall or end; see also test_collector."""

import mmap
import os
import socket
import struct
import sys
import threading

import pytest

from rayrpc.launch.capture import STATE_BYTES, Capture, exit_status


def output():
    """Return what must stay as it was."""
    return sys.stdout, sys.stderr, os.fstat(1), os.fstat(2), os._exit


def test_without_a_collector_the_output_stays_as_it_was(tmp_path):
    before = output()
    with pytest.raises(FileNotFoundError):
        Capture(str(tmp_path / "nobody"), "w")
    assert output() == before


def test_a_collector_that_refuses_it_leaves_the_output_and_no_descriptor(tmp_path):
    path = str(tmp_path / "collector")
    received = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(1)

        def refuse():
            connection, _ = listener.accept()
            with connection:
                data, descriptors, *_ = socket.recv_fds(connection, 1000, 4)
                received.append(data)
                for each in descriptors:
                    os.close(each)

        thread = threading.Thread(target=refuse)
        thread.start()
        before = output()
        with pytest.raises(ConnectionError, match="the collector of output closed the connection"):
            Capture(path, "w")
        thread.join(60)
    assert output() == before
    assert received == [f'["w", {os.getpid()}]'.encode()]


@pytest.mark.parametrize("status", [0, 7, -1, 2**31 - 1])
def test_the_status_of_a_worker_is_behind_what_is_not_shown(status):
    with mmap.mmap(-1, STATE_BYTES) as state:
        assert exit_status(state) is None
        state[0] = 1
        assert exit_status(state) is None
        state[1:6] = struct.pack("<?i", True, status)
        state[0] = 0
        assert exit_status(state) == status


STALLS = """
import os, socket, sys, threading

from rayrpc.launch import capture as module
from rayrpc.launch.capture import HELLO, SYNC, Capture

module.SYNC_SECONDS = module.CHILD_SECONDS = 0.05
path, told, ends = sys.argv[1], [], []
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(path)
listener.listen(1)

def collect():
    connection, _ = listener.accept()
    _, descriptors, *_ = socket.recv_fds(connection, 1000, 4)
    ends.extend([connection, *descriptors])
    connection.sendall(HELLO)
    while data := connection.recv(64):
        told.extend(data)

threading.Thread(target=collect, daemon=True).start()
capture = Capture(path, "w")
capture.sync()  # nothing is written
print("nobody reads this")
capture.sync()  # waits in vain
capture.sync()  # the collector has stalled: it is not asked again
collector, pipe = ends[:2]
collector.sendall(SYNC)
while told.count(SYNC[0]) < 2:
    capture.sync()
collector.sendall(SYNC)
os.read(pipe, 100)
capture.sync()  # nothing is left
collector.shutdown(socket.SHUT_RDWR)
print("nor this")
capture.sync()  # the collector has ended
capture.close()
print("asked", told.count(SYNC[0]), "times", flush=True)
"""


@pytest.mark.process
def test_a_collector_that_stalls_holds_up_one_sync_until_it_answers(start, script, tmp_path):
    one = start(script(STALLS), str(tmp_path / "collector"))
    assert one.end() == 0, one.output
    assert one.output == "asked 2 times\n"
