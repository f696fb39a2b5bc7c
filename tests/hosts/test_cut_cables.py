"""What a cut cable does: nothing if it is short, errors that name the silence if it stays."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from host_cluster import cluster_of_hosts
from host_maker import why_impossible

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible"),
]

PEER_TIMEOUT = 5.0
# The promise is peer_timeout + 2 s from the cut; more is for machines that are busy.
SECONDS = 30.0

PROGRAM = """
import faulthandler, os, signal, sys, time
import torch
import rayrpc as rpc

rank, size = int(sys.argv[1]), int(sys.argv[2])

faulthandler.register(signal.SIGUSR1)

def say(*words):
    print(*words, flush=True)

def nap(seconds):
    time.sleep(seconds)
    return seconds

rpc.init_rpc(f"w{rank}", rank=rank, world_size=size)
for other in range(size):
    assert rpc.rpc_sync(f"w{other}", torch.add, args=(torch.ones(2), 1)).sum() == 4
say("up", os.getpid())
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    try:
        if word == "nap":
            to, seconds = rest.split()
            future = rpc.rpc_async(to, nap, args=(float(seconds),), timeout=0)
            say("napping")
            say("napped", future.wait())
        elif word == "push":
            say("pushing")
            while True:
                rpc.rpc_sync(rest, torch.neg, args=(torch.ones(4 << 20),))
        elif word == "call":
            say("called", rpc.rpc_sync(rest, max, args=(1, 2)))
        elif word == "shutdown":
            rpc.shutdown()
            say("shut down")
            break
    except Exception as exc:
        say("error", type(exc).__name__, exc)
        if word == "shutdown":
            break
"""


class Rank:
    """A program on a host, which is told what to do, a line at a time."""

    def __init__(self, hosts, number, size, environ):
        command = hosts.command(number, sys.executable, "-c", PROGRAM, str(number - 1), str(size))
        self.process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdin and self.process.stdout
        self._input, self._output = self.process.stdin, self.process.stdout
        self.lines = []
        self._changed = threading.Condition()
        self._seen = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._output:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()

    def tell(self, line):
        self._input.write(line + "\n")
        self._input.flush()

    def wait_for(self, *words, timeout=SECONDS):
        """Return the next line that begins with one of the words."""

        def found():
            return next((i for i in range(self._seen, len(self.lines)) if is_wanted(i)), None)

        def is_wanted(i):
            return self.lines[i].startswith(words)

        with self._changed:
            if not self._changed.wait_for(lambda: found() is not None, timeout):
                self.signal(signal.SIGUSR1)  # write what its threads do
                self._changed.wait_for(lambda: False, 2)
                pytest.fail(f"no {words} in {timeout} s; the output is:\n" + "\n".join(self.lines))
            self._seen = found() + 1
            return self.lines[self._seen - 1]

    def end(self):
        self._input.close()
        try:
            return self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            pytest.fail("no end; the output is:\n" + "\n".join(self.lines))

    def signal(self, number):
        """Send a signal to the program, which is a child of the one that entered the host."""
        for pid in _children(self.process.pid) or [self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self):
        self.signal(signal.SIGKILL)
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        for stream in (self._input, self._output):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@pytest.fixture(scope="module")
def cluster():
    with cluster_of_hosts(PEER_TIMEOUT) as made:
        yield made


@pytest.fixture
def ranks(cluster):
    """Start a program on each of the first hosts; its cables are whole afterwards."""
    hosts, environ = cluster
    started = []

    def start(size):
        port = str(20000 + os.urandom(2)[0] * 100 + len(started))
        for number in range(1, size + 1):
            started.append(Rank(hosts, number, size, {**environ, "MASTER_PORT": port}))
        for rank in started:
            rank.wait_for("up", timeout=120)
        return hosts, started

    yield start
    for rank in started:
        rank.close()
    for number in (1, 2, 3):
        hosts.heal(number)


def test_a_short_cut_loses_nothing(ranks):
    hosts, (a, b) = ranks(2)
    a.tell("nap w1 1")
    b.tell("nap w0 1")
    a.wait_for("napping")
    b.wait_for("napping")
    hosts.cut(2)
    time.sleep(PEER_TIMEOUT / 2)
    hosts.heal(2)
    for rank in (a, b):
        assert rank.wait_for("napped", "error") == "napped 1.0"
    for rank, other in ((a, "w1"), (b, "w0")):
        rank.tell(f"call {other}")
        assert rank.wait_for("called", "error") == "called 2"
        rank.tell("shutdown")
    assert a.wait_for("shut", "error") == b.wait_for("shut", "error") == "shut down"
    assert a.end() == b.end() == 0
    assert not [line for rank in (a, b) for line in rank.lines if "group" in line]


def test_a_cut_during_large_transfers_fails_them(ranks):
    hosts, (a, b) = ranks(2)
    a.tell("push w1")
    a.wait_for("pushing")
    time.sleep(1)
    hosts.cut(2)
    line = a.wait_for("error")
    assert "has not answered for" in line and "10.88.0.2" in line
    for rank in (a, b):
        rank.tell("shutdown")
        rank.wait_for("shut", "error")


@pytest.mark.parametrize("number", [3, 1], ids=["a host", "the host of the directory"])
def test_a_cut_that_stays_fails_calls_and_shutdown_on_both_sides(ranks, number):
    hosts, started = ranks(3)
    lost, others = (
        started[number - 1],
        [each for each in started if each is not started[number - 1]],
    )
    lost.tell(f"nap w{number % 3} 100")
    for rank in others:
        rank.tell(f"nap w{number - 1} 100")
    for rank in started:
        rank.wait_for("napping")
    hosts.cut(number)
    for rank in started:
        line = rank.wait_for("napped", "error")
        assert "has not answered for" in line and "10.88.0." in line
    others[0].tell(f"call w{started.index(others[1])}")
    assert others[0].wait_for("called", "error") == "called 2"
    for rank in started:
        rank.tell("shutdown")
    for rank in started:
        rank.wait_for("shut", "error")


def test_a_process_that_was_stopped_for_longer_is_slow_and_not_lost(ranks):
    _, (a, b) = ranks(2)
    b.tell("nap w0 0.1")
    b.wait_for("napped")
    a.tell("nap w1 1")
    a.wait_for("napping")
    b.signal(signal.SIGSTOP)
    try:
        time.sleep(2 * PEER_TIMEOUT)
    finally:
        b.signal(signal.SIGCONT)
    assert a.wait_for("napped", "error") == "napped 1.0"
    for rank in (a, b):
        rank.tell("shutdown")
    assert a.wait_for("shut", "error") == b.wait_for("shut", "error") == "shut down"


def _children(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]
    return []
