"""An ordered server: many writers of one value, none of whom overwrites another.

Each process measures something (here: rolls dice) and keeps the statistics of all processes
together up to date in an ordered server. The server accepts a new version only from a process that
has pulled the newest one; a process that is refused pulls it and tries again. No lock is held
between the processes.

Run::

    rayrpc run examples/ordered_server.py
    rayrpc run examples/ordered_server.py --clients 4 --rounds 50

The program has the API of ``machin.parallel``. The exit status is 1 if a roll was lost.
"""

from __future__ import annotations

import argparse
import random
from typing import NamedTuple

import torch.multiprocessing as mp

from rayrpc.parallel.distributed import World
from rayrpc.parallel.server import OrderedServerSimple, OrderedServerSimpleImpl

KEY = "statistics"


class Statistics(NamedTuple):
    """Of numbers seen: their number, and the sums of them and of their squares."""

    number: int = 0
    total: float = 0
    squares: float = 0

    def with_(self, number: float) -> Statistics:
        return Statistics(self.number + 1, self.total + number, self.squares + number**2)

    def __str__(self) -> str:
        mean = self.total / self.number
        variance = self.squares / self.number - mean**2
        return f"{self.number} rolls, mean {mean:.3f}, variance {variance:.3f}"


def pull(server: OrderedServerSimple, version: int | None = None) -> tuple[Statistics, int]:
    found = server.pull(KEY, version)
    assert found is not None
    return found


def add(server: OrderedServerSimple, number: float) -> int:
    """Add a number to the statistics; return how often that was refused."""
    refused = 0
    while True:
        found, version = pull(server)
        if server.push(KEY, found.with_(number), version + 1, version):
            return refused
        refused += 1


def run(rank: int, args: argparse.Namespace) -> None:
    names = [f"client{number}" for number in range(args.clients)]
    world = World(
        names[rank],
        rank,
        args.clients,
        init_dist=False,
        rpc_init_method=f"tcp://localhost:{args.port}",
    )
    group = world.create_rpc_group("dice", names)
    if rank == 0:
        OrderedServerSimpleImpl("server", group, version_depth=2)
    group.barrier()
    server = group.get_paired("server").to_here()
    if rank == 0:
        server.push(KEY, Statistics(), 0, None)
    group.barrier()

    dice = random.Random(rank)
    refused = sum(add(server, dice.randint(1, 6)) for _ in range(args.rounds))
    print(f"{names[rank]}: {args.rounds} rolls, {refused} pushes refused")
    group.barrier()

    found, version = pull(server)
    before, _ = pull(server, version - 1)  # so many old versions can be had: version_depth
    if rank == 0:
        print(f"version {version}: {found}")
    group.barrier()
    world.stop()
    if found.number != args.clients * args.rounds or before.number != found.number - 1:
        raise RuntimeError(f"rolls were lost: {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Statistics in an ordered server.")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=100, help="rolls of each client")
    parser.add_argument("--port", type=int, default=9101)
    args = parser.parse_args()
    mp.spawn(run, args=(args,), nprocs=args.clients)


if __name__ == "__main__":
    main()
