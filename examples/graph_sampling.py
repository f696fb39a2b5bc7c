"""A sampling service for a partitioned graph, and trainers of a graph neural network.

The nodes of a graph, with their neighbours and features, are spread over the workers "sampler0",
...; no process has all of them. A trainer sends a batch of nodes to one of the samplers and gets
what GraphSAGE (Hamilton et al. 2017) needs of their surroundings: a few random neighbours of each
node, a few of each of those, and the features of all.

The sampler that is asked coordinates: hop by hop it asks the other samplers for the neighbours of
those nodes that they own, and last for features. ``sample`` is an ``async_execution`` method: it
returns a Future, and the answers' callbacks do the next hop, so no thread blocks and any number of
samples may be under way. A trainer asks for its next batches (``--prefetch``) before it works on
the current one. The trainers ("trainer0", ...; rank 0 is the first) keep their models alike: they
send their gradients to the first one, and get the mean of all.

The graph is a stochastic block model: nodes of one block are linked more often than others. The
task is to name a node's block. Features alone say little of it; a model that sees them alone is
the baseline.

Run::

    rayrpc run examples/graph_sampling.py
    rayrpc run examples/graph_sampling.py --samplers 4 --trainers 1 --fanouts 10 10

The program is plain ``torch.distributed.rpc``: ``python examples/graph_sampling.py`` runs it on
stock torch. It needs ``matplotlib`` and ``tqdm``, and draws the accuracy into
``graph_sampling.png`` under ``--output``. The exit status is 1 if the accuracy stays below
``--min-accuracy``.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.rpc import RRef
from torch.futures import Future
from torch.nn import functional as F

T = TypeVar("T")
BLOCKS, FEATURES = 6, 16
DEGREE_INSIDE, DEGREE_OUTSIDE = 8.0, 4.0  # a node's mean number of neighbours, by their block


class Sample(NamedTuple):
    """The surroundings of a batch of nodes."""

    features: Tensor  # of all nodes that occur, each once
    hops: list[Tensor]  # rows of ``features``: [batch], [batch, fan-out], [batch, fan-out, ...]
    labels: Tensor  # of the batch


def make_graph(nodes: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The edges, [2, edges], and the features and the block of every node."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(BLOCKS, (nodes,), generator=generator)
    same = blocks[:, None] == blocks
    probability = torch.where(
        same, DEGREE_INSIDE * BLOCKS, DEGREE_OUTSIDE * BLOCKS / (BLOCKS - 1)
    ).div_(nodes)
    linked = torch.rand(nodes, nodes, generator=generator).lt(probability).triu(diagonal=1)
    edges = linked.logical_or(linked.t()).nonzero().t()
    centers = torch.randn(BLOCKS, FEATURES, generator=generator)
    noise = torch.randn(nodes, FEATURES, generator=generator)
    return edges, 0.4 * centers[blocks] + noise, blocks


def drive(steps: Generator[Future[Any], Any, T]) -> Future[T]:
    """Run a generator that yields Futures and is sent their values, with no thread waiting."""
    answer: Future[T] = Future()

    def go_on(done: Future[Any] | None) -> None:
        try:
            awaited = steps.send(None if done is None else done.value())
        except StopIteration as end:
            answer.set_result(end.value)
        except Exception as exc:
            answer.set_exception(exc)  # type: ignore[arg-type]  # torch says T
        else:
            awaited.add_done_callback(go_on)

    go_on(None)
    return answer


class Partition:
    """The nodes that one sampler owns: every ``count``-th, from the ``number``-th on."""

    def __init__(self, number: int, count: int, nodes: int, seed: int) -> None:
        self.number, self.count = number, count
        # The graph is made here to be cut; a service would read its part from a disk.
        edges, features, labels = make_graph(nodes, seed)
        mine = edges[:, edges[0] % count == number]  # in the order of their first nodes
        degrees = torch.bincount(mine[0] // count, minlength=len(features[number::count]))
        self.ends = degrees.cumsum(0)
        self.degrees = degrees
        self.targets = mine[1]
        self.features, self.labels = features[number::count].clone(), labels[number::count].clone()
        self.others: list[RRef[Partition]] = []

    def connect(self, partitions: list[RRef[Partition]]) -> None:
        """Tell it of all partitions; an empty list releases them."""
        self.others = partitions

    @rpc.functions.async_execution
    def sample(self, batch: Tensor, fanouts: list[int], seed: int) -> Future[Sample]:
        """Called by trainers: the surroundings of some nodes, whoever owns them."""
        return drive(self._sample(batch, fanouts, seed))

    def neighbours(self, nodes: Tensor, fanout: int, seed: int) -> Tensor:
        """Random neighbours of own nodes, [nodes, fanout]; a node without any is its own."""
        rows = nodes // self.count
        degrees = self.degrees[rows, None]
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.rand(len(rows), fanout, generator=generator).mul(degrees).long()
        places = self.ends[rows, None] - degrees + chosen.minimum((degrees - 1).clamp(min=0))
        found = self.targets[places.clamp(max=len(self.targets) - 1)]
        return torch.where(degrees > 0, found, nodes[:, None])

    def features_of(self, nodes: Tensor) -> Tensor:
        return self.features[nodes // self.count]

    def labels_of(self, nodes: Tensor) -> Tensor:
        return self.labels[nodes // self.count]

    def _sample(
        self, batch: Tensor, fanouts: list[int], seed: int
    ) -> Generator[Future[Any], Any, Sample]:
        hops = [batch]
        for hop, fanout in enumerate(fanouts):
            nodes = hops[-1].flatten()
            found = yield self._ask_owners("neighbours", nodes, fanout, seed + hop)
            hops.append(found.view(*hops[-1].shape, fanout))
        unique, places = torch.cat([hop.flatten() for hop in hops]).unique(return_inverse=True)
        # Both questions are on their way before the first is answered.
        asked = self._ask_owners("features_of", unique), self._ask_owners("labels_of", batch)
        features, labels = (yield asked[0]), (yield asked[1])
        parts = places.split([hop.numel() for hop in hops])
        rows = [part.view(hop.shape) for part, hop in zip(parts, hops, strict=True)]
        return Sample(features, rows, labels)

    def _ask_owners(self, method: str, nodes: Tensor, *args: Any) -> Future[Tensor]:
        """What the owners of some nodes answer, in the order of the nodes."""
        rows, calls = [], []
        for number in range(self.count):
            places = (nodes % self.count == number).nonzero().flatten()
            if not len(places):
                continue
            rows.append(places)
            if number == self.number:
                own: Future[Tensor] = Future()
                own.set_result(getattr(self, method)(nodes[places], *args))
                calls.append(own)
            else:
                remote = self.others[number].rpc_async()
                calls.append(getattr(remote, method)(nodes[places], *args))

        def join(done: Future[list[Future[Tensor]]]) -> Tensor:
            answers = [call.value() for call in done.value()]
            joined = answers[0].new_empty(len(nodes), *answers[0].shape[1:])
            for places, answer in zip(rows, answers, strict=True):
                joined[places] = answer
            return joined

        return torch.futures.collect_all(calls).then(join)


class GraphSage(nn.Module):
    """One layer for each hop; a node's vector is made of its own and its neighbours' mean."""

    def __init__(self, hops: int, hidden: int = 32) -> None:
        super().__init__()
        widths = [FEATURES, *[hidden] * (hops - 1), BLOCKS]
        self.layers = nn.ModuleList(
            nn.Linear(2 * inputs, outputs) for inputs, outputs in pairwise(widths)
        )

    def forward(self, features: Tensor, hops: list[Tensor]) -> Tensor:
        vectors = [features[rows] for rows in hops]
        for number, layer in enumerate(self.layers):
            vectors = [  # of nodes and their neighbours
                layer(torch.cat([own, near.mean(-2)], dim=-1)) for own, near in pairwise(vectors)
            ]
            if number + 1 < len(self.layers):
                vectors = [vector.relu() for vector in vectors]
        return vectors[0]


class Averager:
    """Answers all trainers with the mean of their gradients, when the last ones have come."""

    def __init__(self, trainers: int) -> None:
        self.trainers = trainers
        self.lock = threading.Lock()
        self.waiting: dict[int, list[Tensor]] = {}  # by trainer
        self.answer: Future[list[Tensor]] = Future()

    @rpc.functions.async_execution
    def average(self, trainer: int, gradients: list[Tensor]) -> Future[list[Tensor]]:
        with self.lock:
            answer = self.answer
            self.waiting[trainer] = gradients
            if len(self.waiting) < self.trainers:
                return answer
            parts = [self.waiting[number] for number in range(self.trainers)]
            self.waiting, self.answer = {}, Future()
        answer.set_result([torch.stack(values).mean(dim=0) for values in zip(*parts, strict=True)])
        return answer


class Loader:
    """Asks the samplers in turn, for some batches ahead."""

    def __init__(self, partitions: list[RRef[Partition]], args: argparse.Namespace) -> None:
        self.partitions, self.args = partitions, args
        self.waited = 0.0  # seconds

    def load(self, nodes: Tensor, seed: int) -> Iterator[Sample]:
        batches = enumerate(nodes.split(self.args.batch_size))
        requests = (
            self.partitions[(seed + number) % len(self.partitions)]
            .rpc_async()
            .sample(batch, self.args.fanouts, 100 * (seed + number))
            for number, batch in batches
        )
        ahead = deque(islice(requests, self.args.prefetch))
        for request in requests:
            ahead.append(request)
            yield self._wait_for(ahead.popleft())
        while ahead:
            yield self._wait_for(ahead.popleft())

    def _wait_for(self, request: Future[Sample]) -> Sample:
        start = time.perf_counter()
        sample = request.wait()
        self.waited += time.perf_counter() - start
        return sample


def accuracy_of(model: nn.Module, samples: Iterator[Sample]) -> float:
    with torch.no_grad():
        right = [
            model(sample.features, sample.hops).argmax(dim=1) == sample.labels for sample in samples
        ]
    return torch.cat(right).float().mean().item()


def train(
    trainer: int,
    partitions: list[RRef[Partition]],
    averager: RRef[Averager],
    args: argparse.Namespace,
) -> list[float]:
    """Runs on a trainer; the first one returns the accuracy on test nodes after each epoch."""
    from tqdm import tqdm

    torch.manual_seed(args.seed)
    model = GraphSage(len(args.fanouts))
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.lr)
    loader = Loader(partitions, args)
    train_nodes, test_nodes = split_nodes(args)
    generator = torch.Generator().manual_seed(args.seed)
    share = len(train_nodes) // args.trainers
    accuracies = []
    start = time.perf_counter()
    with tqdm(total=args.epochs, desc="epoch", unit="epoch", disable=trainer > 0) as progress:
        for epoch in range(args.epochs):
            order = train_nodes[torch.randperm(len(train_nodes), generator=generator)]
            seed = 1000 * (
                args.trainers * epoch + trainer + args.trainers * args.epochs * args.seed
            )
            for sample in loader.load(order[trainer * share :][:share], seed):
                loss = F.cross_entropy(model(sample.features, sample.hops), sample.labels)
                gradients = list(torch.autograd.grad(loss, parameters))
                means = averager.rpc_sync().average(trainer, gradients)
                for parameter, gradient in zip(parameters, means, strict=True):
                    parameter.grad = gradient
                optimizer.step()
            if trainer == 0:  # the others begin the next epoch, and wait for its gradients
                accuracies.append(accuracy_of(model, loader.load(test_nodes, seed=0)))
                share_waited = loader.waited / (time.perf_counter() - start)
                progress.set_postfix_str(
                    f"accuracy {accuracies[-1]:.1%}, {share_waited:.0%} of the time for samples"
                )
                progress.update()
    return accuracies


def split_nodes(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Nodes to learn from (a fifth), and as many to test with."""
    order = torch.randperm(args.nodes, generator=torch.Generator().manual_seed(args.seed))
    return order[: args.nodes // 5], order[-(args.nodes // 5) :]


def train_without_graph(args: argparse.Namespace) -> float:
    """The accuracy of a model that sees the features of a node, not of its neighbours."""
    _, features, labels = make_graph(args.nodes, args.seed)
    train_nodes, test_nodes = split_nodes(args)
    torch.manual_seed(args.seed)
    model = nn.Linear(FEATURES, BLOCKS)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(200):
        loss = F.cross_entropy(model(features[train_nodes]), labels[train_nodes])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    right: Tensor = model(features[test_nodes]).argmax(dim=1) == labels[test_nodes]
    return right.float().mean().item()


def draw(accuracies: list[float], baseline: float, path: Path) -> None:
    """The accuracy over the epochs as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    percent = [100 * accuracy for accuracy in accuracies]
    axes.plot(range(1, len(percent) + 1), percent, marker=".", label="GraphSAGE on samples")
    axes.axhline(100 * baseline, color="tab:red", linestyle="--", label="features alone")
    axes.set(title="Blocks of the test nodes", xlabel="epoch", ylabel="accuracy [%]", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def lead(args: argparse.Namespace) -> float:
    """Runs on the first trainer; returns the final accuracy."""
    partitions = [
        rpc.remote(
            f"sampler{number}", Partition, args=(number, args.samplers, args.nodes, args.seed)
        )
        for number in range(args.samplers)
    ]
    for partition in partitions:
        partition.rpc_sync().connect(partitions)
    start = time.perf_counter()
    averager = rpc.RRef(Averager(args.trainers))
    runs = [
        rpc.rpc_async(
            f"trainer{number}",
            train,
            args=(number, partitions, averager, args),
            timeout=0,  # one call is a whole training run: no time-out
        )
        for number in range(args.trainers)
    ]
    accuracies = torch.futures.wait_all(runs)[0]
    seconds = time.perf_counter() - start
    for partition in partitions:  # they hold references to one another
        partition.rpc_sync().connect([])

    baseline = train_without_graph(args)
    path = args.output / "graph_sampling.png"
    draw(accuracies, baseline, path)
    print(
        f"{args.epochs} epochs of {args.trainers} trainers with {args.samplers} samplers in "
        f"{seconds:.1f} s"
    )
    print(
        f"accuracy on test nodes {accuracies[-1]:.1%} (features alone {baseline:.1%}); "
        f"curve: {os.path.relpath(path)}",
        flush=True,
    )
    return float(accuracies[-1])


def run(rank: int, args: argparse.Namespace) -> None:
    """One rank: the trainers first, then the samplers; rank 0 leads."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29580")
    torch.set_num_threads(1)
    names = [f"trainer{number}" for number in range(args.trainers)]
    names += [f"sampler{number}" for number in range(args.samplers)]
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names))
    accuracy = lead(args) if rank == 0 else None
    rpc.shutdown()
    if accuracy is not None and accuracy < args.min_accuracy:
        raise RuntimeError(f"accuracy {accuracy:.1%} is below {args.min_accuracy:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description="GraphSAGE on samples of a partitioned graph.")
    parser.add_argument("--samplers", type=int, default=3)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=2400)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[10, 5], help="one for each hop")
    parser.add_argument("--prefetch", type=int, default=2, help="batches asked for ahead")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--min-accuracy", type=float, default=0.75)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "output")
    args = parser.parse_args()
    args.output = args.output.resolve()
    mp.spawn(run, args=(args,), nprocs=args.trainers + args.samplers)


if __name__ == "__main__":
    main()
