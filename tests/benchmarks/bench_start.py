"""Measure how long a small program takes from its start to its end, beside plain python.

    python tests/benchmarks/bench_start.py [--ranks 2 8] [--rounds N] [--output FOLDER]

The program's ranks, which ``torch.multiprocessing.spawn`` starts, call one another once.  The
columns take turns, round by round:

tensorpipe  ``python``: torch's own RPC
run         ``rayrpc run``, which starts a local cluster and ends it
up          ``rayrpc run`` on the cluster that ``rayrpc up`` keeps

A result is the median over the rounds, in seconds of wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cluster import ROOT, clean_up_on_sigterm

COLUMNS = ("tensorpipe", "run", "up")
SECONDS = 300.0  # that a program may take
SETTLE_SECONDS = 60.0  # until the machine is quiet
QUIET_PERCENT = 30.0  # of all cores

PROGRAM = """
import os, sys
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

def main(rank, size):
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=size)
    total = rpc.rpc_sync(f"rank{(rank + 1) % size}", torch.add, args=(torch.ones(2), rank))
    assert total.tolist() == [1.0 + rank] * 2
    rpc.shutdown()

if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29650"}
    size = int(sys.argv[1])
    mp.spawn(main, args=(size,), nprocs=size)
"""


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="folder for start.json")
    options = parser.parse_args()
    clean_up_on_sigterm()
    results = {}
    with tempfile.TemporaryDirectory(prefix="rb-") as folder:
        path = Path(folder) / "hello.py"
        path.write_text(PROGRAM)
        for ranks in options.ranks:
            results[ranks] = _measure(path, ranks, options.rounds)
            print(f"{ranks} ranks: " + _text(results[ranks]), flush=True)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "start.json").write_text(json.dumps(results, indent=1))


def _text(seconds: dict[str, float]) -> str:
    return ", ".join(f"{column} {seconds[column]:.2f} s" for column in COLUMNS)


def _measure(path: Path, ranks: int, rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {column: [] for column in COLUMNS}
    with tempfile.TemporaryDirectory(prefix="rb-") as kept:
        environs = {
            "tensorpipe": _environ(str(path.parent)),
            "run": _environ(str(path.parent)),
            "up": _environ(kept),
        }
        rayrpc = [sys.executable, "-m", "rayrpc"]
        _run([*rayrpc, "up"], environs["up"])
        try:
            for _ in range(rounds):
                for column in COLUMNS:
                    command = [sys.executable] if column == "tensorpipe" else [*rayrpc, "run"]
                    _wait_until_quiet()
                    times[column].append(_run([*command, str(path), str(ranks)], environs[column]))
        finally:
            _run([*rayrpc, "down"], environs["up"])
    return {column: statistics.median(each) for column, each in times.items()}


def _environ(folder: str) -> dict[str, str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "RAYRPC_"))}
    paths = [str(ROOT), environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(each for each in paths if each)
    return {**environ, "RAY_TMPDIR": folder}


def _run(command: list[str], environ: dict[str, str]) -> float:
    begin = time.perf_counter()
    done = subprocess.run(
        command, env=environ, timeout=SECONDS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout.decode()}")
    return seconds


def _wait_until_quiet() -> None:
    """Wait until what the program before has started has ended."""
    import psutil

    deadline = time.monotonic() + SETTLE_SECONDS
    while psutil.cpu_percent(1.0) > QUIET_PERCENT and time.monotonic() < deadline:
        pass


if __name__ == "__main__":
    main()
