"""One worker's share of a context of distributed autograd.

It holds the context's messages, this worker's callers and callees in the context, the passes under
way, and the gradients of this worker's leaves.
"""

from __future__ import annotations

import sys
import threading
import traceback
import weakref
from typing import Any

import torch

from rayrpc._autograd.accumulate import LeafGradients
from rayrpc._autograd.context_messages import ContextMessages
from rayrpc._autograd.passes import Passes
from rayrpc._concurrency.outcome import fresh
from rayrpc._concurrency.reader import after_reply

__all__ = ["DistAutogradContext"]


class DistAutogradContext:
    """One worker's share of a context.

    Args:
        context_id (int): the context's id.
        home (GradContexts): all contexts of the worker in the group, this one among them.
        holder (object, optional): the object whose ``__exit__`` releases the context, unless an
            interrupt comes first.

    Source: ``torch.distributed.autograd.DistAutogradContext``.
    """

    def __init__(self, context_id: int, home: Any, holder: object = None) -> None:
        self.id = context_id
        self.home = home
        self._holder = None if holder is None else weakref.ref(holder)
        self.messages = ContextMessages(context_id)
        self.passes = Passes()
        self._workers_lock = threading.Lock()  # for the next two
        self._callees: set[int] = set()
        self._callers: set[int] = set()
        self._lock = threading.Lock()  # for the gradients
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}  # by leaf
        self._pending: list[LeafGradients] = []  # to be added to ``_gradients``
        self._accumulation = threading.Lock()
        self._error: Exception | None = None  # raised by an accumulation after the reply

    @property
    def is_abandoned(self) -> bool:
        """Whether an interrupt has kept the holder from releasing the context."""
        if self._holder is None:
            return False
        holder = self._holder()
        return holder is None or _has_left(holder)

    # -- workers ------------------------------------------------------------------------------

    def add_callee(self, worker: int) -> None:
        """Note a worker that this one calls in the context, and has to notify of the release."""
        with self._workers_lock:
            self._callees.add(worker)

    def callees(self) -> set[int]:
        """Return the workers that this one called in the context."""
        with self._workers_lock:
            result = set(self._callees)
        return result

    def add_caller(self, worker: int) -> None:
        """Note a worker that called this one in the context, and will notify it of the release."""
        with self._workers_lock:
            self._callers.add(worker)

    def remove_caller(self, worker: int) -> bool:
        """Remove a caller that will not notify this worker; return False if no caller is left."""
        with self._workers_lock:
            self._callers.discard(worker)
            result = bool(self._callers)
        return result

    # -- gradients --------------------------------------------------------------------------------

    def add_gradients(self, leaves: LeafGradients) -> None:
        """Add the gradients of a pass, after the reply is sent unless DDP's hooks have to run."""
        if leaves.for_ddp:
            leaves.accumulate_into(self._gradients, self._lock)
        elif leaves.gradients:
            self._pending.append(leaves)
            after_reply(self._add_pending)

    def _add_pending(self) -> None:
        with self._accumulation:
            try:
                while self._pending:
                    self._pending.pop(0).accumulate_into(self._gradients, self._lock)
            except Exception as exc:  # such as out of memory
                self._error = exc

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients so far, by leaf.

        Raises:
            Exception: they could not be added up.
        """
        self._add_pending()
        if self._error is not None:
            raise fresh(self._error)
        with self._lock:
            result = dict(self._gradients)
        return result

    # -- torch's names ----------------------------------------------------------------------------

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Any]:
        return self.messages.sent()

    def _recv_functions(self) -> dict[int, Any]:
        return self.messages.received()

    def _known_worker_ids(self) -> set[int]:
        return self.callees()


def _has_left(holder: object) -> bool:
    """Tell whether the exception that this thread handles was raised in an ``__exit__``."""
    error = sys.exc_info()[1]
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_name == "__exit__" and frame.f_locals.get("self") is holder:
                return True
        error = error.__context__
    return False
