"""Wait until a worker, or its whole group, has no calls under way."""

from __future__ import annotations

import time
from typing import Any

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.reader import release_reader
from rayrpc._protocol.transport import Directory
from rayrpc._runtime.call_errors import shut_down
from rayrpc._runtime.callee import Callee
from rayrpc._runtime.caller import Caller
from rayrpc._runtime.worker import Worker
from rayrpc.errors import GroupError

__all__ = ["Quiescence"]

DRAIN_POLL_SECONDS = 0.002
# Each step gets this long at least, also if those before have used up the timeout.
MIN_SYNC_SECONDS = 0.1


class Quiescence:
    """Detect that no calls are under way, by Mattern's counting.

    Args:
        worker (Worker): the worker.
        caller (Caller): its own calls.
        callee (Callee): those that it serves.
        directory (Directory): collects the members' reports.
    """

    def __init__(
        self, worker: Worker, caller: Caller, callee: Callee, directory: Directory
    ) -> None:
        self._worker = worker
        self._caller = caller
        self._callee = callee
        self._directory = directory
        self._joins = 0

    def join(self, timeout: float | None, leaves: bool = False) -> None:
        """Wait until no member has calls under way, nor calls that those may cause.

        Each member reports, while idle, how many calls it sent, and served for others than
        guests.  When the reports of two rounds are equal, no call is on its way.

        Args:
            timeout: in seconds; None: none.
            leaves: end this worker's streams, as ``drain`` does.

        Raises:
            GroupError: a member did not report in time, or members go on calling.
        """
        release_reader()
        deadline = Deadline(timeout)
        last: dict[str, Any] | None = None
        round_number = 0
        while True:
            left = _left(deadline)
            self._wait(left, leaves, timeout)
            left = _left(deadline)
            mine = (self._caller.sent, self._callee.served)
            tag = f"join-{self._joins}-{round_number}"
            self._worker.rrefs.keep_leaks()
            reports = self._directory.sync(tag, mine, left)
            if reports == last:
                self._joins += 1
                return
            busy = [name for name in sorted(reports) if last and reports[name] != last.get(name)]
            if busy and deadline.expired:
                raise GroupError(
                    f"RPC worker {self._worker.info.name!r} has waited {timeout} s until no member "
                    f"of the group makes calls, and {', '.join(busy)} still do: end what calls in "
                    "the background before shutdown"
                )
            last = reports
            round_number += 1

    def drain(self, timeout: float | None) -> None:
        """Wait until this worker, which is to leave, makes and serves no calls; end its streams.

        Args:
            timeout: in seconds; None: none.

        Raises:
            GroupError: it still does after that.
        """
        self._wait(timeout, True, timeout)

    def _wait(self, seconds: float | None, leaves: bool, timeout: float | None) -> None:
        """Wait until this worker has no calls under way.

        Args:
            seconds: None: without limit.
            leaves: see ``join``.
            timeout: of the whole wait, for the error.
        """
        release_reader()
        for stream in list(self._caller.streams) if leaves else ():
            stream.end(shut_down())  # its iterator may never end
        deadline = Deadline(seconds)
        find = self._worker.members.find
        while self._caller.active or self._callee.active_for(find):
            if deadline.expired:
                served = self._callee.active_for(find)
                raise GroupError(
                    f"RPC worker {self._worker.info.name!r} still has calls under way after "
                    f"{timeout} s: {self._caller.active} of its own, {served} of others; "
                    "`rayrpc stack` shows where they are"
                )
            time.sleep(DRAIN_POLL_SECONDS)


def _left(deadline: Deadline) -> float | None:
    """Return the seconds that are left, but ``MIN_SYNC_SECONDS`` at least; None: no limit."""
    left = deadline.remaining()
    return None if left is None else max(MIN_SYNC_SECONDS, left)
