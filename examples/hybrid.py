"""Data parallelism beside RPC: trainers with DDP, and an embedding on a parameter server.

Rank 0 ("master") puts an embedding on the last rank ("ps") as a ``RemoteModule``, and sends that to
the trainers. Each trainer has a dense layer of its own, kept equal on all of them by DDP over gloo.
A step of a trainer is a forward pass through both, a backward pass in a context of distributed
autograd (DDP averages the gradients of the dense layers, those of the embedding go to the server),
and a step of its ``DistributedOptimizer`` on both.

The same model is trained in this one process with the same batches, and the exit status is 1 if a
loss differs by more than ``--tolerance``.

Run::

    rayrpc run examples/hybrid.py
    rayrpc run examples/hybrid.py --trainers 3 --steps 100

The program is plain ``torch.distributed``: ``python examples/hybrid.py`` runs it on stock torch.
With ``--output FOLDER`` it draws the losses into ``hybrid.png`` there.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH, CLASSES = 100, 16, 5
BATCH, WORDS_PER_ITEM = 32, 6


class Embedding(nn.EmbeddingBag):
    """The same one, wherever it is made."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(WORDS, WIDTH, mode="mean")


def make_dense(seed: int) -> nn.Module:
    torch.manual_seed(seed + 1)
    return nn.Linear(WIDTH, CLASSES)


def make_batch(trainer: int, step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Items of some words, and the class that the first one belongs to."""
    generator = torch.Generator().manual_seed(seed + 1000 * trainer + step)
    words = torch.randint(WORDS, (BATCH, WORDS_PER_ITEM), generator=generator)
    return words, words[:, 0] % CLASSES


def with_progress(steps: range) -> Iterable[int]:
    """The steps, with a progress bar where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    bar: Iterable[int] = tqdm(steps, desc="step", unit="step")
    return bar


def train(
    trainer: int, embedding: RemoteModule, store: str, args: argparse.Namespace
) -> list[float]:
    """Runs on a trainer; returns its losses."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=trainer, world_size=args.trainers
    )
    dense = DistributedDataParallel(make_dense(args.seed))
    parameters = embedding.remote_parameters() + [rpc.RRef(p) for p in dense.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=args.lr)
    losses = []
    steps = range(args.steps)
    for step in with_progress(steps) if trainer == 0 else steps:
        words, labels = make_batch(trainer, step, args.seed)
        with dist_autograd.context() as context_id:
            # forward(): torch 2.13 cannot call a RemoteModule that was sent like a function
            loss = F.cross_entropy(dense(embedding.forward(words)), labels)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
        dist.barrier()  # nobody looks at the embedding while others change it: so runs are alike
    dist.destroy_process_group()
    return losses


def train_in_one_process(args: argparse.Namespace) -> list[list[float]]:
    embedding, dense = Embedding(args.seed), make_dense(args.seed)
    losses: list[list[float]] = [[] for _ in range(args.trainers)]
    for step in range(args.steps):
        embedding.zero_grad()
        dense.zero_grad()
        for trainer in range(args.trainers):
            words, labels = make_batch(trainer, step, args.seed)
            loss = F.cross_entropy(dense(embedding(words)), labels)
            loss.backward()
            losses[trainer].append(loss.item())
        with torch.no_grad():
            for parameter in embedding.parameters():  # each trainer takes a step on the server
                assert parameter.grad is not None
                parameter.sub_(args.lr * parameter.grad)
            for parameter in dense.parameters():  # DDP takes the mean
                assert parameter.grad is not None
                parameter.sub_(args.lr * parameter.grad / args.trainers)
    return losses


def draw(losses: list[list[float]], expected: list[list[float]], folder: Path) -> None:
    """The losses of all trainers, and those in one process, as a PNG."""
    try:
        import matplotlib
    except ImportError as exc:
        raise RuntimeError("--output needs matplotlib: pip install 'rayrpc[examples]'") from exc
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for trainer, (mine, theirs) in enumerate(zip(losses, expected, strict=True)):
        axes.plot(mine, linewidth=4, alpha=0.4, label=f"trainer{trainer}")
        axes.plot(theirs, "--", linewidth=1, label=f"trainer{trainer}, in one process")
    axes.set(title="DDP trainers with a remote embedding", xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "hybrid.png", dpi=100)
    plt.close(figure)


def lead(args: argparse.Namespace) -> float:
    """Runs on the master; returns the largest difference of a loss."""
    embedding = RemoteModule("ps/cpu", Embedding, args=(args.seed,))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        runs = [
            rpc.rpc_async(
                f"trainer{number}",
                train,
                args=(number, embedding, f"{folder}/store", args),
                timeout=0,  # one call is a whole training run: no time-out
            )
            for number in range(args.trainers)
        ]
        losses = torch.futures.wait_all(runs)
        seconds = time.perf_counter() - start
    expected = train_in_one_process(args)
    difference: float = max(
        abs(one - other)
        for mine, theirs in zip(losses, expected, strict=True)
        for one, other in zip(mine, theirs, strict=True)
    )
    print(
        f"{args.trainers} trainers, {args.steps} steps each in {seconds:.1f} s: loss of trainer0 "
        f"{losses[0][0]:.3f} -> {losses[0][-1]:.3f}; in one process {expected[0][-1]:.3f}, "
        f"largest difference {difference:.1e}",
        flush=True,
    )
    if args.output:
        draw(losses, expected, args.output)
    return difference


def run(rank: int, args: argparse.Namespace) -> None:
    """One rank: 0 is the master, the last one the server, the others are trainers."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29550")
    torch.set_num_threads(1)
    names = ["master", *(f"trainer{number}" for number in range(args.trainers)), "ps"]
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names))
    difference = lead(args) if rank == 0 else 0.0
    rpc.shutdown()
    if not difference <= args.tolerance:
        raise RuntimeError(f"losses differ by {difference:.1e}, more than {args.tolerance:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description="DDP trainers with a remote embedding.")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of the losses")
    parser.add_argument("--output", type=Path, help="a folder for a picture of the losses")
    args = parser.parse_args()
    if args.output:
        args.output = args.output.resolve()
    mp.spawn(run, args=(args,), nprocs=args.trainers + 2)


if __name__ == "__main__":
    main()
