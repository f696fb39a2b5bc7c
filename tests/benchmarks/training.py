"""Train something with distributed autograd, and print how fast: a program for the benchmark.

    python tests/benchmarks/training.py MODEL [--steps N]
    rayrpc run tests/benchmarks/training.py MODEL [--steps N]

A step is a forward and a backward pass and an update.  Models: ``mlp``, its two halves on two
workers; ``rnn``, a network here between an embedding and a decoder there, as in torch's tutorial;
``table``, an embedding table and four trainers.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F

TRAINERS = 4


class Part:
    """A module on its worker."""

    def __init__(self, module: nn.Module) -> None:
        torch.set_num_threads(1)
        self.module = module

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.module(inputs)

    def parameters(self) -> list[rpc.RRef]:
        return [rpc.RRef(parameter) for parameter in self.module.parameters()]


def part(worker: str, module: nn.Module) -> rpc.RRef:
    return rpc.remote(worker, Part, args=(module,))


def loop(steps: int, forward, parameters: list[rpc.RRef]) -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01)
    for _ in range(steps):
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [forward()])
            optimizer.step(context_id)


def mlp(steps: int) -> int:
    halves = [
        part("worker1", nn.Sequential(nn.Linear(64, 256), nn.ReLU())),
        part("worker2", nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))),
    ]
    inputs, labels = torch.randn(64, 64), torch.randint(10, (64,))

    def forward() -> torch.Tensor:
        middle = halves[0].rpc_sync().forward(inputs)
        return F.cross_entropy(halves[1].rpc_sync().forward(middle), labels)

    loop(steps, forward, [rref for half in halves for rref in half.rpc_sync().parameters()])
    return steps


def rnn(steps: int) -> int:
    words, width, batch, length = 200, 64, 16, 12
    embedding = part("worker1", nn.Embedding(words, width))
    decoder = part("worker1", nn.Linear(width, words))
    here = nn.LSTM(width, width)
    text = torch.randint(words, (length + 1, batch))

    def forward() -> torch.Tensor:
        out, _ = here(embedding.rpc_sync().forward(text[:-1]))
        return F.cross_entropy(decoder.rpc_sync().forward(out).flatten(0, 1), text[1:].flatten())

    parameters = embedding.rpc_sync().parameters() + decoder.rpc_sync().parameters()
    loop(steps, forward, parameters + [rpc.RRef(p) for p in here.parameters()])
    return steps


def train_on_table(table: rpc.RRef, steps: int, seed: int) -> None:
    """Run on a trainer."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    dense = nn.Linear(32, 8)

    def forward() -> torch.Tensor:
        items = torch.randint(1000, (64,))
        return F.cross_entropy(dense(table.rpc_sync().forward(items)), items % 8)

    parameters = table.rpc_sync().parameters() + [rpc.RRef(p) for p in dense.parameters()]
    loop(steps, forward, parameters)


def table(steps: int) -> int:
    rows = part("worker0", nn.Embedding(1000, 32))
    each = steps // TRAINERS
    torch.futures.wait_all(
        [
            rpc.rpc_async(f"worker{n}", train_on_table, args=(rows, each, n), timeout=0)
            for n in range(1, TRAINERS + 1)
        ]
    )
    return each * TRAINERS


MODELS = {"mlp": (mlp, 3), "rnn": (rnn, 2), "table": (table, TRAINERS + 1)}
WARM_UP = 8


def run(rank: int, args: argparse.Namespace) -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29560")
    torch.set_num_threads(1)
    train, size = MODELS[args.model]
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    if rank == 0:
        train(WARM_UP)
        start = time.perf_counter()
        steps = train(args.steps)
        print(f"{steps} steps in {time.perf_counter() - start:.3f} s", flush=True)
    rpc.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description="Training with distributed autograd.")
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    mp.spawn(run, args=(args,), nprocs=MODELS[args.model][1])


if __name__ == "__main__":
    main()
