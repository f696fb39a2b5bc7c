"""Time pools: ``rayrpc.parallel.pool.Pool`` beside ``ray.util.multiprocessing.Pool``.

    python tests/benchmarks/bench_pool.py [--workers N] [--rounds N]

Both have the same number of workers on the same cluster.  Rounds alternate; the table has medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import ray
import ray.util.multiprocessing
import torch

from rayrpc.parallel.pool import Pool

ELEMENTS = 4 << 20  # 16 MB of floats


def small(x: int) -> int:
    return x + 1


def first(tensor: torch.Tensor) -> float:
    return float(tensor[0])


def map_small(pool: Any) -> None:
    assert pool.map(small, range(10_000))[-1] == 10_000


def apply_small(pool: Any) -> None:
    results = [pool.apply_async(small, (i,)) for i in range(10_000)]
    assert [result.get() for result in results][-1] == 10_000


def map_tensors(pool: Any) -> None:
    tensors = [torch.full((ELEMENTS,), float(i)) for i in range(10)]
    for _ in range(10):
        assert pool.map(first, tensors, chunksize=1) == list(range(10))


ROWS: dict[str, Callable[[Any], None]] = {
    "10,000 small tasks, map": map_small,
    "10,000 small tasks, apply_async": apply_small,
    "100 tasks of 16 MB": map_tensors,
}


def seconds(run: Callable[[Any], None], pool: Any) -> float:
    start = time.perf_counter()
    run(pool)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="Pools beside Ray's own.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    ray.init(num_cpus=2 * args.workers, include_dashboard=False, log_to_driver=False)
    with Pool(args.workers) as ours, ray.util.multiprocessing.Pool(args.workers) as rays:
        for pool in (ours, rays):
            pool.map(small, range(100), chunksize=1)
        for name, run in ROWS.items():
            pairs = [(seconds(run, ours), seconds(run, rays)) for _ in range(args.rounds)]
            one, other = (statistics.median(times) for times in zip(*pairs, strict=True))
            print(
                f"{name:32} {one * 1e3:8.1f} ms, Ray's pool {other * 1e3:9.1f} ms: "
                f"{other / one:.1f} times as fast",
                flush=True,
            )
    ray.shutdown()


if __name__ == "__main__":
    main()
