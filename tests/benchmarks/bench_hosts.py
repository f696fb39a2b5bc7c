"""Measure rayrpc between two hosts, beside TensorPipe and a plain TCP socket, in one run.

    python tests/benchmarks/bench_hosts.py [--rounds N] [--seconds S] [--only ROW,...] [--tls]

The hosts are network namespaces of this machine, so it must be run by root on Linux.  A row is the
median time of a call that sends a tensor, or a dict of them, and gets it back; the plain socket
sends and receives as many bytes into memory that is there.  All columns take turns, in another
order each round; TensorPipe's processes are stopped while others are measured.  With ``--tls``, Ray
and rayrpc encrypt what goes between the hosts, the others do not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "hosts")]

KB, MB = 1 << 10, 1 << 20
# By row: how many tensors, and the bytes of each.
ROWS = {
    "8 B": (1, 8),
    "64 KB": (1, 64 * KB),
    "256 KB": (1, 256 * KB),
    "1 MB": (1, MB),
    "4 MB": (1, 4 * MB),
    "16 MB": (1, 16 * MB),
    "64 MB": (1, 64 * MB),
    "60 x 16 KB": (60, 16 * KB),
    "200 x 1 MB": (200, MB),
}
# Time of a small call while one of 64 MB is under way.
BESIDE = "8 B beside 64 MB"
COLUMNS = ("tensorpipe", "rayrpc", "plain")
PORTS = {"tensorpipe": 29601, "rayrpc": 29602, "plain": 29603}
MIN_SAMPLES = 5
SECONDS = 120.0  # that any answer may take


def echo(value: Any) -> Any:
    """Return the argument."""
    return value


# -- one of two processes of a column --------------------------------------------------------------


def _time(call: Callable[[], Any], seconds: float) -> float:
    """Return the median time of a call, in seconds."""
    for _ in range(2):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < MIN_SAMPLES or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _play(column: str, rank: int, host: str) -> None:
    if column == "plain":
        _play_plain(rank, host)
        return
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, str(PORTS[column])
    import torch

    if column == "rayrpc":
        import rayrpc as rpc
    else:
        import torch.distributed.rpc as rpc  # type: ignore[no-redef]
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    if rank == 0:
        small = torch.zeros(2)

        def call(value: Any) -> None:
            rpc.rpc_sync("w1", echo, args=(value,))

        def measure(row: str, seconds: float) -> float:
            if row == BESIDE:
                return _beside(lambda: call(torch.zeros(16 * MB)), lambda: call(small), seconds)
            count, size = ROWS[row]
            tensors = {str(number): torch.zeros(size // 4) for number in range(count)}
            value = tensors if count > 1 else tensors["0"]
            return _time(lambda: call(value), seconds)

        _answer(measure)
    rpc.shutdown()


def _beside(large: Callable[[], None], small: Callable[[], None], seconds: float) -> float:
    """Return the median time of a small call while large ones are made."""
    ended = threading.Event()

    def call_on() -> None:
        while not ended.is_set():
            large()

    thread = threading.Thread(target=call_on)
    thread.start()
    try:
        return _time(small, seconds)
    finally:
        ended.set()
        thread.join()


def _play_plain(rank: int, host: str) -> None:
    if rank == 1:
        with socket.create_server(("0.0.0.0", PORTS["plain"])) as listener:
            connection = listener.accept()[0]
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while size := int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big"):
            data = bytearray(size)
            for _ in range(int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big")):
                connection.recv_into(data, size, socket.MSG_WAITALL)
                connection.sendall(data)
        return
    end = time.monotonic() + SECONDS
    while True:
        try:
            connection = socket.create_connection((host, PORTS["plain"]), 5.0)
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def measure(row: str, seconds: float) -> float:
        size = 8 if row == BESIDE else ROWS[row][0] * ROWS[row][1]
        data, back = bytes(size), bytearray(size)

        def call() -> None:
            connection.sendall(data)
            connection.recv_into(back, size, socket.MSG_WAITALL)

        count = 7 if size > 8 * MB else 200
        connection.sendall(size.to_bytes(8, "big") + count.to_bytes(8, "big"))
        times = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:])

    _answer(measure)
    connection.sendall(bytes(8))


def _answer(measure: Callable[[str, float], float]) -> None:
    """Measure what the lines of the standard input ask for."""
    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        print(measure(question["row"], question["seconds"]), flush=True)


# -- the one that asks -----------------------------------------------------------------------------


class Column:
    """The two processes of a column, one on each host."""

    def __init__(self, hosts: Any, name: str, environ: dict[str, str]) -> None:
        self.name = name
        self._processes = [
            subprocess.Popen(
                hosts.command(
                    number,
                    sys.executable,
                    __file__,
                    *("--column", name, "--rank", str(number - 1)),
                    *("--host", hosts.address(2 if name == "plain" else 1)),
                ),
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in (1, 2)
        ]

    def wait_ready(self) -> None:
        """Wait until it can be asked, and let it rest."""
        self._read("ready")
        self._signal(signal.SIGSTOP)

    def ask(self, row: str, seconds: float) -> float:
        """Return the time of a row."""
        self._signal(signal.SIGCONT)
        process = self._processes[0]
        assert process.stdin is not None
        process.stdin.write(json.dumps({"row": row, "seconds": seconds}) + "\n")
        process.stdin.flush()
        try:
            return float(self._read(""))
        finally:
            self._signal(signal.SIGSTOP)

    def _read(self, begin: str) -> str:
        stdout = self._processes[0].stdout
        assert stdout is not None
        timer = threading.Timer(SECONDS, self.close)
        timer.start()
        try:
            for line in stdout:
                with contextlib.suppress(ValueError):
                    if line.startswith(begin) and (begin or float(line) > 0):
                        return line
        finally:
            timer.cancel()
        raise RuntimeError(f"{self.name} has ended")

    def _signal(self, number: int) -> None:
        if self.name != "tensorpipe":  # the others do nothing unless asked
            return
        for process in self._processes:
            for pid in _children(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def close(self) -> None:
        """End both processes."""
        for process in self._processes:
            for pid in [*_children(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait(10)


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


@contextlib.contextmanager
def columns(names: list[str], tls: bool) -> Iterator[list[Column]]:
    """Make the hosts, a Ray cluster over them, and the columns."""
    from host_maker import hosts_of, why_impossible

    if reason := why_impossible():
        sys.exit(reason)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rb-"))
        hosts = stack.enter_context(hosts_of(2))
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": "/tmp/ray",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TMPDIR": folder,
            "GLOO_SOCKET_IFNAME": "eth0",
            "TP_SOCKET_IFNAME": "eth0",
        }
        if tls:
            import trustme
            from certificates import write_certificate

            addresses = ("127.0.0.1", hosts.address(1), hosts.address(2))
            environ |= write_certificate(trustme.CA(), Path(folder), *addresses)
        ray = str(Path(sys.executable).with_name("ray"))
        head = f"{hosts.address(1)}:6379"
        for number in (1, 2):
            place = ["--address", head] if number > 1 else ["--head", "--port", "6379"]
            command = [ray, "start", "--node-ip-address", hosts.address(number), *place]
            command += ["--num-cpus", "2", "--object-store-memory", str(300 * MB)]
            command += [] if number > 1 else ["--include-dashboard", "false"]
            hosts.run(number, *command, timeout=SECONDS, environ=environ)
        environ["RAY_ADDRESS"] = head
        made = []
        for name in names:
            made.append(Column(hosts, name, environ))
            stack.callback(made[-1].close)
            made[-1].wait_ready()
        yield made


def main() -> None:
    """Read the command line, and measure or be one of the processes of a measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="for each row and column")
    parser.add_argument("--only", default=",".join([*ROWS, BESIDE]), help="rows")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--tls", action="store_true", help="encrypt what rayrpc sends")
    parser.add_argument("--column", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--host", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.column:
        _play(options.column, options.rank, options.host)
        return
    rows = options.only.split(",")
    results: dict[str, dict[str, list[float]]] = {row: {} for row in rows}
    with columns(options.columns.split(","), options.tls) as made:
        for _ in range(options.rounds):
            for row in rows:
                for column in random.sample(made, len(made)):
                    seconds = column.ask(row, options.seconds)
                    results[row].setdefault(column.name, []).append(seconds)
    _print(results)


def _print(results: dict[str, dict[str, list[float]]]) -> None:
    print("milliseconds a call; speed of rayrpc as a multiple of the others'")
    for row, of in results.items():
        times = "  ".join(f"{name} {1e3 * statistics.median(of[name]):9.3f}" for name in of)
        ours = of.get("rayrpc", [])
        ratios = "  ".join(
            f"/ {name} {statistics.median(b / a for a, b in zip(ours, of[name], strict=True)):5.2f}"
            for name in of
            if name != "rayrpc" and ours
        )
        print(f"{row:>18}  {times}  {ratios}", flush=True)


if __name__ == "__main__":
    main()
