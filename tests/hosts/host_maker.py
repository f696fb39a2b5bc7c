"""Hosts on this machine: network namespaces with a cable each, which can be cut.

Each host has an address, processes, a host name, a /tmp/ray and a /dev/shm of its own; other files
are shared, as by NFS.  The cables end in a bridge, in a namespace that belongs to no host.  The
maker needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

__all__ = ["Hosts", "hosts_of", "why_impossible"]

SECONDS = 20.0  # that a command of the maker may take
INIT = (
    "trap '' CHLD; hostname host{number} && mount -t proc proc /proc && "
    "mount -t tmpfs none /tmp/ray && mount -t tmpfs -o size=2g none /dev/shm && "
    "exec sleep infinity"
)
_numbers = itertools.count(1)


def why_impossible() -> str:
    """Return why no hosts can be made here; empty if they can."""
    if os.getuid() != 0:
        return "hosts are made by root alone"
    missing = [name for name in ("ip", "nsenter", "unshare", "setpriv") if not shutil.which(name)]
    if missing:
        return f"hosts need {', '.join(missing)}"
    name = f"rayrpc-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
        return "no network namespace can be made here"
    _ip("netns", "del", name)
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=SECONDS, capture_output=True)


class Hosts:
    """Hosts 1 to ``count``, at 10.88.0.1 and on.

    Args:
        count: of hosts.
    """

    def __init__(self, count: int) -> None:
        self._prefix = f"rayrpc-{os.getpid()}-{next(_numbers)}-"
        self._namespaces: list[str] = []
        self._holders: list[subprocess.Popen[bytes]] = []  # of the hosts' first processes
        self._inits: list[int] = []
        try:
            self._make(count)
        except BaseException:
            self.close()
            raise

    def _make(self, count: int) -> None:
        switch = self._add_namespace("switch")
        _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge", "up")
        os.makedirs("/tmp/ray", exist_ok=True)  # hosts mount their own there
        for number in range(1, count + 1):
            name = self._add_namespace(str(number))
            cable = f"cable{number}"
            end = ["peer", "name", "eth0", "netns", name]
            _ip("-n", switch, "link", "add", cable, "type", "veth", *end)
            _ip("-n", switch, "link", "set", cable, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            for link in ("eth0", "lo"):
                _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "route", "add", "default", "dev", "eth0")  # it leads nowhere
            self._start_init(number, name)

    def _add_namespace(self, suffix: str) -> str:
        name = self._prefix + suffix
        _ip("netns", "add", name)
        self._namespaces.append(name)
        return name

    def _start_init(self, number: int, name: str) -> None:
        """Start the host's process 1: all of its processes end with it."""
        unshare = ["unshare", "--pid", "--mount", "--uts", "--fork", "--propagation", "private"]
        holder = subprocess.Popen(
            ["ip", "netns", "exec", name, *unshare, "sh", "-c", INIT.format(number=number)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._holders.append(holder)
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(OSError, ValueError):
                with open(f"/proc/{holder.pid}/task/{holder.pid}/children") as file:
                    init = int(file.read())
                with open(f"/proc/{init}/comm") as file:
                    if file.read() == "sleep\n":
                        self._inits.append(init)
                        return
            time.sleep(0.01)
        raise RuntimeError(f"host {number} did not start")

    def address(self, number: int) -> str:
        """Return a host's address."""
        return f"10.88.0.{number}"

    def command(self, number: int, *command: str) -> list[str]:
        """Return a command that runs on a host; it ends when the process that starts it ends."""
        target = str(self._inits[number - 1])
        enter = ["nsenter", f"--wd={os.getcwd()}", "--target", target]
        return [*enter, "--pid", "--net", "--mount", "--uts", "--", *_DIE, *command]

    def run(
        self,
        number: int,
        *command: str,
        timeout: float = 60.0,
        environ: dict[str, str] | None = None,
    ) -> str:
        """Run a command on a host; return its output.

        Args:
            number: of the host.
            command: with its arguments.
            timeout: in seconds.
            environ: its environment; None: this process's.

        Raises:
            RuntimeError: it fails.
        """
        done = subprocess.run(
            self.command(number, *command),
            env=environ,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def cut(self, number: int) -> None:
        """Cut a host's cable: nothing arrives, and nothing is refused."""
        _ip("-n", self._namespaces[0], "link", "set", f"cable{number}", "down")

    def heal(self, number: int) -> None:
        """Undo ``cut``."""
        _ip("-n", self._namespaces[0], "link", "set", f"cable{number}", "up")

    def crash(self, number: int) -> None:
        """Kill all processes of a host, and cut its cable."""
        self.cut(number)
        for pid in self._pids(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self, number: int, program: str) -> list[int]:
        """Kill the processes of a host that run a program, and wait for their end.

        Args:
            number: of the host.
            program: the end of its path, as ``raylet``.

        Returns:
            Their ids.
        """
        killed = []
        for pid, command in self._commands(number):
            if command.split("\0")[0].endswith(program):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        end = time.monotonic() + SECONDS
        while any(map(_runs, killed)) and time.monotonic() < end:
            time.sleep(0.01)
        return killed

    def commands(self, number: int, begin: str) -> list[str]:
        """Return the commands that begin so, of the processes of a host."""
        return [each for _, each in self._commands(number) if each.startswith(begin)]

    def _commands(self, number: int) -> Iterator[tuple[int, str]]:
        for pid in self._pids(number):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
                yield pid, file.read().decode(errors="replace")

    def _pids(self, number: int) -> list[int]:
        """Return the processes of a host, without its first one and that one's holder."""
        command = ["ip", "netns", "pids", self._namespaces[number]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        kept = {self._inits[number - 1], self._holders[number - 1].pid}
        return [int(pid) for pid in done.stdout.split() if int(pid) not in kept]

    def close(self) -> None:
        """End all processes of the hosts, and remove them."""
        for init in self._inits:
            with contextlib.suppress(ProcessLookupError):
                os.kill(init, signal.SIGKILL)
        for holder in self._holders:
            holder.kill()
            holder.wait(SECONDS)
        for name in reversed(self._namespaces):
            with contextlib.suppress(subprocess.SubprocessError):
                _ip("netns", "del", name)


def _runs(pid: int) -> bool:
    """Tell whether a process has not ended; one that its parent has not waited for has."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


_DIE = ["setpriv", "--pdeathsig", "KILL"]


@contextlib.contextmanager
def hosts_of(count: int) -> Iterator[Hosts]:
    """Make hosts; they go with the block."""
    hosts = Hosts(count)
    try:
        yield hosts
    finally:
        hosts.close()
