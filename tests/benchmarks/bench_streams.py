"""Time streams beside batches of ``rpc_async``, and beside Ray's streaming generators.

    python tests/benchmarks/bench_streams.py [--rounds N]

A worker of rayrpc and an actor of Ray, on one node, hand out the same values; each round times each
way once, in turns; the table has medians.  A batch has as many calls as the window has values.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import ray
import torch
from turns import medians

import rayrpc as rpc

#: what is handed out (floats of a tensor; 0: an int), how many values a round, and the window
LOADS = {
    "int, window 8": (0, 2048, 8),
    "int, window 64": (0, 2048, 64),
    "8 B tensor, window 8": (2, 2048, 8),
    "8 B tensor, window 64": (2, 2048, 64),
    "1 MB tensor, window 8": (1 << 18, 200, 8),
    "16 MB tensor, window 8": (1 << 22, 32, 8),
}


def value_of(floats: int) -> Any:
    return torch.ones(floats) if floats else 1


def values(floats: int, count: int) -> Iterator[Any]:
    value = value_of(floats)
    for _ in range(count):
        yield value


def actor() -> Any:
    class Peer:
        def values(self, floats: int, count: int) -> Iterator[Any]:
            value = torch.ones(floats) if floats else 1
            for _ in range(count):
                yield value

    remote: Any = ray.remote(num_cpus=0)
    return remote(Peer).remote()


_made: dict[int, Any] = {}


def value(floats: int) -> Any:
    return _made.setdefault(floats, value_of(floats))


def ways(peer: Any, floats: int, count: int, window: int) -> list[Callable[[], int]]:
    """Return what is timed: Ray's generators, batches of calls, a stream."""

    def by_ray() -> int:
        refs = peer.values.options(num_returns="streaming").remote(floats, count)
        return sum(1 for ref in refs if ray.get(ref) is not None)

    def by_batches() -> int:
        got = 0
        for _ in range(count // window):
            calls = [rpc.rpc_async("worker", value, args=(floats,)) for _ in range(window)]
            got += sum(1 for call in calls if call.wait() is not None)
        return got

    def by_stream() -> int:
        return sum(1 for _ in rpc.stream("worker", values, args=(floats, count), window=window))

    return [by_ray, by_batches, by_stream]


def main() -> None:
    parser = argparse.ArgumentParser(description="Streams, beside batches of calls and Ray's own.")
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    rpc.start_workers(["worker"])
    peer = actor()
    print(f"{'us a value, medians':26} {'Ray':>8} {'batches':>8} {'stream':>8} {'faster':>8}")
    for name, load in LOADS.items():
        _, count, _ = load
        found = medians(ways(peer, *load), rounds, warm_up=1)
        theirs, batches, stream = (1e6 * seconds / count for seconds in found)
        row = f"{theirs:8.1f} {batches:8.1f} {stream:8.1f} {batches / stream:8.2f}"
        print(f"{name:26} {row}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    import bench_streams  # the worker imports its functions by their names

    bench_streams.main()
