"""Processes of Ray end with their raylet."""

import os
import subprocess
import sys
import threading

import pytest

from rayrpc._transports.ray import raylet_watch

WAIT_SECONDS = 60.0
ENDS = """
import sys, time
from rayrpc._transports.ray.raylet_watch import end_with_raylet
end_with_raylet(float(sys.argv[1]))
print("up", flush=True)
time.sleep(100)
"""


@pytest.fixture
def raylet():
    """A process that stands for the raylet."""
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait(WAIT_SECONDS)


@pytest.mark.parametrize("how", ["pidfd", "polling"])
def test_the_end_of_a_process_is_noticed(raylet, how, monkeypatch):
    if how == "polling":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
        monkeypatch.setattr(raylet_watch, "POLL_SECONDS", 0.01)
    thread = threading.Thread(target=raylet_watch.wait_for_end, args=(raylet.pid,))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    raylet.kill()
    raylet.wait(WAIT_SECONDS)
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    raylet_watch.wait_for_end(raylet.pid)  # and of one that has ended before


@pytest.mark.parametrize("after", [0, 0.2])
def test_a_process_ends_with_its_raylet(raylet, after):
    process = subprocess.Popen(
        [sys.executable, "-c", ENDS, str(after)],
        env={**os.environ, "RAY_RAYLET_PID": str(raylet.pid)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "up\n"
        raylet.kill()
        _, errors = process.communicate(timeout=WAIT_SECONDS)
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)
    assert process.returncode == 1
    assert ("this process ends in 0.2 s" in errors) == bool(after)
