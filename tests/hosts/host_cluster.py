"""A Ray cluster over hosts."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from conftest import ROOT, python_path
from host_maker import Hosts, hosts_of

__all__ = ["cluster_of_hosts", "on_two_hosts"]

# A setting: the ranks of a program of two are on hosts of these addresses.
ON_TWO_HOSTS = "workers={rank0: {resources: {node:%s: 0.01}}, rank1: {resources: {node:%s: 0.01}}}"

RAY = str(Path(sys.executable).with_name("ray"))


@contextlib.contextmanager
def cluster_of_hosts(peer_timeout: float, count: int = 3) -> Iterator[tuple[Hosts, dict[str, str]]]:
    """Start hosts and a cluster over them, and end both.

    Args:
        peer_timeout: the setting, in seconds.
        count: of hosts.

    Yields:
        The hosts, and what programs find in their environment.
    """
    folder = tempfile.TemporaryDirectory(prefix="rr-", ignore_cleanup_errors=True)
    with folder as scratch, hosts_of(count) as hosts:
        environ = {
            **os.environ,
            "PYTHONPATH": python_path(ROOT, ROOT / "tests"),
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": "/tmp/ray",
            "RAYRPC_PEER_TIMEOUT": str(peer_timeout),
            "MASTER_ADDR": hosts.address(1),
            "TMPDIR": scratch,
        }
        environ = {k: v for k, v in environ.items() if not k.startswith("COVERAGE")}
        for number in range(1, count + 1):
            address = hosts.address(number)
            place = ["--head", "--port", "6379", "--include-dashboard", "false"]
            if number > 1:
                place = ["--address", f"{hosts.address(1)}:6379"]
            size = ["--num-cpus", "4", "--object-store-memory", str(100 << 20)]
            command = [RAY, "start", "--node-ip-address", address, *size, *place]
            hosts.run(number, *command, timeout=150, environ=environ)
        yield hosts, {**environ, "RAY_ADDRESS": f"{hosts.address(1)}:6379"}


def on_two_hosts(hosts: Hosts) -> list[str]:
    """Return what has ``rayrpc run`` place a program's two ranks on the first two hosts."""
    return ["--set", ON_TWO_HOSTS % (hosts.address(1), hosts.address(2))]
