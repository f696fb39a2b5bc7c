"""Find the hosts that do not answer: the directory asks them by connecting to their raylets.

The host's kernel accepts such a connection, whatever its processes do; it refuses it where the
raylet has ended, which Ray reports.  So a host is lost only if nothing at all comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable

import ray

__all__ = ["HostMonitor", "SilentHosts", "probe", "raylets"]

# How often each host is asked, and how long an answer may take.
PROBE_SECONDS = 1.0
# This process may have been stopped, or kept from running: one failure proves nothing.
MIN_FAILURES = 3


class SilentHosts:
    """Decide which hosts are lost; pure.

    Args:
        timeout: in seconds.
        clock: returns seconds.
    """

    def __init__(self, timeout: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout = timeout
        self._clock = clock
        self._answered: dict[str, float] = {}  # when, by host
        self._failures: dict[str, int] = {}  # since then

    def report(self, host: str, answered: bool) -> float:
        """Take the result of a probe.

        Args:
            host: its address.
            answered: it did.

        Returns:
            The seconds of its silence if the host is lost, else 0.
        """
        now = self._clock()
        last = self._answered.setdefault(host, now)
        if answered:
            self._answered[host] = now
            self._failures[host] = 0
            return 0.0
        self._failures[host] = self._failures.get(host, 0) + 1
        silence = now - last
        is_lost = silence >= self._timeout and self._failures[host] >= MIN_FAILURES
        return silence if is_lost else 0.0

    def keep(self, hosts: Iterable[str]) -> None:
        """Forget the other hosts."""
        kept = set(hosts)
        for known in (self._answered, self._failures):
            for host in known.keys() - kept:
                del known[host]


def raylets() -> dict[str, int]:
    """Return the ports of the raylets, by the addresses of their hosts."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    return {node["NodeManagerAddress"]: node["NodeManagerPort"] for node in nodes}


async def probe(host: str, port: int) -> bool:
    """Tell whether a host answers: it accepts a connection, or refuses it.

    Args:
        host: its address.
        port: where its raylet listens.
    """
    connecting = asyncio.open_connection(host, port)
    try:
        _, writer = await asyncio.wait_for(connecting, PROBE_SECONDS)
    except ConnectionError:
        return True
    except (OSError, asyncio.TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


class HostMonitor:
    """Ask hosts, and report those that are lost.

    Args:
        timeout: after so many seconds of silence a host is lost.
        port_of: returns the port of the raylet on a host; None if it is not known.
    """

    def __init__(self, timeout: float, port_of: Callable[[str], int | None]) -> None:
        self._silent = SilentHosts(timeout)
        self._port_of = port_of

    async def ask(self, hosts: Iterable[str]) -> dict[str, float]:
        """Ask all hosts once; return the seconds of silence of those that are lost, by host."""
        asked = {host: port for host in set(hosts) if (port := self._port_of(host)) is not None}
        self._silent.keep(asked)
        answers = await asyncio.gather(*(probe(host, port) for host, port in asked.items()))
        lost = {
            host: self._silent.report(host, answer)
            for host, answer in zip(asked, answers, strict=True)
        }
        return {host: seconds for host, seconds in lost.items() if seconds}
