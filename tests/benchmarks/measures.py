"""The rows of the benchmark: what is timed, and how, whatever carries the calls.

A row is a loop over a ``Calls``; a system takes part by being one.  Only the standard library is
imported at the top, so that a plain Ray actor can run the loops too.
"""

from __future__ import annotations

import abc
import concurrent.futures
import gc
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "MODELS",
    "ROWS",
    "SMALL_LOADS",
    "Calls",
    "Effort",
    "Quantity",
    "Row",
    "floats",
    "measure",
]

BATCH = 500
THREADS = 8
MEGABYTES = (1, 16, 64, 256)
HUGE = 256  # MB: takes GBs of memory, and few samples do
FEW_SAMPLES = 4
STATE_TENSORS, STATE_FLOATS = 60, 4096

#: what a call takes and gives back: an int, tensors of two floats; beside these there are
#: "state-dict" and, as "16MB", tensors of so many MB
SMALL_LOADS = ("int", "tensor", "add")


def floats(load: str) -> dict[str, int]:
    """Return the sizes, in float32, of the tensors of a load that is not a small one, by name."""
    if load == "state-dict":
        return {f"layer{number}.weight": STATE_FLOATS for number in range(STATE_TENSORS)}
    return {"": int(load.removesuffix("MB")) * 2**20 // 4}


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Args:
        seconds: of each measure, at least.
        warm_up: seconds of calls before, at least.
        samples: of each measure, at least.
    """

    seconds: float = 1.0
    warm_up: float = 0.3
    samples: int = 7


class Calls(abc.ABC):
    """Make calls to one callee."""

    @abc.abstractmethod
    def prepare(self, load: str) -> tuple[Any, ...]:
        """Return the arguments of the methods below for a load; not timed."""

    @abc.abstractmethod
    def sync(self, *prepared: Any) -> Any:
        """Call and return the result."""

    @abc.abstractmethod
    def start(self, *prepared: Any) -> Any:
        """Call and return at once, with something to wait for."""

    @abc.abstractmethod
    def wait(self, started: list[Any]) -> None:
        """Take the results of calls that were started."""

    @abc.abstractmethod
    def keep_and_fetch(self, *prepared: Any) -> Any:
        """Have the callee keep the result of a call, and fetch it."""

    @abc.abstractmethod
    def method(self) -> Callable[[], Any]:
        """Return a call of a method of an object that lives at the callee."""


@dataclass(frozen=True)
class Quantity:
    """One thing that is measured.

    Args:
        title: in the table.
        unit: of the result; "/s" where more is better.
    """

    title: str
    unit: str

    def cost(self, result: float) -> float:
        """Return something proportional to the time per call."""
        return 1 / result if self.unit == "/s" else result


#: what is trained, by ``bench_training.py``
MODELS = {
    "autograd-mlp": Quantity("distributed autograd, MLP split over 2 workers, steps", "/s"),
    "autograd-rnn": Quantity("distributed autograd, LSTM with remote parts, steps", "/s"),
    "autograd-table": Quantity("distributed autograd, table with 4 trainers, steps", "/s"),
}


@dataclass(frozen=True)
class Row(Quantity):
    """A loop over calls.

    Args:
        run: measures.
        reference: row that the same process measures right after, to tell what is possible; two
            times its time is the least that this row can take.
        memory: GB that it takes, where that is much.
    """

    run: Callable[[Calls, Effort], float]
    reference: str = ""
    memory: int = 0


def measure(row: str, calls: Calls, effort: Effort) -> float:
    """Return the result of a row, in its unit."""
    with _no_collection():
        return ROWS[row].run(calls, effort)


@contextmanager
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _times(call: Callable[[], Any], seconds: float, samples: int) -> list[float]:
    clock = time.perf_counter
    times: list[float] = []
    end = clock() + seconds
    while len(times) < samples or clock() < end:
        start = clock()
        call()
        times.append(clock() - start)
    return times


def _median(call: Callable[[], Any], effort: Effort) -> float:
    """Return the median time of a call in seconds."""
    _times(call, effort.warm_up, 1)
    return statistics.median(_times(call, effort.seconds, effort.samples))


def _latency(load: str, scale: float) -> Callable[[Calls, Effort], float]:
    def run(calls: Calls, effort: Effort) -> float:
        prepared = calls.prepare(load)
        return _median(lambda: calls.sync(*prepared), effort) * scale

    return run


def _huge(calls: Calls, effort: Effort) -> float:
    return _latency(f"{HUGE}MB", 1e3)(calls, _few(effort))


def _few(effort: Effort) -> Effort:
    return replace(effort, samples=min(effort.samples, FEW_SAMPLES))


def _memcpy(_: Calls, effort: Effort) -> float:
    """Measure one ``copy_`` into memory that is there, by as many threads as torch has here."""
    import torch

    source, target = (torch.ones(HUGE * 2**20 // 4) for _ in range(2))
    return _median(lambda: target.copy_(source), effort) * 1e3


def _rate(load: str) -> Callable[[Calls, Effort], float]:
    def run(calls: Calls, effort: Effort) -> float:
        prepared = calls.prepare(load)

        def batch() -> None:
            calls.wait([calls.start(*prepared) for _ in range(BATCH)])

        return BATCH / _median(batch, effort)

    return run


def _keep_rate(calls: Calls, effort: Effort) -> float:
    prepared = calls.prepare("int")
    return 1 / _median(lambda: calls.keep_and_fetch(*prepared), effort)


def _method(calls: Calls, effort: Effort) -> float:
    return _median(calls.method(), effort) * 1e6


def _threads_rate(calls: Calls, effort: Effort) -> float:
    prepared = calls.prepare("int")
    ready = threading.Barrier(THREADS + 1)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:

        def loop(seconds: float) -> int:
            ready.wait()
            return len(_times(lambda: calls.sync(*prepared), seconds, 1))

        def rate(seconds: float) -> float:
            loops = [pool.submit(loop, seconds) for _ in range(THREADS)]
            ready.wait()
            start = time.perf_counter()
            return sum(each.result() for each in loops) / (time.perf_counter() - start)

        rate(effort.warm_up)
        return rate(effort.seconds)


ROWS = {
    "sync-int": Row("rpc_sync, an int, p50", "us", _latency("int", 1e6)),
    "sync-tensor": Row("rpc_sync, a tensor of 2 floats, p50", "us", _latency("tensor", 1e6)),
    "method": Row("RRef method call, p50", "us", _method),
    "async-int": Row(f"rpc_async, batches of {BATCH}", "/s", _rate("int")),
    "async-add": Row("rpc_async of torch.add, small tensors", "/s", _rate("add")),
    "remote": Row("remote + to_here, one by one", "/s", _keep_rate),
    "threads": Row(f"rpc_sync from {THREADS} threads", "/s", _threads_rate),
    "state-dict": Row(
        f"dict of {STATE_TENSORS} tensors of 16 KB there and back, p50",
        "ms",
        _latency("state-dict", 1e3),
    ),
    **{
        f"{size}MB": Row(f"{size} MB tensor there and back, p50", "ms", _latency(f"{size}MB", 1e3))
        for size in MEGABYTES
        if size < HUGE
    },
    f"{HUGE}MB": Row(
        f"{HUGE} MB tensor there and back, p50", "ms", _huge, reference="memcpy", memory=4
    ),
    "memcpy": Row(f"{HUGE} MB memcpy (torch's copy_), p50", "ms", _memcpy, memory=1),
}
