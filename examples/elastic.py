"""Training that goes on through the deaths of a trainer and of the parameter server.

"ps" owns the small neural network of ``parameter_server.py``; two trainers fetch its parameters,
and push gradients computed from their own data, each at its own pace. The workers are started with
``max_restarts``: one that dies comes back under its name, and "ps" loads its last checkpoint as it
starts. The driver kills a trainer, and later "ps", in the middle of the run. A trainer whose call
fails with "ps" makes it again: the call waits until "ps" is there. The driver starts the work of a
trainer that died again.

Run::

    rayrpc run examples/elastic.py --plot elastic.png

The plot, which needs matplotlib, shows the loss on points that no trainer has, and where the
deaths fell. The exit status is 1 if the accuracy stays below ``--min-accuracy``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from parameter_server import (  # type: ignore[import-not-found]
    BATCH_SIZE,
    POINTS_PER_TRAINER,
    make_model,
    make_moons,
)
from torch import Tensor
from torch.nn import functional as F

import rayrpc as rpc

CHECKPOINT_EVERY = 20  # updates
TRAINERS = ("trainer0", "trainer1")


class ParameterServer:
    """The model and its optimizer, read from the checkpoint if there is one."""

    def __init__(self, checkpoint: Path, lr: float) -> None:
        torch.manual_seed(0)
        self.model = make_model()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.version = 0
        self.checkpoint = checkpoint
        self.lock = threading.Lock()
        self.test_set = make_moons(2000, 0)
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.version = saved["version"]
            print(f"ps goes on from update {self.version}", flush=True)

    def fetch(self) -> dict[str, Tensor]:
        with self.lock:
            return copy.deepcopy(self.model.state_dict())

    def push(self, gradients: list[Tensor]) -> None:
        with self.lock:
            for parameter, gradient in zip(self.model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self.optimizer.step()
            self.version += 1
            if self.version % CHECKPOINT_EVERY == 0:
                self.save()

    def save(self) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "version": self.version,
        }
        written = self.checkpoint.with_suffix(".new")
        torch.save(state, written)
        os.replace(written, self.checkpoint)  # whole, whenever the process dies

    def evaluate(self) -> tuple[int, float, float]:
        """The number of updates, and loss and accuracy on the test set."""
        points, labels = self.test_set
        with self.lock, torch.no_grad():
            logits = self.model(points)
            version = self.version
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        return version, F.cross_entropy(logits, labels).item(), accuracy.item()


server: ParameterServer  # on "ps"


def start_server(checkpoint: Path, lr: float) -> None:
    """Runs on "ps" whenever it starts, before it is called."""
    global server
    torch.set_num_threads(1)
    server = ParameterServer(checkpoint, lr)


def on_server(method: str, *args: Any) -> Any:
    """Runs on "ps"; its object is found by its name, as RRefs end with the process."""
    return getattr(server, method)(*args)


def ask_server(method: str, *args: Any) -> Any:
    """Call the server; call again if it dies meanwhile. A push may so be lost, or count twice."""
    while True:
        try:
            return rpc.rpc_sync("ps", on_server, args=(method, *args))
        except (rpc.errors.WorkerDiedError, rpc.errors.CallLostError) as exc:
            print(f"{rpc.get_worker_info().name} asks again: {type(exc).__name__}", flush=True)


def train(seed: int, updates: int) -> None:
    """Runs on a trainer, until the server has had its updates."""
    torch.set_num_threads(1)
    points, labels = make_moons(POINTS_PER_TRAINER, seed)
    generator = torch.Generator().manual_seed(seed)
    model = make_model()
    while ask_server("evaluate")[0] < updates:
        model.load_state_dict(ask_server("fetch"))
        sample = torch.randint(len(points), (BATCH_SIZE,), generator=generator)
        loss = F.cross_entropy(model(points[sample]), labels[sample])
        ask_server("push", list(torch.autograd.grad(loss, list(model.parameters()))))


def supervise(name: str, seed: int, updates: int) -> None:
    """Runs on the driver: has a trainer train, again if it dies."""
    while True:
        try:
            rpc.rpc_sync(name, train, args=(seed, updates), timeout=0)
            return
        except (rpc.errors.WorkerDiedError, rpc.errors.CallLostError):
            print(f"driver: {name} trains again", flush=True)


def run(args: argparse.Namespace, checkpoint: Path) -> float:
    """Train through two deaths; return the accuracy."""
    rpc.start_workers(["ps"], max_restarts=3, on_start=lambda: start_server(checkpoint, args.lr))
    rpc.start_workers(TRAINERS, max_restarts=3)
    begin = time.monotonic()
    deaths: list[tuple[float, str]] = []
    rpc.on_leave(lambda worker, cause: deaths.append((time.monotonic() - begin, worker.name)))
    threads = [
        threading.Thread(target=supervise, args=(name, number + 1, args.updates))
        for number, name in enumerate(TRAINERS)
    ]
    for thread in threads:
        thread.start()
    kills = [(args.updates // 3, "trainer0"), (2 * args.updates // 3, "ps")]
    curve: list[tuple[float, float]] = []
    version, accuracy = 0, 0.0
    while version < args.updates:
        version, loss, accuracy = ask_server("evaluate")
        curve.append((time.monotonic() - begin, loss))
        if kills and version >= kills[0][0]:
            _, name = kills.pop(0)
            print(f"driver: {name} dies at update {version}, loss {loss:.3f}", flush=True)
            with contextlib.suppress(rpc.errors.CallError):
                rpc.rpc_sync(name, os._exit, args=(1,))
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    print(
        f"{version} updates in {curve[-1][0]:.1f} s through {len(deaths)} deaths; "
        f"loss {curve[-1][1]:.3f}, accuracy {accuracy:.1%}",
        flush=True,
    )
    if args.plot:
        plot(args.plot, curve, deaths)
    rpc.shutdown()
    return accuracy


def plot(path: str, curve: list[tuple[float, float]], deaths: list[tuple[float, str]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    axes.plot(*zip(*curve, strict=True))
    axes.set_yscale("log")
    for when, name in deaths:
        axes.axvline(when, color="tab:red", linestyle="--")
        axes.text(when, axes.get_ylim()[1], f" {name} dies", va="top", color="tab:red")
    axes.set(xlabel="seconds", ylabel="loss on the test set", title="Training through deaths")
    figure.savefig(path)
    print(f"the curve is in {path}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Training that goes on through deaths.")
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--plot", help="a PNG file for the curve")
    parser.add_argument("--min-accuracy", type=float, default=0.95)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        accuracy = run(args, Path(folder) / "checkpoint.pt")
    if accuracy < args.min_accuracy:
        sys.exit(f"accuracy {accuracy:.1%} is below {args.min_accuracy:.1%}")


if __name__ == "__main__":
    # by its name, as workers import it: so they have one `server` for all calls
    import elastic  # type: ignore[import-not-found]

    elastic.main()
