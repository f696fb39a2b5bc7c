"""The callee's record of a call under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._runtime.hooks import Hook
from rayrpc._runtime.rrefs.cell import Cell

__all__ = ["ServedCall"]


@dataclass(slots=True, eq=False)
class ServedCall:
    """A call from its arrival to its reply.

    Args:
        src: id of the caller.
        id: id of the call, which its caller has chosen.
        rref_id: identity of the RRef, of a FETCH or a REMOTE.
        hooks: of the worker that serves it.
        cell: keeps the value of a REMOTE.
        func: what it runs; None: not known yet, or nothing.
        thread: ident of the thread that runs the function; 0: none does.
        since: ``time.monotonic()`` at its arrival.
        is_cancelled: its caller has cancelled it; what it runs is to end.
        stop: cancels its coroutine; None: it runs none.
    """

    src: int
    id: int
    rref_id: GloballyUniqueId | None = None
    hooks: Sequence[Hook] = ()
    cell: Cell | None = None
    func: object = None
    thread: int = 0
    since: float = field(default_factory=time.monotonic)
    is_cancelled: bool = False
    stop: Callable[[], object] | None = None
