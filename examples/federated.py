"""Federated averaging: clients train on data that never leaves them, a server averages.

The clients live on the workers "worker1", ..., several on each; rank 0 ("server") holds an RRef to
every one. Each client has data of its own, of unequal amount, and mostly of two of the eight
classes. One round (McMahan et al. 2017):

1. The server draws some of the clients and sends them the weights (``rpc_async``).
2. Each of them trains a copy on its own data for a few epochs, and sends the new weights back.
3. The server takes the mean of what came back, weighted by the clients' numbers of samples.

The calls have a timeout: a client that does not answer in time is left out of the round. Some
clients (``--stragglers``) are always too slow, to show that. Which other clients answer in time
depends on the machine, all else on the arguments alone.

For comparison every client also trains alone, as many epochs as all rounds together have; the best
of them is the baseline.

Run::

    rayrpc run examples/federated.py
    rayrpc run examples/federated.py --clients 32 --workers 4 --fraction 0.5

The program is plain ``torch.distributed.rpc``: ``python examples/federated.py`` runs it on stock
torch. It needs ``matplotlib`` and ``tqdm``, and draws the accuracy into ``federated.png`` under
``--output``. The exit status is 1 if the accuracy stays below ``--min-accuracy``.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.futures import Future
from torch.nn import functional as F

CLASSES, FEATURES, CLUSTERS = 8, 10, 3  # clusters of each class
BATCH_SIZE = 32
MAIN_SHARE = 0.9  # of a client's samples that are of its two main classes

Weights = list[Tensor]


def make_samples(labels: Tensor, seed: int) -> Tensor:
    """A point for each label, near one of the clusters of its class."""
    centers = torch.randn(
        CLASSES, CLUSTERS, FEATURES, generator=torch.Generator().manual_seed(seed)
    )
    generator = torch.Generator().manual_seed(seed + len(labels))
    clusters = torch.randint(CLUSTERS, labels.shape, generator=generator)
    noise = torch.randn(len(labels), FEATURES, generator=generator)
    return 1.4 * centers[labels, clusters] + 0.7 * noise


def make_shard(client: int, seed: int) -> tuple[Tensor, Tensor]:
    """The private data of a client: 100 to 400 samples, mostly of two classes."""
    generator = torch.Generator().manual_seed(1000 * seed + client)
    count = int(torch.randint(100, 401, (), generator=generator))
    main = (client + torch.randint(2, (count,), generator=generator)) % CLASSES
    others = torch.randint(CLASSES, (count,), generator=generator)
    labels = torch.where(torch.rand(count, generator=generator) < MAIN_SHARE, main, others)
    return make_samples(labels, seed), labels


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def load(model: nn.Module, weights: Weights) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)


def weights_of(model: nn.Module) -> Weights:
    return [parameter.detach().clone() for parameter in model.parameters()]


class Client:
    """Has data of its own; trains the weights that it is sent."""

    def __init__(self, number: int, seed: int, delay: float) -> None:
        self.number, self.seed, self.delay = number, seed, delay
        self.samples, self.labels = make_shard(number, seed)

    def train(self, weights: Weights, epochs: int, lr: float, turn: int) -> tuple[int, Weights]:
        """The number of samples, and the weights after some epochs on them.

        The model is one of the call's own: the server may not have waited for the last call, which
        then still runs.
        """
        time.sleep(self.delay)
        return len(self.labels), self.train_alone(weights, epochs, lr, turn)

    def train_alone(self, weights: Weights, epochs: int, lr: float, turn: int = -1) -> Weights:
        model = make_model()
        load(model, weights)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        seed = (self.seed * 1000 + self.number) * 10000 + turn + 1
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            for rows in torch.randperm(len(self.labels), generator=generator).split(BATCH_SIZE):
                loss = F.cross_entropy(model(self.samples[rows]), self.labels[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return weights_of(model)


class Server:
    """Has the model and a test set, and no training data."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        self.model = make_model()
        generator = torch.Generator().manual_seed(args.seed)
        self.test_labels = torch.randint(CLASSES, (4000,), generator=generator)
        self.test_samples = make_samples(self.test_labels, args.seed)
        self.generator = generator
        self.late = 0  # answers that did not come in time
        self.clients = [
            rpc.remote(
                f"worker{number % args.workers + 1}",
                Client,
                args=(
                    number,
                    args.seed,
                    # the last ones are the stragglers
                    1.5 * args.timeout if number >= args.clients - args.stragglers else 0.0,
                ),
            )
            for number in range(args.clients)
        ]

    def best_alone(self) -> float:
        """The accuracy of the best client that trains by itself."""
        epochs = self.args.rounds * self.args.epochs
        start = weights_of(self.model)
        answers = torch.futures.wait_all(
            [
                client.rpc_async(timeout=0).train_alone(start, epochs, self.args.lr)
                for client in self.clients
            ]
        )
        return max(self.evaluate(weights) for weights in answers)

    def play_round(self, turn: int) -> float:
        """One round; returns the accuracy after it."""
        args = self.args
        count = max(1, round(args.fraction * len(self.clients)))
        chosen = torch.randperm(len(self.clients), generator=self.generator)[:count].tolist()
        weights = weights_of(self.model)
        calls = [
            self.clients[number]
            .rpc_async(timeout=args.timeout)
            .train(weights, args.epochs, args.lr, turn)
            for number in chosen
        ]
        answers = [answer for call in calls if (answer := self._wait_for(call)) is not None]
        if answers:
            total = sum(samples for samples, _ in answers)
            parts = [[value * (samples / total) for value in new] for samples, new in answers]
            load(
                self.model, [torch.stack(values).sum(dim=0) for values in zip(*parts, strict=True)]
            )
        return self.evaluate(weights_of(self.model))

    def evaluate(self, weights: Weights) -> float:
        """The accuracy of some weights on the test set, which has all classes alike."""
        model = make_model()
        load(model, weights)
        with torch.no_grad():
            right: Tensor = model(self.test_samples).argmax(dim=1) == self.test_labels
        return right.float().mean().item()

    def close(self) -> None:
        self.clients.clear()

    def _wait_for(self, call: Future[tuple[int, Weights]]) -> tuple[int, Weights] | None:
        """The answer of a client, None if it takes too long."""
        try:
            return call.wait()
        except RuntimeError as exc:
            if "timeout" not in str(exc):  # torch has no type of its own for it
                raise
            self.late += 1
            return None


def draw(accuracies: list[float], alone: float, path: Path) -> None:
    """The accuracy over the rounds as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    percent = [100 * accuracy for accuracy in accuracies]
    axes.plot(range(len(percent)), percent, marker=".", label="federated averaging")
    axes.axhline(100 * alone, color="tab:red", linestyle="--", label="the best client alone")
    axes.set(title="Federated averaging on unlike clients", xlabel="round", ylim=(0, 100))
    axes.set_ylabel("accuracy on all classes [%]")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def lead(args: argparse.Namespace) -> float:
    """Runs on the server; returns the final accuracy."""
    from tqdm import tqdm

    server = Server(args)
    alone = server.best_alone()
    accuracies = [server.evaluate(weights_of(server.model))]
    start = time.perf_counter()
    with tqdm(total=args.rounds, desc="round", unit="round") as progress:
        for turn in range(args.rounds):
            accuracies.append(server.play_round(turn))
            accuracy = f"accuracy {accuracies[-1]:.1%} (best client alone {alone:.1%})"
            progress.write(f"round {turn + 1:3d}: {accuracy}")
            progress.set_postfix_str(f"{server.late} answers too late")
            progress.update()
    seconds = time.perf_counter() - start
    server.close()

    path = args.output / "federated.png"
    draw(accuracies, alone, path)
    print(
        f"{args.rounds} rounds in {seconds:.1f} s, {server.late} answers left out; accuracy "
        f"{accuracies[-1]:.1%}, best client alone {alone:.1%}; curve: {os.path.relpath(path)}",
        flush=True,
    )
    return accuracies[-1]


def run(rank: int, args: argparse.Namespace) -> None:
    """One rank: 0 is the server, the others have the clients."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29570")
    torch.set_num_threads(1)
    name = "server" if rank == 0 else f"worker{rank}"
    rpc.init_rpc(name, rank=rank, world_size=args.workers + 1)
    accuracy = lead(args) if rank == 0 else None
    rpc.shutdown()
    if accuracy is not None and accuracy < args.min_accuracy:
        raise RuntimeError(f"accuracy {accuracy:.1%} is below {args.min_accuracy:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Federated averaging over unlike clients.")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--workers", type=int, default=3, help="processes that have the clients")
    parser.add_argument("--stragglers", type=int, default=1, help="clients that are too slow")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--fraction", type=float, default=0.4, help="of the clients, per round")
    parser.add_argument("--epochs", type=int, default=3, help="of a client in one round")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds, of a client's round")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-accuracy", type=float, default=0.7)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "output")
    args = parser.parse_args()
    args.output = args.output.resolve()
    mp.spawn(run, args=(args,), nprocs=args.workers + 1)


if __name__ == "__main__":
    main()
