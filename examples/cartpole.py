"""An agent and its observers learn to balance CartPole-v1 together.

Rank 0 ("agent") owns the policy; every other rank ("observer0", ...) owns some copies of the
environment. One iteration:

1. The agent asks every observer, through an RRef, for a rollout (``rpc_async``).
2. At each step of it an observer sends its environments' states to the agent, through the RRef
   of the agent, and gets the actions back. The agent answers such calls together: the method is
   an ``async_execution`` one that returns a Future, and when the states of *all* observers have
   come in, one pass of the policy over the whole batch completes all the Futures. No thread of
   the agent blocks while it collects.
3. The rollouts come back, and the agent improves the policy (PPO with GAE).

Run::

    rayrpc run examples/cartpole.py
    rayrpc run examples/cartpole.py --observers 8 --envs-per-observer 2 --seed 1

The program is plain ``torch.distributed.rpc``: ``python examples/cartpole.py`` runs it on stock
torch. It needs ``gymnasium``, ``matplotlib`` and ``tqdm``, draws the learning curve into
``cartpole.png`` under ``--output``, and its exit status is 1 if the last episodes' mean reward
is below ``--target``. The batch is put in the order of the observers, not of their arrival, so
a run depends on its arguments alone.
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
from torch.futures import Future
from torch.nn import functional as F

ENVIRONMENT = "CartPole-v1"
STATE_SIZE, ACTIONS = 4, 2
GAMMA, LAMBDA = 0.98, 0.9  # discount of the rewards, and of the advantage estimates' horizon
EPOCHS, MINIBATCH, CLIP, ENTROPY_BONUS = 8, 256, 0.2, 0.005


class Rollout(NamedTuple):
    """What one observer saw; every tensor is [steps, environments, ...]."""

    states: Tensor
    actions: Tensor
    rewards: Tensor
    next_states: Tensor  # before the reset, where an episode ended
    failed: Tensor  # the pole fell: no reward follows
    ended: Tensor  # the pole fell, or the time limit was reached


class Observer:
    """Steps its environments; asks the agent what to do in each state."""

    def __init__(self, agent: rpc.RRef[Agent], index: int, environments: int, seed: int) -> None:
        self.agent = agent
        self.index = index
        self.environments = [gymnasium.make(ENVIRONMENT) for _ in range(environments)]
        self.states = np.stack(
            [env.reset(seed=seed + number)[0] for number, env in enumerate(self.environments)]
        )

    def rollout(self, steps: int) -> Rollout:
        """``steps`` steps of each environment, going on where the last rollout stopped."""
        transitions = [self._step() for _ in range(steps)]
        return Rollout(*(torch.stack(column) for column in zip(*transitions, strict=True)))

    def _step(self) -> tuple[Tensor, ...]:
        states = torch.tensor(self.states)
        actions = self.agent.rpc_sync().select_actions(self.index, states)
        results = [
            env.step(action)[:4]
            for env, action in zip(self.environments, actions.tolist(), strict=True)
        ]
        next_states, rewards, failed, out_of_time = map(np.array, zip(*results, strict=True))
        ended = failed | out_of_time
        self.states = next_states.copy()
        for number in np.flatnonzero(ended):
            self.states[number], _ = self.environments[number].reset()
        columns = (rewards.astype(np.float32), next_states, failed, ended)
        return (states, actions, *map(torch.from_numpy, columns))


class ActorCritic(nn.Module):
    """A policy (the logits of the actions) and a value estimate for every state."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = self._mlp(ACTIONS)
        self.value = self._mlp(1)

    @staticmethod
    def _mlp(outputs: int) -> nn.Module:
        body = [nn.Linear(STATE_SIZE, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
        return nn.Sequential(*body, nn.Linear(64, outputs))

    def log_probs(self, states: Tensor) -> Tensor:
        logits: Tensor = self.policy(states)
        return logits.log_softmax(dim=-1)

    def values(self, states: Tensor) -> Tensor:
        values: Tensor = self.value(states)
        return values.squeeze(-1)


class Agent:
    """Chooses the actions for all observers, and learns from what they report."""

    def __init__(self, observers: int, environments: int, lr: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = ActorCritic()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.lock = threading.Lock()
        self.waiting: dict[int, tuple[Tensor, Future[Tensor]]] = {}  # by observer
        self.calls = 0
        self.returns: list[float] = []  # of every finished episode
        self.running = torch.zeros(observers * environments)
        # The Agent's RRef goes to the observers and theirs come back: close() breaks the ring.
        reference = rpc.RRef(self)
        self.observers = [
            rpc.remote(
                f"observer{index}",
                Observer,
                args=(reference, index, environments, seed + 1000 * (index + 1)),
            )
            for index in range(observers)
        ]

    @rpc.functions.async_execution
    def select_actions(self, observer: int, states: Tensor) -> Future[Tensor]:
        """Called by the observers; completed when the states of all of them are here."""
        answer: Future[Tensor] = Future()
        with self.lock:
            self.calls += 1
            self.waiting[observer] = (states, answer)
            if len(self.waiting) < len(self.observers):
                return answer
            batch, self.waiting = self.waiting, {}
        parts, answers = zip(*(batch[index] for index in sorted(batch)), strict=True)
        with torch.no_grad():
            probabilities = self.model.log_probs(torch.cat(parts)).exp()
        actions = torch.multinomial(probabilities, num_samples=1).squeeze(-1)
        sizes = [len(part) for part in parts]
        for future, chosen in zip(answers, actions.split(sizes), strict=True):
            future.set_result(chosen.clone())
        return answer

    def collect(self, steps: int) -> Rollout:
        """One rollout of every observer, side by side."""
        pending = [observer.rpc_async().rollout(steps) for observer in self.observers]
        rollouts = torch.futures.wait_all(pending)
        rollout = Rollout(*(torch.cat(parts, dim=1) for parts in zip(*rollouts, strict=True)))
        for rewards, ended in zip(rollout.rewards, rollout.ended, strict=True):
            self.running += rewards
            self.returns.extend(self.running[ended].tolist())
            self.running[ended] = 0.0
        return rollout

    def learn(self, rollout: Rollout) -> None:
        """One PPO update: several passes over the rollout, none too far from the old policy."""
        with torch.no_grad():
            old_log_probs = self._chosen(self.model.log_probs(rollout.states), rollout.actions)
            advantages, targets = self._estimate(rollout)
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        columns = (rollout.states, rollout.actions, old_log_probs, advantages, targets)
        flat = [column.flatten(0, 1) for column in columns]
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(flat[0])).split(MINIBATCH):
                states, actions, old, advantage, target = (column[rows] for column in flat)
                log_probs = self.model.log_probs(states)
                ratio = (self._chosen(log_probs, actions) - old).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
                value_loss = F.mse_loss(self.model.values(states), target)
                entropy = -(log_probs.exp() * log_probs).sum(dim=-1).mean()
                loss = policy_loss + 0.5 * value_loss - ENTROPY_BONUS * entropy
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=0.5)
                self.optimizer.step()

    def close(self) -> None:
        """Release the observers, and with them their references to this agent."""
        self.observers.clear()

    def _estimate(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Generalized advantage estimates, and the value targets that go with them."""
        values = self.model.values(rollout.states)
        next_values = self.model.values(rollout.next_states) * ~rollout.failed
        surprise = rollout.rewards + GAMMA * next_values - values
        advantages = torch.empty_like(surprise)
        following = torch.zeros_like(surprise[0])
        for step in reversed(range(len(surprise))):
            carried = GAMMA * LAMBDA * following * ~rollout.ended[step]
            following = advantages[step] = surprise[step] + carried
        return advantages, advantages + values

    @staticmethod
    def _chosen(log_probs: Tensor, actions: Tensor) -> Tensor:
        return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def mean(numbers: list[float]) -> float:
    return sum(numbers) / max(1, len(numbers))


def draw(returns: list[float], window: int, path: Path) -> None:
    """The learning curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    moving = [mean(returns[max(0, end - window) : end]) for end in range(1, len(returns) + 1)]
    figure, axes = plt.subplots(figsize=(8, 4.5))
    axes.plot(returns, ".", markersize=3, alpha=0.4, label="reward of the episode")
    axes.plot(moving, linewidth=2, label=f"mean of the last {window}")
    axes.set(title=ENVIRONMENT, xlabel="episode", ylabel="reward", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def train(args: argparse.Namespace) -> float:
    """Runs on the agent: learns until good enough, returns the last episodes' mean reward."""
    from tqdm import tqdm

    torch.set_num_threads(1)
    agent = Agent(args.observers, args.envs_per_observer, args.lr, args.seed)
    start = time.perf_counter()
    with tqdm(total=args.max_iterations, desc="iteration", unit="it") as progress:
        for _ in range(args.max_iterations):
            agent.learn(agent.collect(args.steps))
            recent = agent.returns[-args.window :]
            seconds = time.perf_counter() - start
            progress.set_postfix_str(
                f"mean reward {mean(recent):.1f}, {agent.calls / seconds:.0f} RPC calls/s"
            )
            progress.update()
            if len(recent) == args.window and mean(recent) >= args.stop_reward:
                break
    agent.close()

    first, last = mean(agent.returns[: args.window]), mean(agent.returns[-args.window :])
    curve = args.output / "cartpole.png"
    draw(agent.returns, args.window, curve)
    print(
        f"{len(agent.returns)} episodes, {agent.calls * args.envs_per_observer} steps, "
        f"{agent.calls} calls of select_actions in {seconds:.1f} s"
    )
    print(
        f"mean reward over the last {args.window} episodes: {last:.1f} "
        f"(first {args.window}: {first:.1f}); curve: {os.path.relpath(curve)}",
        flush=True,
    )
    return last


def run(rank: int, args: argparse.Namespace) -> None:
    """One rank: 0 is the agent, the others serve the calls that it makes."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29530")
    name = "agent" if rank == 0 else f"observer{rank - 1}"
    torch.set_num_threads(1)
    rpc.init_rpc(name, rank=rank, world_size=args.observers + 1)
    reward = train(args) if rank == 0 else None
    rpc.shutdown()
    if reward is not None and reward < args.target:
        raise RuntimeError(f"mean reward {reward:.1f} is below the target of {args.target:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description="An agent and its observers learn CartPole-v1.")
    parser.add_argument("--observers", type=int, default=4)
    parser.add_argument("--envs-per-observer", type=int, default=4)
    parser.add_argument("--steps", type=int, default=64, help="per environment and iteration")
    parser.add_argument("--max-iterations", type=int, default=56)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, default=50, help="episodes in the mean reward")
    parser.add_argument("--stop-reward", type=float, default=195, help="good enough: stop early")
    parser.add_argument("--target", type=float, default=100, help="below it at the end: failed")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "output")
    args = parser.parse_args()
    args.output = args.output.resolve()
    mp.spawn(run, args=(args,), nprocs=args.observers + 1)


if __name__ == "__main__":
    main()
