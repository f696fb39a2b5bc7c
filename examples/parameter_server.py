"""A parameter server with asynchronous trainers, on a small real learning problem.

Rank 0 ("ps") owns a small neural network and its optimizer; the trainers ("trainer1", ...)
each hold their own share of the data, compute gradients and send them in. The task is to tell
two interleaved half-moons apart, with points the trainers never saw as the test.

``--mode async`` (default): a trainer fetches the parameters, computes, pushes its gradients,
and never waits for the others; the server applies each push at once, so a gradient may be a
few updates stale. ``--mode batch``: the server collects one gradient of every trainer, takes
one step with their mean and answers all of them with the new parameters. Each such call
returns a Future (``rpc.functions.async_execution``), so no server thread blocks on the wait.

Run::

    rayrpc run examples/parameter_server.py
    rayrpc run examples/parameter_server.py --mode batch --trainers 4

The program is plain ``torch.distributed.rpc``: ``python examples/parameter_server.py`` runs
it on stock torch. The exit status is 1 if the accuracy stays below ``--min-accuracy``. With
``--output FOLDER`` it draws the loss and the accuracy into ``parameter_server.png`` there.
"""

from __future__ import annotations

import argparse
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.futures import Future
from torch.nn import functional as F

BATCH_SIZE = 64
POINTS_PER_TRAINER = 512


def make_moons(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """``count`` noisy points on two interleaved half circles, and which of the two each is on."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(count, generator=generator) * math.pi
    labels = torch.randint(2, (count,), generator=generator)
    upper = torch.stack([torch.cos(angle), torch.sin(angle)], dim=1)
    lower = torch.stack([1 - torch.cos(angle), 0.5 - torch.sin(angle)], dim=1)
    points = torch.where(labels[:, None] == 0, upper, lower)
    return points + 0.1 * torch.randn(count, 2, generator=generator), labels


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    )


def make_progress(updates: int) -> Any:
    """A progress bar where tqdm is installed, else None."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=updates, desc="update", unit="update")


class ParameterServer:
    """The model and its optimizer behind a lock; its methods are what the trainers call."""

    def __init__(self, trainers: int, updates: int, lr: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.test_set = make_moons(2000, seed)
        self.lock = threading.Lock()
        self.trainers = trainers
        self.report_every = max(1, updates // 5)
        self.progress = make_progress(updates)
        self.curve = [(0, *self.evaluate())]  # update, loss, accuracy
        self.version = 0  # optimizer steps taken
        self.staleness = 0  # sum over all pushes of the steps taken since their fetch
        self.calls = 0
        self.pending: list[list[Tensor]] = []  # batch mode: gradients of this round
        self.next_parameters: Future[list[Tensor]] = Future()

    def fetch(self) -> tuple[int, list[Tensor]]:
        """The version and the values of the parameters."""
        with self.lock:
            self.calls += 1
            return self.version, self._copy_parameters()

    def push(self, version: int, gradients: list[Tensor]) -> None:
        """Asynchronous mode: apply the gradients, computed on ``version``, at once."""
        with self.lock:
            self.calls += 1
            self.staleness += self.version - version
            self._step(gradients)

    @rpc.functions.async_execution
    def push_and_fetch(self, gradients: list[Tensor]) -> Future[list[Tensor]]:
        """Batched mode: answered, with new parameters, when every trainer has pushed."""
        with self.lock:
            self.calls += 1
            answer = self.next_parameters
            self.pending.append(gradients)
            if len(self.pending) < self.trainers:
                return answer
            mean = [torch.stack(parts).mean(dim=0) for parts in zip(*self.pending, strict=True)]
            self._step(mean)
            parameters = self._copy_parameters()
            self.pending, self.next_parameters = [], Future()
        answer.set_result(parameters)
        return answer

    def evaluate(self) -> tuple[float, float]:
        """Loss and accuracy on the test set."""
        points, labels = self.test_set
        with torch.no_grad():
            logits = self.model(points)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        return F.cross_entropy(logits, labels).item(), accuracy.item()

    def _copy_parameters(self) -> list[Tensor]:
        # Copies: an answer is serialized after the lock is released, when others may write.
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def _step(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.version += 1
        if self.progress is not None:
            self.progress.update()
        if self.version % max(1, self.report_every // 5) == 0:
            loss, accuracy = self.evaluate()
            self.curve.append((self.version, loss, accuracy))
            if self.version % self.report_every == 0:
                text = f"update {self.version:4d}: loss {loss:.3f}, accuracy {accuracy:.1%}"
                if self.progress is None:
                    print(text, flush=True)
                else:
                    self.progress.write(text)  # above the bar


def train(server: rpc.RRef[ParameterServer], steps: int, mode: str, seed: int) -> None:
    """Runs on a trainer: ``steps`` gradients from its own data to the server."""
    torch.set_num_threads(1)
    points, labels = make_moons(POINTS_PER_TRAINER, seed)
    generator = torch.Generator().manual_seed(seed)
    model = make_model()
    version, parameters = server.rpc_sync().fetch()
    for step in range(steps):
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), parameters, strict=True):
                parameter.copy_(value)
        sample = torch.randint(len(points), (BATCH_SIZE,), generator=generator)
        loss = F.cross_entropy(model(points[sample]), labels[sample])
        gradients = list(torch.autograd.grad(loss, list(model.parameters())))
        if mode == "batch":
            parameters = server.rpc_sync().push_and_fetch(gradients)
        else:
            server.rpc_sync().push(version, gradients)
            if step + 1 < steps:
                version, parameters = server.rpc_sync().fetch()


def draw(curve: list[tuple[int, float, float]], mode: str, folder: Path) -> None:
    """Loss and accuracy over the updates as a PNG."""
    try:
        import matplotlib
    except ImportError as exc:
        raise RuntimeError("--output needs matplotlib: pip install 'rayrpc[examples]'") from exc
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    updates, losses, accuracies = zip(*curve, strict=True)
    axes.plot(updates, losses, marker=".", label="loss")
    axes.plot(updates, accuracies, marker=".", label="accuracy")
    axes.set(title=f"Parameter server, mode {mode}: test set", xlabel="update", ylim=(0, 1.05))
    axes.set_ylabel("loss, accuracy")
    axes.grid(alpha=0.3)
    axes.legend(loc="center right")
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "parameter_server.png", dpi=100)
    plt.close(figure)


def serve(args: argparse.Namespace) -> float:
    """Runs on the server: starts the trainers, waits for them, returns the final accuracy."""
    torch.set_num_threads(1)
    updates = args.steps if args.mode == "batch" else args.steps * args.trainers
    server = ParameterServer(args.trainers, updates, args.lr, args.seed)
    reference = rpc.RRef(server)
    start = time.perf_counter()
    runs = [
        rpc.rpc_async(
            f"trainer{rank}",
            train,
            args=(reference, args.steps, args.mode, args.seed + rank),
            timeout=0,  # one call is a whole training run: no time-out
        )
        for rank in range(1, args.trainers + 1)
    ]
    torch.futures.wait_all(runs)
    seconds = time.perf_counter() - start
    if server.progress is not None:
        server.progress.close()

    loss, accuracy = server.evaluate()
    staleness = "" if args.mode == "batch" else f", staleness {server.staleness / updates:.2f}"
    print(
        f"{args.mode}: {server.version} updates in {seconds:.1f} s "
        f"({server.version / seconds:.0f} updates/s, {server.calls / seconds:.0f} RPC calls/s"
        f"{staleness}); loss {loss:.3f}, accuracy {accuracy:.1%}",
        flush=True,
    )
    if args.output:
        draw(server.curve, args.mode, args.output)
    return accuracy


def run(rank: int, args: argparse.Namespace) -> None:
    """One rank: 0 is the server, the others serve the calls that it makes."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29520")
    name = "ps" if rank == 0 else f"trainer{rank}"
    rpc.init_rpc(name, rank=rank, world_size=args.trainers + 1)
    accuracy = serve(args) if rank == 0 else None
    rpc.shutdown()
    if accuracy is not None and accuracy < args.min_accuracy:
        raise RuntimeError(f"accuracy {accuracy:.1%} is below {args.min_accuracy:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A parameter server with its trainers.")
    parser.add_argument("--mode", choices=["async", "batch"], default="async")
    parser.add_argument("--trainers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="gradients of each trainer")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-accuracy", type=float, default=0.95)
    parser.add_argument("--output", type=Path, help="a folder for a picture of the curve")
    args = parser.parse_args()
    if args.output:
        args.output = args.output.resolve()
    mp.spawn(run, args=(args,), nprocs=args.trainers + 1)


if __name__ == "__main__":
    main()
