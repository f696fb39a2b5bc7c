"""A model split over two workers, its batches pipelined through them in micro-batches.

Rank 0 ("master") owns the data; "stage0" and "stage1" own one half of the model each. For every
micro-batch the master asks stage 0 for its output (``remote``, which returns at once), and stage 1
for its own output on that (``rpc_async``, with the RRef as argument): while stage 1 works on one
micro-batch, stage 0 is at the next, and no activation passes through the master. The backward
pass goes back the same way, in a context of distributed autograd, and a ``DistributedOptimizer``
updates each half where it lives.

The same model is trained in this one process with the same batches, and the exit status is 1 if a
loss differs by more than ``--tolerance``.

Run::

    rayrpc run examples/pipeline.py
    rayrpc run examples/pipeline.py --micro-batches 8 --steps 100

The program is plain ``torch.distributed.rpc``: ``python examples/pipeline.py`` runs it on stock
torch. With ``--output FOLDER`` it draws the losses into ``pipeline.png`` there.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F

FEATURES, HIDDEN, CLASSES = 16, 128, 4


def make_half(number: int, seed: int) -> nn.Module:
    torch.manual_seed(seed + number)
    if number == 0:
        return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
    return nn.Sequential(
        nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)
    )


def make_batch(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points, and the quadrant that two fixed directions put them in."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(size, FEATURES, generator=generator)
    directions = torch.randn(FEATURES, 2, generator=torch.Generator().manual_seed(0))
    signs = (points @ directions > 0).long()
    return points, signs[:, 0] * 2 + signs[:, 1]


class Stage:
    """One half of the model, on its worker."""

    def __init__(self, number: int, seed: int) -> None:
        torch.set_num_threads(1)
        self.half = make_half(number, seed)

    def forward(self, inputs: rpc.RRef[Tensor]) -> Tensor:
        """The half's output; the inputs come from where they are."""
        output: Tensor = self.half(inputs.to_here())
        return output

    def parameters(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.half.parameters()]


class Pipeline:
    """Both halves, seen from the master."""

    def __init__(self, micro_batches: int, seed: int) -> None:
        self.micro_batches = micro_batches
        self.stages = [
            rpc.remote(f"stage{number}", Stage, args=(number, seed)) for number in (0, 1)
        ]

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = []
        for part in inputs.chunk(self.micro_batches):
            middle = self.stages[0].remote().forward(rpc.RRef(part))
            outputs.append(self.stages[1].rpc_async().forward(middle))
        return torch.cat(torch.futures.wait_all(outputs))

    def parameters(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rref for stage in self.stages for rref in stage.rpc_sync().parameters()]


def with_progress(steps: range) -> Iterable[int]:
    """The steps, with a progress bar where tqdm is installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return steps
    bar: Iterable[int] = tqdm(steps, desc="step", unit="step")
    return bar


def train(args: argparse.Namespace) -> list[float]:
    """Runs on the master; returns the losses."""
    pipeline = Pipeline(args.micro_batches, args.seed)
    optimizer = DistributedOptimizer(torch.optim.SGD, pipeline.parameters(), lr=args.lr)
    losses = []
    for step in with_progress(range(args.steps)):
        inputs, labels = make_batch(args.batch_size, args.seed + step)
        with dist_autograd.context() as context_id:
            loss = F.cross_entropy(pipeline.forward(inputs), labels)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses


def train_in_one_process(args: argparse.Namespace) -> list[float]:
    model = nn.Sequential(make_half(0, args.seed), make_half(1, args.seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    losses = []
    for step in range(args.steps):
        inputs, labels = make_batch(args.batch_size, args.seed + step)
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def draw(losses: list[float], expected: list[float], folder: Path) -> None:
    """The losses of the pipeline, and those in one process, as a PNG."""
    try:
        import matplotlib
    except ImportError as exc:
        raise RuntimeError("--output needs matplotlib: pip install 'rayrpc[examples]'") from exc
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(losses, linewidth=4, alpha=0.4, label="pipeline of two workers")
    axes.plot(expected, "--", color="tab:red", linewidth=1, label="in one process")
    axes.set(title="The same training, split and whole", xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "pipeline.png", dpi=100)
    plt.close(figure)


def run(rank: int, args: argparse.Namespace) -> None:
    """One rank: 0 is the master, the others serve the calls that it makes."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29540")
    torch.set_num_threads(1)
    name = "master" if rank == 0 else f"stage{rank - 1}"
    rpc.init_rpc(name, rank=rank, world_size=3)
    difference = 0.0
    if rank == 0:
        start = time.perf_counter()
        losses = train(args)
        seconds = time.perf_counter() - start
        expected = train_in_one_process(args)
        difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        print(
            f"{args.steps} steps in {seconds:.1f} s ({args.steps / seconds:.0f} steps/s): loss "
            f"{losses[0]:.3f} -> {losses[-1]:.3f}; in one process {expected[-1]:.3f}, "
            f"largest difference {difference:.1e}",
            flush=True,
        )
        if args.output:
            draw(losses, expected, args.output)
    rpc.shutdown()
    if not difference <= args.tolerance:
        raise RuntimeError(f"losses differ by {difference:.1e}, more than {args.tolerance:.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A model pipelined over two workers.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tolerance", type=float, default=1e-5, help="of the losses")
    parser.add_argument("--output", type=Path, help="a folder for a picture of the losses")
    args = parser.parse_args()
    if args.output:
        args.output = args.output.resolve()
    mp.spawn(run, args=(args,), nprocs=3)


if __name__ == "__main__":
    main()
