"""A gradient server: processes train one model asynchronously, each on data of its own.

Every process pushes its gradients to one of the secondary reducers, chosen at random. A reducer
takes the mean of as many as come first, and passes it on to the primary one, which has the
optimizer take a step and publishes the parameters; the learning rate falls meanwhile. No process
waits for a slow one.

Run::

    rayrpc run examples/gradient_server.py
    rayrpc run examples/gradient_server.py --processes 4 --steps 200

The program has the API of ``machin.parallel``. The exit status is 1 if the accuracy stays below
``--min-accuracy``.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn import functional as F

from rayrpc.parallel.distributed import World
from rayrpc.parallel.server import PushPullGradServer, PushPullGradServerImpl

BATCH_SIZE = 64


def make_spirals(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """``count`` points on three arms of a spiral, and which arm each is on."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    radius = 0.1 + 0.9 * torch.rand(count, generator=generator)
    angle = 4 * radius + labels * (2 * math.pi / 3)
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    return points + 0.02 * torch.randn(count, 2, generator=generator), labels


def make_model() -> nn.Module:
    torch.manual_seed(0)  # everybody starts with the same parameters
    return nn.Sequential(
        nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3)
    )


def train(server: PushPullGradServer, model: nn.Module, steps: int, seed: int) -> None:
    points, labels = make_spirals(1024, seed)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        sample = torch.randint(len(points), (BATCH_SIZE,), generator=generator)
        F.cross_entropy(model(points[sample]), labels[sample]).backward()
        server.push(model)  # and pulls the newest parameters


def accuracy(model: nn.Module) -> float:
    points, labels = make_spirals(2000, seed=10_000)
    with torch.no_grad():
        return float((model(points).argmax(1) == labels).float().mean())


def run(rank: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    names = [f"process{number}" for number in range(args.processes)]
    world = World(
        names[rank],
        rank,
        args.processes,
        init_dist=False,
        rpc_init_method=f"tcp://localhost:{args.port}",
    )
    group = world.create_rpc_group("training", names)
    reducer = PushPullGradServerImpl(
        "server",
        group,
        primary_reducer=names[0],
        secondary_reducers=names,
        reduce_method="mean",
        reduce_batch_size=2,
    )
    if rank == 0:
        managed = make_model()
        optimizer = torch.optim.Adam(managed.parameters(), lr=args.lr)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.7)
        reducer.manage_model(managed, optimizer, decay)
    reducer.start()
    group.barrier()

    server = group.get_paired("server").to_here()
    model = make_model()
    start = time.perf_counter()
    train(server, model, args.steps, seed=rank)
    reducer.watch()
    group.barrier()
    server.pull(model)
    reached = accuracy(model)
    if rank == 0:
        seconds, pushes = time.perf_counter() - start, args.steps * args.processes
        print(
            f"{pushes} gradients, {managed.pp_version} optimizer steps in {seconds:.1f} s "
            f"({pushes / seconds:.0f} gradients/s): accuracy {reached:.1%}"
        )
    group.barrier()
    reducer.stop()
    world.stop()
    if reached < args.min_accuracy:
        raise RuntimeError(f"accuracy {reached:.1%} is below {args.min_accuracy:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train asynchronously with a gradient server.")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300, help="gradients of each process")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--min-accuracy", type=float, default=0.9)
    parser.add_argument("--port", type=int, default=9101)
    args = parser.parse_args()
    mp.spawn(run, args=(args,), nprocs=args.processes)


if __name__ == "__main__":
    main()
