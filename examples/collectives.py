"""Collective communication: processes estimate pi together, by throwing darts.

The first process chooses a seed and broadcasts it. Each throws its own darts, the hits are
summed everywhere (``all_reduce``), the processes' own estimates are gathered (``all_gather``), and
the first process receives reports as they arrive (``recv`` of any source).

Run::

    rayrpc run examples/collectives.py
    rayrpc run examples/collectives.py --processes 4 --darts 5000000

The program has the API of ``machin.parallel``. The exit status is 1 if the estimate is off.
"""

from __future__ import annotations

import argparse
import math

import torch
import torch.multiprocessing as mp

from rayrpc.parallel.distributed import CollectiveGroup, World, get_cur_name


def throw(darts: int, seed: int) -> int:
    """Return how many darts, thrown at a square, hit the quarter of a circle in it."""
    points = torch.rand(darts, 2, generator=torch.Generator().manual_seed(seed))
    return int((points.square().sum(1) < 1).sum())


def estimate(group: CollectiveGroup, rank: int, darts: int) -> float:
    seed = torch.tensor([20 if rank == 0 else 0])
    group.broadcast(seed, 0)
    own = torch.tensor([throw(darts, int(seed) + rank), darts], dtype=torch.float64)

    total = own.clone()
    group.all_reduce(total)
    shares = [torch.empty_like(own) for _ in range(group.size())]
    group.all_gather(shares, own)
    if rank == 0:
        print("each:    ", ", ".join(f"{4 * hits / thrown:.4f}" for hits, thrown in shares))
        report = torch.empty(1)
        for _ in range(group.size() - 1):
            sender = group.recv(report)  # from any source
            print(f"process {sender} is {float(report):+.4f} off")
    else:
        group.send(torch.tensor([4 * own[0] / own[1] - math.pi]).float(), 0)
    group.barrier()
    return float(4 * total[0] / total[1])


def run(rank: int, args: argparse.Namespace) -> None:
    world = World(
        f"thrower{rank}",
        rank,
        args.processes,
        dist_init_method=f"tcp://localhost:{args.port}",
        rpc_init_method=f"tcp://localhost:{args.port + 1}",
    )
    group = world.create_collective_group(list(range(args.processes)))
    found = estimate(group, rank, args.darts)
    if rank == 0:
        print(f"together: {found:.4f}, says {get_cur_name()}")
    group.destroy()
    world.stop()
    if abs(found - math.pi) > args.tolerance:
        raise RuntimeError(f"{found:.4f} is further from pi than {args.tolerance}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Estimate pi with collective communication.")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--darts", type=int, default=1_000_000, help="of each process")
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--port", type=int, default=9100, help="this one and the next are used")
    args = parser.parse_args()
    mp.spawn(run, args=(args,), nprocs=args.processes)


if __name__ == "__main__":
    main()
