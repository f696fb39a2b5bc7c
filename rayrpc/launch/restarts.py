"""Workers that are started again when they die."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._protocol.membership import Change
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.invocation import prompt

__all__ = ["Restarts", "begin_to_serve"]

logger = logging.getLogger(__name__)

# How long the end of a group waits for workers that are just being started.
STOP_SECONDS = 15.0


@prompt
def begin_to_serve(on_start: Callable[[], object]) -> None:
    """Run a user's function on a worker that has just joined; then let it serve its calls.

    It needs no slot, as all are held.
    """
    on_start()
    current.get_agent().slots.release()


class Restarts:
    """Start workers again that die.

    Each worker is in one of these states, and has a number of starts left:

        RUNS ── it died ──> STARTS ── it serves ──────────────────────> RUNS
                             │  ^
                             │  └── that failed, or it died meanwhile
                             └── no start is left ──> DEAD

    Args:
        agent (Agent): of this process, in the workers' group.
        workers (Iterable[str]): their names; they run, or have just died.
        limit (int): how often each is started again; -1: always.
        start (Callable): starts a worker again, given its name and how many starts are left;
            returns when it serves.
    """

    def __init__(
        self, agent: Agent, workers: Iterable[str], limit: int, start: Callable[[str, int], None]
    ) -> None:
        self._agent = agent
        self._left = dict.fromkeys(workers, limit)
        self._start = start
        self._lock = threading.Lock()
        self._stopped = False
        self._starting: dict[str, threading.Thread] = {}  # by worker
        self._unobserve = agent.observers.add(self._on_death, "died")
        for worker in self._left:
            self._start_if_dead(worker)

    def _on_death(self, change: Change) -> None:
        if change.member.name in self._left:
            self._start_if_dead(change.member.name)

    def _cause_of_death(self, worker: str) -> str:
        """Return why a worker is dead; empty if it lives."""
        error = self._agent.members.death_of(self._agent.lookup(worker))
        return "" if error is None else error.cause

    def _start_if_dead(self, worker: str) -> None:
        """Start a worker again that has died, in a thread, unless that is under way."""
        with self._lock:
            if self._stopped or worker in self._starting:
                return
            cause = self._cause_of_death(worker)
            if not cause:
                return
            thread = threading.Thread(
                target=self._restart, args=(worker, cause), name="rayrpc-restart", daemon=True
            )
            thread.start()
            self._starting[worker] = thread

    def _restart(self, worker: str, cause: str) -> None:
        while self._left[worker] and not self._stopped:
            self._left[worker] -= self._left[worker] > 0
            logger.warning("RPC worker %r is started again: %s", worker, cause)
            try:
                self._start(worker, self._left[worker])
            except BaseException as exc:
                cause = f"its start failed: {type(exc).__name__}: {exc}"
                continue
            with self._lock:
                cause = self._cause_of_death(worker)
                if not cause:
                    del self._starting[worker]
                    return
        if not self._stopped:
            logger.error("RPC worker %r is not started any more: %s", worker, cause)

    def starting(self) -> list[str]:
        """Return the names of the workers that are being started again."""
        with self._lock:
            return [name for name, thread in self._starting.items() if thread.is_alive()]

    def stop(self) -> None:
        """Start no worker any more; wait, but not for long, for those that are being started."""
        self._unobserve()
        with self._lock:
            self._stopped = True
            threads = list(self._starting.values())
        deadline = Deadline(STOP_SECONDS)
        for thread in threads:
            thread.join(deadline.within(STOP_SECONDS))
