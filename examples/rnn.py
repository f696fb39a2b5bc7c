"""A language model with remote parts: an LSTM here, its embedding and its decoder on a server.

The tables of a language model grow with the vocabulary, its recurrent part does not. So rank 1
("ps") holds the embedding table and the decoder, and rank 0 ("trainer") the LSTM. For every batch
the trainer sends the words and gets their vectors, runs the LSTM, sends its outputs and gets the
scores of the next words. Backward, gradients take the same way in a context of distributed
autograd, and a ``DistributedOptimizer`` updates each part where it lives: no parameter is sent.

The text comes from a small random grammar. Verbs agree with their subjects, also over a relative
clause ("the dogs that the man sees sleep ."), which takes a memory to predict. A unigram model,
which knows how frequent the words are, is the baseline. The grammar's own perplexity is known,
too: no model can do better on a long text.

Run::

    rayrpc run examples/rnn.py
    rayrpc run examples/rnn.py --steps 600 --hidden 128

The program is plain ``torch.distributed.rpc``: ``python examples/rnn.py`` runs it on stock torch.
It needs ``matplotlib`` and ``tqdm``, and draws the learning curve into ``rnn.png`` under
``--output``. The exit status is 1 if the perplexity on new text stays above ``--max-perplexity``.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.optim import DistributedOptimizer
from torch.nn import functional as F

T = TypeVar("T")
State = tuple[Tensor, Tensor]  # of the LSTM

# Each list has its singular forms first, the plural ones second.
DETERMINERS = (("the", "a", "every"), ("the", "some", "many"))
NOUNS = (
    ("dog", "cat", "man", "child", "bird", "friend"),
    ("dogs", "cats", "men", "children", "birds", "friends"),
)
SLEEPS = (("sleeps", "sings", "waits", "runs"), ("sleep", "sing", "wait", "run"))
SEES = (("sees", "likes", "hears", "finds"), ("see", "like", "hear", "find"))
ADJECTIVES = ("small", "old", "loud", "happy")
WORDS = sorted({".", "that", *ADJECTIVES}.union(*DETERMINERS, *NOUNS, *SLEEPS, *SEES))
NUMBERS = {word: number for number, word in enumerate(WORDS)}


class Grammar:
    """Writes sentences, and adds up how improbable its choices were."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.surprise = 0.0  # minus the logarithm of the probability of all choices

    def write(self, words: int) -> list[str]:
        text: list[str] = []
        while len(text) < words:
            text += self._sentence()
        return text

    def _sentence(self) -> Iterator[str]:
        number = self._pick((0, 1))
        yield from self._noun_phrase(number)
        if self._is(0.4):  # a relative clause between the subject and its verb
            yield "that"
            if self._is(0.5):
                yield self._pick(SEES[number])
                yield from self._noun_phrase(self._pick((0, 1)))
            else:
                other = self._pick((0, 1))
                yield from self._noun_phrase(other)
                yield self._pick(SEES[other])
        if self._is(0.5):
            yield self._pick(SLEEPS[number])
        else:
            yield self._pick(SEES[number])
            yield from self._noun_phrase(self._pick((0, 1)))
        yield "."

    def _noun_phrase(self, number: int) -> Iterator[str]:
        yield self._pick(DETERMINERS[number])
        if self._is(0.3):
            yield self._pick(ADJECTIVES)
        yield self._pick(NOUNS[number])

    def _pick(self, options: Sequence[T]) -> T:
        self.surprise += math.log(len(options))
        return self.random.choice(options)

    def _is(self, probability: float) -> bool:
        chosen = self.random.random() < probability
        self.surprise -= math.log(probability if chosen else 1 - probability)
        return chosen


def unigram_perplexity(train: list[str], test: list[str]) -> float:
    """Of the model that predicts every word by its share of the training text."""
    counts = Counter(train)
    surprise = sum(math.log(len(train) / max(1, counts[word])) for word in test)
    return math.exp(surprise / len(test))


def to_columns(text: list[str], columns: int) -> Tensor:
    """The text as [words, columns]: each column goes on where the one before it ends."""
    numbers = torch.tensor([NUMBERS[word] for word in text])
    return numbers[: len(numbers) // columns * columns].view(columns, -1).t().contiguous()


class RemotePart:
    """A module on the server, whose forward pass others call."""

    def __init__(self, kind: str, width: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.module: nn.Module
        if kind == "embedding":
            self.module = nn.Embedding(len(WORDS), width)
        else:
            self.module = nn.Linear(width, len(WORDS))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.module(inputs)
        return output

    def parameters(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.module.parameters()]


class LanguageModel:
    """The whole model, seen from the trainer."""

    def __init__(self, width: int, hidden: int, seed: int) -> None:
        self.embedding = rpc.remote("ps", RemotePart, args=("embedding", width, seed))
        self.decoder = rpc.remote("ps", RemotePart, args=("decoder", hidden, seed + 1))
        torch.manual_seed(seed + 2)
        self.lstm = nn.LSTM(width, hidden)

    def forward(self, words: Tensor, state: State | None) -> tuple[Tensor, State]:
        """The scores of each next word, [steps, columns, words], and the state at the end."""
        vectors = self.embedding.rpc_sync().forward(words)
        outputs, state = self.lstm(vectors, state)
        assert state is not None
        return self.decoder.rpc_sync().forward(outputs), state

    def loss(self, text: Tensor, state: State | None) -> tuple[Tensor, State]:
        scores, state = self.forward(text[:-1], state)
        return F.cross_entropy(scores.flatten(0, 1), text[1:].flatten()), state

    def perplexity(self, text: Tensor) -> float:
        with torch.no_grad():
            return math.exp(self.loss(text, None)[0].item())

    def write(self, words: int, seed: int) -> str:
        """Words that the model itself makes up, each drawn by the scores."""
        generator = torch.Generator().manual_seed(seed)
        text, state = [NUMBERS["."]], None
        with torch.no_grad():
            for _ in range(words):
                scores, state = self.forward(torch.tensor([[text[-1]]]), state)
                probabilities = scores.flatten().softmax(dim=0)
                text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return " ".join(WORDS[number] for number in text[1:])

    def parameters(self) -> list[rpc.RRef[nn.Parameter]]:
        remote = [*self.embedding.rpc_sync().parameters(), *self.decoder.rpc_sync().parameters()]
        return remote + [rpc.RRef(parameter) for parameter in self.lstm.parameters()]


def draw(curve: list[tuple[int, float]], unigram: float, grammar: float, path: Path) -> None:
    """The learning curve as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*zip(*curve, strict=True), marker=".", label="LSTM with remote parts")
    axes.axhline(unigram, color="tab:red", linestyle="--", label=f"unigram model: {unigram:.1f}")
    axes.axhline(grammar, color="tab:green", linestyle=":", label=f"the grammar: {grammar:.1f}")
    axes.set(title="Language model on new text", xlabel="step", ylabel="perplexity", yscale="log")
    ticks = [2, 3, 5, 10, 20, 40]
    axes.set_yticks(ticks, labels=[str(tick) for tick in ticks], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def train(args: argparse.Namespace) -> float:
    """Runs on the trainer; returns the perplexity on text that it has not seen."""
    from tqdm import tqdm

    train_text = Grammar(args.seed).write(args.words)
    writer = Grammar(args.seed + 1)
    test_text = writer.write(4000)
    unigram = unigram_perplexity(train_text, test_text)
    grammar = math.exp(writer.surprise / len(test_text))
    text, test = to_columns(train_text, args.columns), to_columns(test_text, args.columns)

    model = LanguageModel(args.width, args.hidden, args.seed)
    optimizer = DistributedOptimizer(torch.optim.Adam, model.parameters(), lr=args.lr)
    curve = [(0, model.perplexity(test))]
    position, state = 0, None
    report_every = max(1, args.steps // 20)
    start = time.perf_counter()
    with tqdm(total=args.steps, desc="step", unit="step") as progress:
        for step in range(1, args.steps + 1):
            if position + 1 >= len(text):  # the text begins again, and with it the memory
                position, state = 0, None
            window = text[position : position + args.window + 1]
            with dist_autograd.context() as context_id:
                loss, (hidden, cell) = model.loss(window, state)
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            # The state goes on, its history does not: gradients reach back over one window.
            position, state = position + args.window, (hidden.detach(), cell.detach())
            if step % report_every == 0 or step == args.steps:
                curve.append((step, model.perplexity(test)))
                progress.set_postfix_str(f"perplexity {curve[-1][1]:.2f}")
            progress.update()
    seconds = time.perf_counter() - start

    path = args.output / "rnn.png"
    draw(curve, unigram, grammar, path)
    print(f"the model writes: {model.write(24, args.seed)}")
    print(f"{args.steps} steps in {seconds:.1f} s ({args.steps / seconds:.0f} steps/s)")
    print(
        f"perplexity {curve[0][1]:.1f} -> {curve[-1][1]:.2f} (unigram model {unigram:.1f}, "
        f"grammar {grammar:.2f}); curve: {os.path.relpath(path)}",
        flush=True,
    )
    return curve[-1][1]


def run(rank: int, args: argparse.Namespace) -> None:
    """One rank: 0 is the trainer, 1 serves the calls that it makes."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29560")
    torch.set_num_threads(1)
    rpc.init_rpc("trainer" if rank == 0 else "ps", rank=rank, world_size=2)
    perplexity = train(args) if rank == 0 else 0.0
    rpc.shutdown()
    if not perplexity <= args.max_perplexity:
        raise RuntimeError(f"perplexity {perplexity:.2f} is above {args.max_perplexity:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A language model with its tables on a server.")
    parser.add_argument("--words", type=int, default=20000, help="of the training text")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--columns", type=int, default=32, help="texts read side by side")
    parser.add_argument("--window", type=int, default=20, help="words per step and column")
    parser.add_argument("--width", type=int, default=32, help="of the embedding")
    parser.add_argument("--hidden", type=int, default=64, help="width of the LSTM")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-perplexity", type=float, default=8.0, help="above: failed")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "output")
    args = parser.parse_args()
    args.output = args.output.resolve()
    mp.spawn(run, args=(args,), nprocs=2)


if __name__ == "__main__":
    main()
