"""Time an ensemble of bidirectional LSTMs, one after another and by ``rayrpc.jit.fork``.

    python tests/benchmarks/bench_fork.py [--workers 1 2] [--rounds N]

Each model runs on one thread, here or on a worker.  Rounds alternate; the table has medians.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

import rayrpc as rpc
from rayrpc import jit


class BidirectionalLSTM(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.forth = nn.LSTM(width, width)
        self.back = nn.LSTM(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forth, _ = self.forth(x)
        back, _ = self.back(torch.flip(x, dims=[0]))
        return torch.cat((forth, torch.flip(back, dims=[0])), dim=2)


class Ensemble(nn.Module):
    def __init__(self, models: int, width: int) -> None:
        super().__init__()
        self.models = nn.ModuleList([BidirectionalLSTM(width) for _ in range(models)])

    def forward(self, x: torch.Tensor, forked: bool) -> torch.Tensor:
        if forked:
            futures = [jit.fork(model, x) for model in self.models]
            results = [jit.wait(future) for future in futures]
        else:
            results = [model(x) for model in self.models]
        return torch.stack(results).sum(dim=0)


def seconds(ensemble: Ensemble, x: torch.Tensor, forked: bool) -> float:
    start = time.perf_counter()
    ensemble(x, forked)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="The speed-up of rayrpc.jit.fork.")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ensemble = Ensemble(args.models, args.width)
    x = torch.rand(args.length, args.length, args.width)
    print(f"{args.models} models of width {args.width}, {args.length} steps")
    with torch.no_grad():
        for workers in args.workers:
            one_thread = {"env_vars": {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}}
            rpc.configure(fork_workers=workers, runtime_env=one_thread)
            assert torch.allclose(ensemble(x, True), ensemble(x, False), atol=1e-5)
            times: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(args.rounds):
                for forked, found in times.items():
                    found.append(seconds(ensemble, x, forked))
            one, many = statistics.median(times[False]), statistics.median(times[True])
            print(
                f"in turn {one * 1e3:6.0f} ms, forked to {workers} workers {many * 1e3:6.0f} ms: "
                f"{one / many:.2f} times as fast"
            )
            rpc.shutdown()


if __name__ == "__main__":
    main()
