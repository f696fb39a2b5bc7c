"""Programs on hosts, which are told what to do, a line at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest
from host_maker import Hosts

__all__ = ["Rank", "SECONDS", "started_ranks"]

# The promises are shorter; more is for machines that are busy.
SECONDS = 30.0

PROGRAM = """
import faulthandler, os, signal, sys, time
import torch
import rayrpc as rpc
import rayrpc.autograd as dist_autograd

rank, size = int(sys.argv[1]), int(sys.argv[2])

faulthandler.register(signal.SIGUSR1)

def say(*words):
    print(*words, flush=True)

def nap(seconds):
    time.sleep(seconds)
    return seconds

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None

def slow(x, seconds):
    return Slow.apply(x, seconds)

def tensors(number):
    for each in range(number):
        time.sleep(0.05)
        yield torch.full((1 << 18,), float(each))

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
        elif word == "stream":
            to, number = rest.split()
            values = []
            for value in rpc.stream(to, tensors, args=(int(number),)):
                if not values:
                    say("streaming")
                values.append(int(value[-1]))
            say("streamed", values == list(range(int(number))))
        elif word == "own":
            owned = rpc.remote(rest, torch.ones, args=(2,))
            owned.to_here()
            say("owns")
        elif word == "fetch":
            say("fetched", int(owned.to_here().sum()))
        elif word == "pass":
            to, seconds = rest.split()
            with dist_autograd.context() as context:
                x = torch.ones(2, requires_grad=True)
                y = rpc.rpc_sync(to, slow, args=(x, float(seconds)))
                say("passing")
                dist_autograd.backward(context, [y.sum()])
                say("passed", int(dist_autograd.get_gradients(context)[x].sum()))
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
    """A program on a host.

    Args:
        hosts: there are.
        number: of its host.
        rank, size: of its worker, ``w`` and the rank, and of the group.
        environ: its environment.
    """

    def __init__(
        self, hosts: Hosts, number: int, rank: int, size: int, environ: dict[str, str]
    ) -> None:
        command = hosts.command(number, sys.executable, "-c", PROGRAM, str(rank), str(size))
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
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._seen = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._output:
            with self._changed:
                self.lines.append(line.rstrip())
                self._changed.notify_all()

    def tell(self, line: str) -> None:
        """Have the program do something; see ``PROGRAM``."""
        self._input.write(line + "\n")
        self._input.flush()

    def wait_for(self, *words: str, timeout: float = SECONDS) -> str:
        """Return the next line that begins with one of the words."""

        def found() -> int | None:
            return next((i for i in range(self._seen, len(self.lines)) if is_wanted(i)), None)

        def is_wanted(i: int) -> bool:
            return self.lines[i].startswith(words)

        with self._changed:
            if not self._changed.wait_for(lambda: found() is not None, timeout):
                self.signal(signal.SIGUSR1)  # write what its threads do
                self._changed.wait_for(lambda: False, 2)
                pytest.fail(f"no {words} in {timeout} s; the output is:\n" + "\n".join(self.lines))
            index = found()
            assert index is not None
            self._seen = index + 1
            return self.lines[index]

    def end(self, timeout: float = SECONDS) -> int:
        """Wait for the end of the program, and return its exit status."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail("no end; the output is:\n" + "\n".join(self.lines))

    def signal(self, number: int) -> None:
        """Send a signal to the program, which is a child of the one that entered the host."""
        for pid in _children(self.process.pid) or [self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def close(self) -> None:
        """End the program."""
        self.signal(signal.SIGKILL)
        self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        for stream in (self._input, self._output):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@contextlib.contextmanager
def started_ranks(
    hosts: Hosts, environ: dict[str, str], numbers: Sequence[int]
) -> Iterator[list[Rank]]:
    """Start a program on each of some hosts, and wait until all are members of a group."""
    port = str(20000 + int.from_bytes(os.urandom(2), "big") % 20000)
    started: list[Rank] = []
    try:
        for rank, number in enumerate(numbers):
            more = {**environ, "MASTER_PORT": port}
            started.append(Rank(hosts, number, rank, len(numbers), more))
        for each in started:
            each.wait_for("up", timeout=120)
        yield started
    finally:
        for each in started:
            each.close()


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]
    return []
