"""Time objects of the store beside Ray's own ways: putting and reading tensors, calls with them.

    python tests/benchmarks/bench_objects.py [--rounds N]

A worker of rayrpc and an actor of Ray, on one node; each round times each way once, in turns; the
table has medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import ray
import torch
from torch.futures import Future
from turns import medians

import rayrpc as rpc

SIZES = {"8 B": 2, "1 MB": 1 << 18, "64 MB": 1 << 24}  # tensors of so many floats


def length(x: torch.Tensor) -> int:
    return len(x)


def actor() -> Any:
    class Peer:
        def length(self, x: torch.Tensor) -> int:
            return len(x)

    remote: Any = ray.remote(num_cpus=0)
    return remote(Peer).remote()


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def pairs(
    peer: Any, tensor: torch.Tensor
) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Return what is timed, by name: Ray's way, and that of rayrpc."""
    future, ref = done(tensor), ray.put(tensor)
    ours = rpc.object_ref(future)
    return {
        "put and read": (
            lambda: ray.get(ray.put(tensor)),
            lambda: ray.get(rpc.object_ref(future)),
        ),
        "a call with an object": (
            lambda: ray.get(peer.length.remote(ref)),
            lambda: rpc.rpc_sync("worker", length, args=(ours,)),
        ),
        "a Future of an object": (
            lambda: ref.future().result(),
            lambda: rpc.as_future(ours).wait(),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Objects of Ray's store, beside Ray's own ways.")
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    rpc.start_workers(["worker"])
    peer = actor()
    print(f"{'ms, medians':30} {'Ray':>8} {'rayrpc':>8} {'times faster':>13}")
    for size, floats in SIZES.items():
        for name, ways in pairs(peer, torch.rand(floats)).items():
            theirs, mine = (1e3 * seconds for seconds in medians(ways, rounds, warm_up=3))
            print(f"{name + ', ' + size:30} {theirs:8.2f} {mine:8.2f} {theirs / mine:13.1f}")
    rpc.shutdown()


if __name__ == "__main__":
    main()
