"""Call three workers in all ways for a while; every call is answered, and nothing grows.

    python tests/soak.py [--seconds 600] [--threads 4] [--switch 1e-5]

Threads of this process and of the workers make calls at once: ints, tensors of 100 KB and 4 MB,
``remote`` and ``to_here``, ``async_execution``, autograd contexts with their backward passes, and
calls that make calls. Every report line shows, for each process, memory, threads, descriptors,
RRefs and contexts; at the end these are compared with what they were after the first tenth.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import rayrpc as rpc
from rayrpc import autograd

NAMES = ["alice", "bob", "carol"]
CALL_SECONDS = 60.0  # a call that takes longer counts as lost
# What may be more at the end than after the first tenth.
SLACK = {"memory MB": 150, "threads": 40, "descriptors": 40, "rrefs": 20, "contexts": 5}


def add(x: Any, y: Any) -> Any:
    """Add two values."""
    return x + y


def nap_and_add(x: Any, y: Any) -> Any:
    """Add two values after some milliseconds: longer than the watchdog's tick, or shorter."""
    time.sleep(random.choice([0, 0.0005, 0.002, 0.004]))
    return x + y


@rpc.functions.async_execution
def add_elsewhere(to: str, x: Any, y: Any) -> Any:
    """Have another worker add two values."""
    return rpc.rpc_async(to, nap_and_add, args=(x, y)).then(lambda done: done.value())


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Make a tensor of two."""
    return torch.tanh(x @ w)


def step_elsewhere(to: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Use what another worker makes beside what it is made of."""
    return rpc.rpc_sync(to, step, args=(x, w)) + x


def usage() -> dict[str, float]:
    """Return what this process uses."""
    gc.collect()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    rrefs = rpc._rref_context_get_debug_info()
    return {
        "memory MB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "rrefs": int(rrefs["num_owner_rrefs"]) + int(rrefs["num_forks"]),
        "contexts": int(autograd._get_debug_info()["num_autograd_contexts"]),
    }


class Caller:
    """Make random calls until a time.

    Args:
        seed: of the choice of calls.
        end: by ``time.monotonic``.
    """

    def __init__(self, seed: int, end: float) -> None:
        self._some = random.Random(seed)
        self._end = end
        self.made: collections.Counter[str] = collections.Counter()
        self.errors: list[str] = []
        self._small = torch.rand(100 * 256)
        self._large = torch.rand(1 << 20)
        self._weight = torch.rand(8, 8, requires_grad=True)

    def run(self) -> None:
        """Make calls."""
        kinds: list[Callable[[str, str], None]] = [
            self.ints, self.ints, self.many, self.small, self.large, self.remote, self.elsewhere,
            self.backward,
        ]  # fmt: skip
        while time.monotonic() < self._end and len(self.errors) < 10:
            kind = self._some.choice(kinds)
            to, other = self._some.sample(NAMES, 2)
            try:
                kind(to, other)
            except BaseException as exc:
                self.errors.append(f"{kind.__name__} at {to}: {type(exc).__name__}: {exc}")
            self.made[kind.__name__] += 1

    def ints(self, to: str, other: str) -> None:
        """Call with numbers."""
        number = self._some.randrange(10**6)
        func = self._some.choice([add, nap_and_add])
        assert rpc.rpc_sync(to, func, args=(number, 1), timeout=CALL_SECONDS) == number + 1

    def many(self, to: str, other: str) -> None:
        """Make many calls at once."""
        func = self._some.choice([add, nap_and_add])
        names = [to, other]
        futures = [
            rpc.rpc_async(names[number % 2], func, args=(number, 1), timeout=CALL_SECONDS)
            for number in range(30)
        ]
        assert [future.wait() for future in futures] == list(range(1, 31))

    def small(self, to: str, other: str) -> None:
        """Call with a tensor of 100 KB."""
        self._tensor(to, self._small)

    def large(self, to: str, other: str) -> None:
        """Call with a tensor of 4 MB."""
        self._tensor(to, self._large)

    def _tensor(self, to: str, tensor: torch.Tensor) -> None:
        number = self._some.randrange(100)
        result = rpc.rpc_sync(to, nap_and_add, args=(tensor, number), timeout=CALL_SECONDS)
        assert torch.equal(result, tensor + number)

    def remote(self, to: str, other: str) -> None:
        """Make an RRef, fetch its value, and have another worker fetch it."""
        rref = rpc.remote(to, nap_and_add, args=(self._small, 1), timeout=CALL_SECONDS)
        assert torch.equal(rref.to_here(CALL_SECONDS), self._small + 1)
        fetched = rpc.rpc_sync(other, fetch, args=(rref,), timeout=CALL_SECONDS)
        assert torch.equal(fetched, self._small + 1)

    def elsewhere(self, to: str, other: str) -> None:
        """Call a function that calls another worker."""
        assert rpc.rpc_sync(to, add_elsewhere, args=(other, 3, 4), timeout=CALL_SECONDS) == 7

    def backward(self, to: str, other: str) -> None:
        """Run a backward pass over two workers."""
        x = torch.rand(8, 8, requires_grad=True)
        with autograd.context() as context_id:
            one = rpc.rpc_sync(to, step_elsewhere, args=(other, x, self._weight))
            two = rpc.rpc_async(other, step, args=(one + x, self._weight))
            autograd.backward(context_id, [(two.wait() + one).sum()])
            found = autograd.get_gradients(context_id)[x]
        one = step(x, self._weight) + x
        (expected,) = torch.autograd.grad((step(one + x, self._weight) + one).sum(), x)
        torch.testing.assert_close(found, expected)


def fetch(rref: Any) -> Any:
    """Return the value of an RRef."""
    return rref.to_here(CALL_SECONDS)


def measure() -> dict[str, dict[str, float]]:
    """Return what each process uses."""
    found = {name: rpc.rpc_sync(name, usage, timeout=CALL_SECONDS) for name in NAMES}
    return {**found, "driver": usage()}


def main() -> int:
    """Run; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--switch", type=float, default=1e-5, help="interval of threads, seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(options.seconds + 4 * CALL_SECONDS, exit=True)
    rpc.start_workers(NAMES)
    for name in NAMES:
        rpc.rpc_sync(name, sys.setswitchinterval, args=(options.switch,))
    sys.setswitchinterval(options.switch)
    begin = time.monotonic()
    callers = [Caller(seed, begin + options.seconds) for seed in range(options.threads)]
    threads = [threading.Thread(target=caller.run, daemon=True) for caller in callers]
    for thread in threads:
        thread.start()
    first: dict[str, dict[str, float]] = {}
    while any(thread.is_alive() for thread in threads):
        threads[0].join(options.seconds / 10)
        now = measure()
        first = first or now
        _report(time.monotonic() - begin, callers, now)
    time.sleep(2)
    grown = _grown(first, measure())
    errors = [error for caller in callers for error in caller.errors]
    sys.setswitchinterval(0.005)
    rpc.shutdown()
    for line in [*errors, *grown]:
        print(line, flush=True)
    total = sum(sum(caller.made.values()) for caller in callers)
    print(f"{total} rounds of calls, {len(errors)} errors, {len(grown)} numbers that grew")
    return 1 if errors or grown else 0


def _report(seconds: float, callers: list[Caller], now: dict[str, dict[str, float]]) -> None:
    made: collections.Counter[str] = collections.Counter()
    for caller in callers:
        made.update(caller.made)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(made.items()))
    print(f"{seconds:.0f} s: {counts}", flush=True)
    for name, used in now.items():
        values = ", ".join(f"{value:.0f} {what}" for what, value in used.items())
        print(f"    {name}: {values}", flush=True)


def _grown(first: dict[str, dict[str, float]], last: dict[str, dict[str, float]]) -> list[str]:
    return [
        f"{name}: {what} grew from {before[what]:.0f} to {last[name][what]:.0f}"
        for name, before in first.items()
        for what, slack in SLACK.items()
        if last[name][what] > before[what] + slack
    ]


if __name__ == "__main__":
    sys.exit(main())
