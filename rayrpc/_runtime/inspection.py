"""Ask members of a group for reports of what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.reader import release_reader
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._runtime.open_call import Send
from rayrpc._runtime.worker import Worker
from rayrpc.errors import CallError

__all__ = ["Inspection"]


class Inspection:
    """Send INSPECT frames; they need no worker slot, and are not counted as calls.

    Args:
        worker (Worker): the parts of the worker that asks.
        new_id (Callable): returns the number of a frame.
        send (Send): sends frames.
    """

    def __init__(self, worker: Worker, new_id: Callable[[], int], send: Send) -> None:
        self._worker = worker
        self._new_id = new_id
        self._send = send

    def request(
        self, what: bytes, timeout: float, members: Iterable[Member] | None = None
    ) -> list[tuple[Member, bytes | Exception]]:
        """Return the reports of members.

        Args:
            what: see ``Callee.inspect``.
            timeout: in seconds.
            members: the members that report; None: all.

        Returns:
            By member, the report, or why there is none (TimeoutError, CallError).
        """
        release_reader()
        deadline = Deadline(timeout)
        worker = self._worker
        asked = []
        for member in worker.members.all() if members is None else members:
            frame = Frame(Kind.INSPECT, worker.session, worker.info.id, self._new_id(), data=what)
            asked.append((member, self._send(member, frame)))
        answers: list[tuple[Member, bytes | Exception]] = []
        for member, pending in asked:
            try:
                reply = pending.wait(deadline.within(timeout))
            except (CallError, TimeoutError) as exc:
                answers.append((member, exc))
            else:
                is_report = reply.kind is Kind.VALUE
                answers.append((member, reply.data if is_report else CallError("could not report")))
        return answers
