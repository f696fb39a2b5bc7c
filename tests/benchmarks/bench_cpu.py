"""Measure the CPU time of a call, of both processes together, beside TensorPipe's.

    python tests/benchmarks/bench_cpu.py [--against FOLDER] [--rounds N] [--calls N]

``--against`` names another checkout of rayrpc: its column shows whether a change costs CPU time.
The columns take turns, round by round; TensorPipe's processes, which poll, are stopped while
others are measured.  A result is the median over the rounds, a ratio the median of the rounds'.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from carriers import RpcCalls
from cluster import FOLDER, ROOT, clean_up_on_sigterm, settle

BATCH = 100
ANSWER = "answer: "
ROWS = ("rpc_sync, int", "rpc_sync, 2 floats", "rpc_async, int", "remote and to_here", "method")


def main() -> None:
    """Measure, or be the caller of one column."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="FOLDER", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=1500, help="of each row and round")
    parser.add_argument("--play", choices=("rayrpc", "tensorpipe"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        _play(options.play)
        return
    clean_up_on_sigterm()
    with contextlib.ExitStack() as stack:
        columns = {"rayrpc": Column("rayrpc", ROOT)}
        if options.against:
            columns["against"] = Column("rayrpc", options.against.resolve())
        columns["tensorpipe"] = Column("tensorpipe", ROOT)
        for column in columns.values():
            stack.callback(column.close)
        for column in columns.values():
            column.wait_ready()
        settle()
        rounds = [_round(number, columns, options.calls) for number in range(options.rounds)]
    _print(rounds, list(columns))


class Column:
    """A caller and its callee, in processes of their own.

    Args:
        system: "rayrpc" or "tensorpipe".
        checkout: of rayrpc.
    """

    def __init__(self, system: str, checkout: Path) -> None:
        self._folder = tempfile.mkdtemp(prefix="rb-")
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(checkout), str(FOLDER)]),
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": self._folder,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        environ.pop("RAY_ADDRESS", None)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--play", system],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=checkout,  # Ray puts it in front of its workers' paths
            env=environ,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        """Wait until calls can be made, then stop the processes."""
        self._read()
        self._signal(signal.SIGSTOP)

    def measure(self, row: str, calls: int) -> float:
        """Return the microseconds of CPU time of a call."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps([row, calls]) + "\n")
        self._process.stdin.flush()
        result = float(self._read())
        self._signal(signal.SIGSTOP)
        return result

    def close(self) -> None:
        """End the processes."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        self._signal(signal.SIGKILL)
        self._process.wait(5)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER)
            print(line, end="", file=sys.stderr)  # of Ray's workers
        sys.exit("a process of the benchmark ended early")


# -- the caller ---------------------------------------------------------------------------------


def _play(system: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    rpc, name = (_rayrpc if system == "rayrpc" else _tensorpipe)()
    calls = RpcCalls(rpc, name)
    print(ANSWER, flush=True)
    for line in sys.stdin:
        row, count = json.loads(line)
        _run(calls, row, max(1, count // 10))
        before = time.process_time() + rpc.rpc_sync(name, time.process_time)
        _run(calls, row, count)
        after = time.process_time() + rpc.rpc_sync(name, time.process_time)
        print(f"{ANSWER}{(after - before) / count * 1e6}", flush=True)
    if system == "rayrpc":
        rpc.shutdown(graceful=False)
        importlib.import_module("ray").shutdown()
    os._exit(0)  # the parent ends the other processes


def _rayrpc() -> tuple[Any, str]:
    import ray

    # a cluster of its own: Ray's workers have the PYTHONPATH of their cluster
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    rpc = importlib.import_module("rayrpc")
    rpc.start_workers(["callee"])
    return rpc, "callee"


def _tensorpipe() -> tuple[Any, str]:
    import torch.multiprocessing as mp

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    mp.spawn(_join, args=(address, 1), join=False)
    return _join(0, address, 0), "rank1"


def _join(_: int, address: str, rank: int) -> Any:
    from torch.distributed import rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=address)
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank:
        signal.pause()
    return rpc


def _run(calls: RpcCalls, row: str, count: int) -> None:
    prepared = calls.prepare("tensor" if "floats" in row else "int")
    if row.startswith("rpc_async"):
        for _ in range(0, count, BATCH):
            calls.wait([calls.start(*prepared) for _ in range(BATCH)])
        return
    call = calls.method() if row == "method" else None
    for _ in range(count):
        if call is not None:
            call()
        elif row.startswith("remote"):
            calls.keep_and_fetch(*prepared)
        else:
            calls.sync(*prepared)


# -- the report ---------------------------------------------------------------------------------


def _round(number: int, columns: dict[str, Column], calls: int) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    names = list(columns)
    for turn, row in enumerate(ROWS):
        shift = (number + turn) % len(names)
        for name in names[shift:] + names[:shift]:
            results.setdefault(row, {})[name] = columns[name].measure(row, calls)
    return results


def _print(rounds: list[dict[str, dict[str, float]]], names: list[str]) -> None:
    others = names[1:]
    print(f"{'CPU time of a call, us':26}", *(f"{name:>12}" for name in names), end="")
    print("", *(f"{'/ ' + name:>14}" for name in others))
    for row in ROWS:
        medians = [statistics.median(each[row][name] for each in rounds) for name in names]
        ratios = [
            statistics.median(each[row][names[0]] / each[row][other] for each in rounds)
            for other in others
        ]
        print(f"{row:26}", *(f"{median:12.1f}" for median in medians), end="")
        print("", *(f"{ratio:14.3f}" for ratio in ratios))


if __name__ == "__main__":
    main()
