"""The process of ``rayrpc up``: keeps the local cluster, and processes that have loaded torch.

Run as ``python -m rayrpc.launch.standby_pool DESCRIPTOR``, with the settings as JSON on stdin, it
holds a lease of the local cluster, owns the actors that stand by (``standby``), and tells its
parent by a pipe how its start goes.  Its lock file says that it runs:

    STARTING ──its actors stand by──> UP ──idle_timeout, or SIGTERM──> ENDING ──> ended

In ENDING it has ended the actors that are free, and waits for those that programs have taken.  It
never loads torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import ray

from rayrpc import config
from rayrpc._transports.ray.cluster import connect, local_file
from rayrpc.errors import RpcError
from rayrpc.launch.hosted import CONCURRENCY_GROUPS
from rayrpc.launch.standby import Loaded, StandbyWorker, folder_of_free

__all__ = ["Actors", "FAILED", "READY", "StandbyPool", "lock_file", "main", "process_of"]

#: lines of the pipe: it is up, or why not
READY, FAILED = "ready", "failed "
STEP_SECONDS = 0.5
RETIRE_SECONDS = 10.0
MAX_FAILURES = 3  # of actors that end before they have loaded torch, one after the other

LOADING, FREE, TAKEN = "loading", "free", "taken"
ENDED = "ended"


class Actors(Protocol):
    """Starts actors, and tells what becomes of them."""

    def start(self) -> str:
        """Start one; return its name."""

    def changes(self, seconds: float) -> list[tuple[str, str]]:
        """Wait for changes; return names, each with FREE, TAKEN or ENDED."""

    def end(self, name: str, state: str) -> bool:
        """End one that is LOADING or FREE; return False if a program has just taken it."""


class StandbyPool:
    """Keep some actors standing by.

    Args:
        actors (Actors): starts them.
        count (int): how many, those that were taken included.
        at_once (int): how many may be loading.
        idle_timeout (float): seconds without use until the end; 0: none.
        clock (Callable): ``time.monotonic``.
    """

    def __init__(
        self,
        actors: Actors,
        count: int,
        at_once: int,
        idle_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._actors = actors
        self._count = count
        self._at_once = at_once
        self._idle_timeout = idle_timeout
        self._clock = clock
        self._states: dict[str, str] = {}
        self._used_at = clock()
        self._failures = 0
        self._ends = False

    def count(self, state: str) -> int:
        """Return how many actors are in a state."""
        return sum(1 for each in self._states.values() if each == state)

    @property
    def is_up(self) -> bool:
        """Tell whether all stand by, or are taken."""
        return len(self._states) - self.count(LOADING) >= self._count

    def end(self) -> None:
        """Start no more, and end those that are free."""
        self._ends = True

    def step(self) -> bool:
        """Start what is missing, and wait a moment for changes; return False when it is over.

        Raises:
            RpcError: actors cannot be started.
        """
        is_idle = self._clock() - self._used_at > self._idle_timeout > 0
        if self._ends or (is_idle and not self.count(TAKEN)):
            self._ends = True
            for name, state in list(self._states.items()):
                if state != TAKEN and self._actors.end(name, state):
                    del self._states[name]
            if not self._states:
                return False
        else:
            while len(self._states) < self._count and self.count(LOADING) < self._at_once:
                self._states[self._actors.start()] = LOADING
        for name, state in self._actors.changes(STEP_SECONDS):
            self._change(name, state)
        return True

    def _change(self, name: str, state: str) -> None:
        if state != ENDED:
            if name in self._states:
                self._states[name] = state
            self._failures = 0
        elif self._states.pop(name, None) == LOADING:
            self._failures += 1
            if self._failures >= MAX_FAILURES:
                raise RpcError("processes that load torch end at once; see Ray's log files")
        if state != FREE:
            self._used_at = self._clock()


class RayActors:
    """Actors of ``StandbyWorker``.

    Args:
        settings: where they are found.
    """

    def __init__(self, settings: config.Settings) -> None:
        remote: Any = ray.remote
        self._namespace = settings.namespace
        self._folder = folder_of_free(settings)
        self._folder.mkdir(exist_ok=True)
        for path in self._folder.glob("*"):  # of a process that was killed
            path.unlink()
        self._class = remote(concurrency_groups=CONCURRENCY_GROUPS)(StandbyWorker)
        self._handles: dict[str, Any] = {}
        self._refs: dict[Any, tuple[str, str]] = {}

    def start(self) -> str:
        name = f"standby-{uuid.uuid4().hex[:12]}"
        file = self._folder / name
        file.touch()
        options = self._class.options(name=name, namespace=self._namespace, num_cpus=0)
        actor = self._handles[name] = options.remote(Loaded.now(os.environ), str(file))
        self._refs[actor.pid.remote()] = name, FREE
        self._refs[actor.wait_taken.remote()] = name, TAKEN
        self._refs[actor.stay.remote()] = name, ENDED
        return name

    def changes(self, seconds: float) -> list[tuple[str, str]]:
        if not self._refs:
            time.sleep(seconds)
            return []
        refs = list(self._refs)
        done, _ = ray.wait(refs, timeout=seconds)
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=0) if done else ([], [])
        found = []
        for ref in done:
            name, state = self._refs.pop(ref)
            try:
                ray.get(ref)
            except ray.exceptions.RayError:
                if state != ENDED:  # that comes as well
                    continue
                self._forget(name)
            found.append((name, state))
        return found

    def end(self, name: str, state: str) -> bool:
        actor = self._handles[name]
        with contextlib.suppress(ray.exceptions.RayError):  # it does not answer, or has ended
            if state == FREE and not ray.get(actor.retire.remote(), timeout=RETIRE_SECONDS):
                return False
        self._forget(name)
        ray.kill(actor)
        return True

    def _forget(self, name: str) -> None:
        self._handles.pop(name, None)
        (self._folder / name).unlink(missing_ok=True)


def lock_file(settings: config.Settings) -> Path:
    """Return the file that this process locks; its text is the process's id."""
    return local_file(settings, ".up")


def process_of(path: Path) -> int | None:
    """Return the id of the process that has locked a file; None: there is none."""
    with contextlib.suppress(FileNotFoundError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(file.read() or 0) or None
    return None


def main(arguments: list[str]) -> None:
    """Keep the local cluster up.

    Args:
        arguments: the descriptor of the pipe.
    """
    (descriptor,) = arguments
    settings = config.Settings.from_dict(json.load(sys.stdin))
    with open(int(descriptor), "w") as pipe, lock_file(settings).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            print(os.getpid(), file=file, flush=True)
            connect(settings)
            at_once = os.cpu_count() or 1
            pool = StandbyPool(
                RayActors(settings), settings.standby_workers, at_once, settings.idle_timeout
            )
            signal.signal(signal.SIGTERM, lambda *_: pool.end())
            while not pool.is_up and pool.step():
                print(pool.count(FREE), file=pipe, flush=True)
        except BlockingIOError:
            print(f"{FAILED}it is just being started", file=pipe)
            return
        except Exception as exc:
            print(f"{FAILED}{' '.join(str(exc).split())}", file=pipe)
            raise
        print(READY, file=pipe)
        pipe.close()
        while pool.step():
            pass
    ray.shutdown()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    main(sys.argv[1:])
