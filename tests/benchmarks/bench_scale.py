"""Measure groups of many workers: on one node beside TensorPipe, and over eight hosts.

    python tests/benchmarks/bench_scale.py [--workers 2 8 32] [--columns tensorpipe,run,up,hosts]

One program, whose ranks ``torch.multiprocessing.spawn`` starts; the columns take turns:

tensorpipe  ``python``: torch's own RPC
run         ``rayrpc run``, which starts a local cluster
up          ``rayrpc run`` on the cluster that ``rayrpc up`` keeps
hosts       ``rayrpc run`` on a cluster of eight hosts, which are network namespaces of this machine
            (by root, on Linux); it runs before the clock starts

up          seconds from the start of the program until all ranks are through ``init_rpc``
p50 first   microseconds of a call between two ranks, before others have called
all to all  seconds until everyone has called everyone
p50 then    the same call after that
memory      MB of a rank, its share of shared pages included (PSS), and MB of all processes together
threads     of a rank, 20 seconds after the last call; descriptors
end         seconds from the last call to the end of the program
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "hosts")]

HOSTS = 8
PORT = "29640"
SECONDS = 400.0  # that a program may take
COLUMNS = ("tensorpipe", "run", "up", "hosts")
FIGURES = (
    "up",
    "p50 first",
    "all to all",
    "p50 then",
    "memory",
    "in all",
    "threads",
    "files",
    "end",
)

PROGRAM = """
import json, os, sys, time
import torch.multiprocessing as mp
import torch.distributed.rpc as rpc

size, begin = int(sys.argv[1]), float(sys.argv[2])

def nothing():
    pass

def call_everyone(size):
    for rank in range(size):
        rpc.rpc_sync(f"w{rank}", nothing)

def describe():
    with open("/proc/self/smaps_rollup") as file:
        pss = next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
    tasks, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    return pss / 1024, tasks, files

def p50():
    times = []
    for _ in range(2000):
        start = time.perf_counter()
        rpc.rpc_sync("w1", nothing)
        times.append(time.perf_counter() - start)
    return sorted(times)[1000] * 1e6

def work(rank, size, begin):
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=300, init_method=os.environ["MEET"])
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    if rank == 0:
        found = {"up": time.time() - begin, "p50 first": p50()}
        start = time.perf_counter()
        for each in [rpc.rpc_async(f"w{n}", call_everyone, args=(size,)) for n in range(size)]:
            each.wait()
        found["all to all"] = time.perf_counter() - start
        found["p50 then"] = p50()
        time.sleep(20)
        described = [rpc.rpc_sync(f"w{n}", describe) for n in range(size)]
        for name, values in zip(("memory", "threads", "files"), zip(*described)):
            found[name] = sorted(values)[size // 2]
        print("found", json.dumps({**found, "ended": time.time()}), flush=True)
    rpc.shutdown()

if __name__ == "__main__":
    mp.spawn(work, args=(size, begin), nprocs=size)
"""


def _used() -> float:
    """Return the memory that is used on this machine, in MB."""
    memory = psutil.virtual_memory()
    return float(memory.total - memory.available) / 2**20


def _run(command: list[str], environ: dict[str, str]) -> dict[str, float]:
    """Run the program; return its figures."""
    before = _used()
    process = subprocess.Popen(
        [*command, str(time.time())], env=environ, stdout=subprocess.PIPE, text=True
    )
    most, found = 0.0, {}
    try:
        assert process.stdout is not None
        for line in process.stdout:
            at = line.find("found {")
            if at >= 0:
                found = json.loads(line[at + len("found ") :])
                most = _used() - before
        process.wait(SECONDS)
    finally:
        process.kill()
    found["end"] = time.time() - found.pop("ended")
    return {**found, "in all": most}


def _command(program: str, count: int, column: str, hosts: Any) -> list[str]:
    if column == "tensorpipe":
        return [sys.executable, program, str(count)]
    options = []
    if column == "hosts":
        places = ", ".join(
            f"rank{rank}: {{resources: {{node:{hosts.address(1 + rank % HOSTS)}: 0.001}}}}"
            for rank in range(count)
        )
        options = ["--set", f"workers={{{places}}}"]
    command = [sys.executable, "-m", "rayrpc", "run", *options, program, str(count)]
    return command if hosts is None else hosts.command(1, *command)


def _rayrpc(command: str, environ: dict[str, str]) -> None:
    command_line = [sys.executable, "-m", "rayrpc", command]
    subprocess.run(command_line, env=environ, check=True, timeout=SECONDS)


@contextlib.contextmanager
def _clusters(columns: list[str]) -> Iterator[dict[str, tuple[Any, dict[str, str]]]]:
    """Start what the columns need; yield hosts and environment by column."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",  # torch warns of its own use of a class
        "MEET": f"tcp://127.0.0.1:{PORT}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": PORT,
    }
    made: dict[str, tuple[Any, dict[str, str]]] = {"tensorpipe": (None, environ)}
    with contextlib.ExitStack() as stack:
        for column in ("run", "up"):
            folder = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="rb-", ignore_cleanup_errors=True)
            )
            made[column] = None, {**environ, "RAY_TMPDIR": folder}
        if "up" in columns:
            stack.callback(_rayrpc, "down", made["up"][1])
            _rayrpc("up", made["up"][1])
        if "hosts" in columns:
            from host_cluster import cluster_of_hosts

            hosts, theirs = stack.enter_context(cluster_of_hosts(10.0, HOSTS))
            meet = {"MEET": f"tcp://{hosts.address(1)}:{PORT}", "MASTER_PORT": PORT}
            made["hosts"] = hosts, {**theirs, **meet}
        yield made


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--columns", default=",".join(COLUMNS))
    options = parser.parse_args()
    columns = options.columns.split(",")
    print(" " * 16 + "".join(f"{each:>12}" for each in FIGURES))
    with tempfile.TemporaryDirectory() as folder, _clusters(columns) as made:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        for count in options.workers:
            rounds: dict[str, list[dict[str, float]]] = {column: [] for column in columns}
            for _ in range(options.rounds):
                for column in columns:
                    hosts, environ = made[column]
                    command = _command(str(program), count, column, hosts)
                    rounds[column].append(_run(command, environ))
            for column, found in rounds.items():
                medians = [statistics.median(each[name] for each in found) for name in FIGURES]
                cells = "".join(f"{value:12.2f}" for value in medians)
                print(f"{count:3} {column:12}{cells}", flush=True)


if __name__ == "__main__":
    main()
