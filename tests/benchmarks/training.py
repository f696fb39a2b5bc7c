"""Train something with distributed autograd: the program of ``bench_training.py``.

    python tests/benchmarks/training.py MODEL [--steps N]
    rayrpc run tests/benchmarks/training.py MODEL [--steps N]

A step is a forward and a backward pass and an update.  Models: ``mlp``, its two halves on two
workers; ``rnn``, a network here between an embedding and a decoder there, as in torch's tutorial;
``table``, an embedding table and four trainers.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F

TRAINERS = 4
AGAIN = 4  # steps before a turn is timed: others had the processor

#: trains for so many steps, and returns how many they were
Train = Callable[[int], int]


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


def trainer(forward: Callable[[], torch.Tensor], parameters: list[rpc.RRef]) -> Train:
    """Return what trains a model for so many steps."""
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.01)

    def train(steps: int) -> int:
        for _ in range(steps):
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [forward()])
                optimizer.step(context_id)
        return steps

    return train


def mlp() -> Train:
    halves = [
        part("worker1", nn.Sequential(nn.Linear(64, 256), nn.ReLU())),
        part("worker2", nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))),
    ]
    inputs, labels = torch.randn(64, 64), torch.randint(10, (64,))

    def forward() -> torch.Tensor:
        middle = halves[0].rpc_sync().forward(inputs)
        return F.cross_entropy(halves[1].rpc_sync().forward(middle), labels)

    return trainer(forward, [rref for half in halves for rref in half.rpc_sync().parameters()])


def rnn() -> Train:
    words, width, batch, length = 200, 64, 16, 12
    embedding = part("worker1", nn.Embedding(words, width))
    decoder = part("worker1", nn.Linear(width, words))
    here = nn.LSTM(width, width)
    text = torch.randint(words, (length + 1, batch))

    def forward() -> torch.Tensor:
        out, _ = here(embedding.rpc_sync().forward(text[:-1]))
        return F.cross_entropy(decoder.rpc_sync().forward(out).flatten(0, 1), text[1:].flatten())

    parameters = embedding.rpc_sync().parameters() + decoder.rpc_sync().parameters()
    return trainer(forward, parameters + [rpc.RRef(p) for p in here.parameters()])


class TableTrainer:
    """One of the trainers of a table, on its worker."""

    def __init__(self, table: rpc.RRef, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        dense = nn.Linear(32, 8)

        def forward() -> torch.Tensor:
            items = torch.randint(1000, (64,))
            return F.cross_entropy(dense(table.rpc_sync().forward(items)), items % 8)

        parameters = table.rpc_sync().parameters() + [rpc.RRef(p) for p in dense.parameters()]
        self._train = trainer(forward, parameters)

    def train(self, steps: int) -> int:
        return self._train(steps)


def table() -> Train:
    rows = part("worker0", nn.Embedding(1000, 32))
    trainers = [
        rpc.remote(f"worker{n}", TableTrainer, args=(rows, n)) for n in range(1, TRAINERS + 1)
    ]

    def train(steps: int) -> int:
        each = -(-steps // TRAINERS)
        done = [trainer.rpc_async(timeout=0).train(each) for trainer in trainers]
        return sum(torch.futures.wait_all(done))

    return train


MODELS = {"mlp": (mlp, 3), "rnn": (rnn, 2), "table": (table, TRAINERS + 1)}
WARM_UP = 40


def run(rank: int, args: argparse.Namespace) -> None:
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29560")
    torch.set_num_threads(1)
    build, size = MODELS[args.model]
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    if rank == 0:
        train = build()
        train(WARM_UP)
        if args.turns:
            take_turns(train, args.turns)
        else:
            start = time.perf_counter()
            steps = train(args.steps)
            print(f"{steps} steps in {time.perf_counter() - start:.3f} s", flush=True)
        del train  # and its RRefs, before the group ends
    rpc.shutdown()


def take_turns(train: Train, path: str) -> None:
    """Train when asked to, by a line with the number of steps; answer with steps a second."""
    with socket.socket(socket.AF_UNIX) as asker:
        asker.connect(path)
        with asker.makefile("rw") as lines:
            print(flush=True, file=lines)  # ready
            for line in lines:
                train(AGAIN)
                start = time.perf_counter()
                steps = train(int(line))
                print(steps / (time.perf_counter() - start), flush=True, file=lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training with distributed autograd.")
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--turns", metavar="SOCKET", help="take turns: train when asked there")
    args = parser.parse_args()
    mp.spawn(run, args=(args,), nprocs=MODELS[args.model][1])


if __name__ == "__main__":
    main()
