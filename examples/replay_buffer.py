"""DQN with a distributed replay buffer, which is sampled by priority.

Rank 0 ("learner") learns, "actor0", ... step their environments, and "shard0", ... hold the replay
buffer, one part each. A transition is drawn in proportion to its priority: the error that the
learner made when it last saw it (Schaul et al. 2015). Each shard keeps its priorities in a sum
tree, so that drawing and changing them take logarithmic time. One iteration:

1. The learner sends the actors its weights and has them play on (``rpc_async``).
2. Meanwhile it learns from what came before. It draws how many transitions of a batch come from
   each shard by the sums of their priorities, so a batch is a sample of the buffer as a whole. The
   call that asks a shard for its part also has the new priorities of the last batch, and the next
   batch is on its way while the learner computes.
3. Actors push transitions in batches, each to the next shard, and do not wait for one to arrive
   before they play on. The shards keep these aside until the learner says that the iteration is
   over: then a run depends on its arguments alone, not on what arrives when.

Frequent transitions would bias the learner; importance weights correct that. The targets are those
of double DQN.

Run::

    rayrpc run examples/replay_buffer.py
    rayrpc run examples/replay_buffer.py --actors 4 --shards 3 --seed 1

The program is plain ``torch.distributed.rpc``: ``python examples/replay_buffer.py`` runs it on
stock torch. It needs ``gymnasium``, ``matplotlib`` and ``tqdm``, draws the learning curve into
``replay_buffer.png`` under ``--output``, and its exit status is 1 if the last episodes' mean reward
is below ``--target``.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.rpc import RRef
from torch.futures import Future
from torch.nn import functional as F

ENVIRONMENT = "CartPole-v1"
STATE_SIZE, ACTIONS = 4, 2
GAMMA = 0.99
ALPHA = 0.6  # how much the priorities count: 0 draws all transitions alike
BETA = 0.4  # of the importance weights at the start; it grows to 1, which corrects all of the bias
PUSH = 64  # transitions in one call


class Transitions(NamedTuple):
    """Every tensor is [transitions, ...]."""

    states: Tensor
    actions: Tensor
    rewards: Tensor
    next_states: Tensor
    failed: Tensor  # the pole fell: no reward follows


class Drawn(NamedTuple):
    """What a shard answers."""

    transitions: Transitions
    places: Tensor
    chances: Tensor  # of each transition, among those of this shard
    mass: float  # the sum of the shard's priorities
    size: int


def make_network() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(STATE_SIZE, 128), nn.ReLU()),
        *(nn.Linear(128, 128), nn.ReLU()),
        nn.Linear(128, ACTIONS),
    )


class SumTree:
    """Numbers whose sums over ranges are at hand: node i is the sum of 2i and 2i + 1."""

    def __init__(self, leaves: int) -> None:
        self.depth = (leaves - 1).bit_length()
        self.first = 1 << self.depth  # the node that is leaf 0
        self.nodes = torch.zeros(2 * self.first, dtype=torch.float64)

    def __getitem__(self, leaves: Tensor) -> Tensor:
        return self.nodes[self.first + leaves]

    @property
    def total(self) -> float:
        return self.nodes[1].item()

    def set(self, leaves: Tensor, values: Tensor) -> None:
        places = self.first + leaves
        self.nodes[places] = values.double()
        for _ in range(self.depth):
            places = places.div(2, rounding_mode="floor")
            self.nodes[places] = self.nodes[2 * places] + self.nodes[2 * places + 1]

    def find(self, sums: Tensor) -> Tensor:
        """For each number, the leaf at which the sum from leaf 0 on exceeds it."""
        places = torch.ones_like(sums, dtype=torch.long)
        for _ in range(self.depth):
            left = self.nodes[2 * places]
            right = (sums >= left) & (self.nodes[2 * places + 1] > 0)  # never an empty leaf
            sums = torch.where(right, sums - left, sums)
            places = 2 * places + right
        return places - self.first


class Shard:
    """A part of the replay buffer."""

    def __init__(self, capacity: int, seed: int) -> None:
        self.capacity = capacity
        self.tree = SumTree(capacity)
        self.generator = torch.Generator().manual_seed(seed)
        self.lock = threading.Lock()  # actors push while the learner draws
        self.aside: dict[tuple[int, int], Transitions] = {}  # by actor and number of the push
        self.stored: Transitions | None = None
        self.next, self.size = 0, 0
        self.highest = 1.0

    def push(self, actor: int, number: int, transitions: Transitions) -> None:
        """Called by actors."""
        with self.lock:
            self.aside[actor, number] = transitions

    def commit(self) -> float:
        """Store what was pushed, over the oldest transitions if need be; returns the mass."""
        with self.lock:
            pushes = [self.aside[key] for key in sorted(self.aside)]
            self.aside.clear()
            if pushes:
                self._store(Transitions(*map(torch.cat, zip(*pushes, strict=True))))
            return self.tree.total

    def exchange(self, places: Tensor, priorities: Tensor, count: int) -> Drawn:
        """Take new priorities, then draw ``count`` transitions by theirs."""
        with self.lock:
            assert self.stored is not None
            if len(places):
                self.highest = max(self.highest, priorities.max().item())
                self.tree.set(places, priorities)
            mass = self.tree.total
            random = torch.rand(count, generator=self.generator, dtype=torch.float64)
            drawn = self.tree.find(random * mass)
            transitions = Transitions(*(column[drawn] for column in self.stored))
            return Drawn(transitions, drawn, self.tree[drawn] / mass, mass, self.size)

    def _store(self, new: Transitions) -> None:
        count = len(new.states)
        if self.stored is None:
            empty = (column.new_zeros(self.capacity, *column.shape[1:]) for column in new)
            self.stored = Transitions(*empty)
        places = (self.next + torch.arange(count)) % self.capacity
        for column, values in zip(self.stored, new, strict=True):
            column[places] = values
        # The learner has made no error on them yet: they come as early as any.
        self.tree.set(places, torch.full((count,), self.highest))
        self.next = (self.next + count) % self.capacity
        self.size = min(self.size + count, self.capacity)


class Actor:
    """Plays in its environments, and pushes what happens to the shards."""

    def __init__(self, number: int, environments: int, seed: int, shards: list[RRef[Shard]]):
        self.number, self.shards = number, shards
        self.network = make_network()
        self.generator = torch.Generator().manual_seed(seed)
        self.environments = [gymnasium.make(ENVIRONMENT) for _ in range(environments)]
        self.states = np.stack(
            [each.reset(seed=seed + index)[0] for index, each in enumerate(self.environments)]
        )
        self.rewards = np.zeros(environments)  # of the episodes so far
        self.pushes = 0

    def play(self, weights: list[Tensor], steps: int, epsilon: float) -> list[float]:
        """Play on in all environments; the rewards of the episodes that ended."""
        with torch.no_grad():
            for parameter, value in zip(self.network.parameters(), weights, strict=True):
                parameter.copy_(value)
        returns: list[float] = []
        steps_done: list[Transitions] = []
        under_way: list[Future[None]] = []
        for step in range(1, steps + 1):
            steps_done.append(self._step(epsilon, returns))
            if len(steps_done) * len(self.states) >= PUSH or step == steps:
                under_way.append(self._push(steps_done))
                steps_done = []
        torch.futures.wait_all(under_way)  # the learner may commit when this call is answered
        return returns

    def _step(self, epsilon: float, returns: list[float]) -> Transitions:
        states = torch.from_numpy(self.states)
        with torch.no_grad():
            greedy = self.network(states).argmax(dim=1)
        random = torch.randint(ACTIONS, greedy.shape, generator=self.generator)
        explores = torch.rand(greedy.shape, generator=self.generator) < epsilon
        actions = torch.where(explores, random, greedy)
        results = [
            each.step(action)[:4]
            for each, action in zip(self.environments, actions.tolist(), strict=True)
        ]
        next_states, rewards, failed, out_of_time = map(np.array, zip(*results, strict=True))
        self.states = next_states.copy()
        self.rewards += rewards
        for index in np.flatnonzero(failed | out_of_time):
            returns.append(float(self.rewards[index]))
            self.rewards[index] = 0.0
            self.states[index], _ = self.environments[index].reset()
        columns = (rewards.astype(np.float32), next_states, failed)
        return Transitions(states, actions, *map(torch.from_numpy, columns))

    def _push(self, steps: list[Transitions]) -> Future[None]:
        transitions = Transitions(*map(torch.cat, zip(*steps, strict=True)))
        shard = self.shards[(self.number + self.pushes) % len(self.shards)]
        self.pushes += 1
        call: Future[None] = shard.rpc_async().push(self.number, self.pushes, transitions)
        return call


class Batch(NamedTuple):
    """A sample of the whole buffer, and where it came from."""

    transitions: Transitions
    weights: Tensor
    places: list[Tensor]  # by shard


class Buffer:
    """All shards, as the learner sees them."""

    def __init__(self, shards: list[RRef[Shard]], batch_size: int, seed: int) -> None:
        self.shards, self.batch_size = shards, batch_size
        self.generator = torch.Generator().manual_seed(seed)
        self.masses = torch.zeros(len(shards))
        self.calls = 0

    def commit(self) -> None:
        masses = torch.futures.wait_all([shard.rpc_async().commit() for shard in self.shards])
        self.masses = torch.tensor(masses)

    def ask(self, places: list[Tensor], priorities: list[Tensor]) -> list[Future[Drawn]]:
        """Send priorities to the shards, and ask them for their parts of a batch."""
        self.asked_by = self.masses / self.masses.sum()
        chosen = torch.multinomial(
            self.asked_by, self.batch_size, replacement=True, generator=self.generator
        )
        counts = torch.bincount(chosen, minlength=len(self.shards)).tolist()
        self.calls += len(self.shards)
        asked = zip(self.shards, places, priorities, counts, strict=True)
        return [shard.rpc_async().exchange(*arguments) for shard, *arguments in asked]

    def take(self, asked: list[Future[Drawn]], beta: float) -> Batch:
        """The batch, with its importance weights."""
        parts = torch.futures.wait_all(asked)
        size = sum(part.size for part in parts)
        chances = torch.cat(
            [share * part.chances for share, part in zip(self.asked_by, parts, strict=True)]
        )
        weights = (size * chances) ** -beta
        self.masses = torch.tensor([part.mass for part in parts])
        columns = zip(*(part.transitions for part in parts), strict=True)
        return Batch(
            Transitions(*map(torch.cat, columns)),
            (weights / weights.max()).float(),
            [part.places for part in parts],
        )


class Learner:
    """Has the network, and improves it on batches of the buffer."""

    def __init__(self, buffer: Buffer, lr: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.network, self.target = make_network(), make_network()
        self.target.load_state_dict(self.network.state_dict())
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=lr)
        self.buffer = buffer

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.network.parameters()]

    def learn(self, updates: int, beta: float) -> None:
        nothing = [torch.empty(0)] * len(self.buffer.shards)
        none = [places.long() for places in nothing]
        batch = self.buffer.take(self.buffer.ask(none, nothing), beta)
        places, priorities = none, nothing
        for _ in range(updates):
            asked = self.buffer.ask(places, priorities)
            errors = self._update(batch)  # while the next batch is on its way
            places = batch.places
            priorities = list(((errors + 0.01) ** ALPHA).split([len(each) for each in places]))
            batch = self.buffer.take(asked, beta)
        torch.futures.wait_all(self.buffer.ask(places, priorities))

    def _update(self, batch: Batch) -> Tensor:
        """One step on a batch; returns the errors on it."""
        states, actions, rewards, next_states, failed = batch.transitions
        with torch.no_grad():
            best = self.network(next_states).argmax(dim=1, keepdim=True)
            following = self.target(next_states).gather(1, best).squeeze(1)
            wanted = rewards + GAMMA * following * ~failed
        values = self.network(states).gather(1, actions[:, None]).squeeze(1)
        loss = (batch.weights * F.smooth_l1_loss(values, wanted, reduction="none")).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), max_norm=10.0)
        self.optimizer.step()
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.network.parameters(), strict=True)
            for slow, parameter in pairs:
                slow.lerp_(parameter, 0.01)
        errors: Tensor = (values.detach() - wanted).abs()
        return errors


def mean(numbers: list[float]) -> float:
    return sum(numbers) / max(1, len(numbers))


def draw(returns: list[float], window: int, path: Path) -> None:
    """The learning curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    moving = [mean(returns[max(0, end - window) : end]) for end in range(1, len(returns) + 1)]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(returns, ".", markersize=3, alpha=0.4, label="reward of the episode")
    axes.plot(moving, linewidth=2, label=f"mean of the last {window}")
    start = mean(returns[:window])
    axes.axhline(start, color="tab:red", linestyle="--", label=f"mean of the first {window}")
    axes.set(title=f"DQN on {ENVIRONMENT}", xlabel="episode", ylabel="reward", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def train(args: argparse.Namespace) -> float:
    """Runs on the learner: until good enough; returns the last episodes' mean reward."""
    from tqdm import tqdm

    capacity = args.capacity // args.shards
    shards = [
        rpc.remote(f"shard{number}", Shard, args=(capacity, args.seed + number))
        for number in range(args.shards)
    ]
    actors = [
        rpc.remote(
            f"actor{number}",
            Actor,
            args=(number, args.envs_per_actor, args.seed + 1000 * (number + 1), shards),
        )
        for number in range(args.actors)
    ]
    buffer = Buffer(shards, args.batch_size, args.seed)
    learner = Learner(buffer, args.lr, args.seed)
    returns: list[float] = []
    steps = args.steps * args.envs_per_actor * args.actors  # of one iteration
    start = time.perf_counter()
    with tqdm(total=args.max_iterations, desc="iteration", unit="it") as progress:
        for iteration in range(args.max_iterations):
            done = iteration / args.max_iterations
            epsilon = max(0.02, 1 - 5 * done)
            weights = learner.weights()
            playing = [
                actor.rpc_async(timeout=0).play(weights, args.steps, epsilon) for actor in actors
            ]
            if iteration * steps >= args.warm_up:
                learner.learn(max(1, steps // args.steps_per_update), BETA + (1 - BETA) * done)
            for ended in torch.futures.wait_all(playing):
                returns += ended
            buffer.commit()
            recent = returns[-args.window :]
            seconds = time.perf_counter() - start
            progress.set_postfix_str(
                f"mean reward {mean(recent):.1f}, {buffer.calls / seconds:.0f} batches' parts/s"
            )
            progress.update()
            if len(recent) == args.window and mean(recent) >= args.stop_reward:
                break

    first, last = mean(returns[: args.window]), mean(returns[-args.window :])
    path = args.output / "replay_buffer.png"
    draw(returns, args.window, path)
    print(
        f"{len(returns)} episodes, {(iteration + 1) * steps} steps, {buffer.calls} parts of "
        f"batches from {args.shards} shards in {seconds:.1f} s"
    )
    print(
        f"mean reward over the last {args.window} episodes: {last:.1f} "
        f"(first {args.window}: {first:.1f}); curve: {os.path.relpath(path)}",
        flush=True,
    )
    return last


def run(rank: int, args: argparse.Namespace) -> None:
    """One rank: 0 is the learner, the others serve the calls that it makes."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29590")
    torch.set_num_threads(1)
    names = ["learner", *(f"actor{number}" for number in range(args.actors))]
    names += [f"shard{number}" for number in range(args.shards)]
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names))
    reward = train(args) if rank == 0 else None
    rpc.shutdown()
    if reward is not None and reward < args.target:
        raise RuntimeError(f"mean reward {reward:.1f} is below the target of {args.target:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description="DQN with a distributed replay buffer.")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--envs-per-actor", type=int, default=4)
    parser.add_argument("--steps", type=int, default=32, help="per environment and iteration")
    parser.add_argument("--max-iterations", type=int, default=200)
    parser.add_argument("--steps-per-update", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=1000, help="steps before the first update")
    parser.add_argument("--capacity", type=int, default=20000, help="of all shards together")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=50, help="episodes in the mean reward")
    parser.add_argument("--stop-reward", type=float, default=180, help="good enough: stop early")
    parser.add_argument("--target", type=float, default=150, help="below it at the end: failed")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "output")
    args = parser.parse_args()
    args.output = args.output.resolve()
    mp.spawn(run, args=(args,), nprocs=args.actors + args.shards + 1)


if __name__ == "__main__":
    main()
