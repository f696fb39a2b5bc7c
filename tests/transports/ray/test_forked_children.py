"""Forked children of a process that is connected to Ray."""

import subprocess
import sys

import pytest

FORK = """
import gc, os, signal, sys, time
from rayrpc._transports.ray import forked_children

def rays(number, frame):
    sys.exit(number)

rays.__module__ = "ray._private.worker"
signals = []
signal.signal(signal.SIGTERM, {"rays": rays, "builtin": signals.insert}[sys.argv[1]])
starts, started = os.pipe()
# the handler of another library, which runs before those of rayrpc
os.register_at_fork(after_in_child=lambda: (os.write(started, b"."), time.sleep(0.5)))
forked_children.prepare()

if (child := os.fork()) == 0:
    end = time.monotonic() + 5
    while not signals and time.monotonic() < end:
        time.sleep(0.01)
    os._exit(3 if signals and gc.isenabled() else 4)
os.read(starts, 1)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
assert gc.isenabled() and not signal.pthread_sigmask(signal.SIG_BLOCK, [])
"""


@pytest.mark.parametrize(("handler", "status"), [("rays", -15), ("builtin", 3)])
def test_sigterm_waits_until_the_fork_is_done(handler, status):
    command = [sys.executable, "-c", FORK, handler]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{status}\n"
