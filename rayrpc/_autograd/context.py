"""What one worker has of a context of distributed autograd."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from rayrpc._autograd.accumulate import Leaves
from rayrpc._autograd.functions import Recorder, SendFunction, is_receive
from rayrpc._autograd.graph import Entry
from rayrpc._concurrency.reader import after_reply
from rayrpc.errors import RpcError

__all__ = ["DistAutogradContext", "Sent"]

# A reply tells what it leads to, and these in turn, for so many messages at most.
MOST_LEADS = 64

#: a message: id of its sender, and its own
Sent = tuple[int, int]


class DistAutogradContext:
    """What one worker has of a context.

    Args:
        context_id (int): names it.

    Source: ``torch.distributed.autograd.DistAutogradContext``.
    """

    def __init__(self, context_id: int) -> None:
        self.id = context_id
        self.lock = threading.Lock()
        #: of messages that were sent and received, by the message's id
        self.sends: dict[int, SendFunction] = {}
        self.receives: dict[int, Any] = {}
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}  # by leaf
        self._taken: list[Leaves] = []  # that will be added to these
        self._adding = threading.Lock()
        self._error: Exception | None = None
        #: workers that were called in it, and that called
        self.known: set[int] = set()
        self.callers: set[int] = set()
        #: backward passes under way, by their id
        self.passes: dict[int, Any] = {}
        self._early: dict[int, dict[int, Any]] = {}  # gradients for passes that did not begin yet
        #: why passes were called off, which may be before they begin here
        self.called_off: dict[int, RpcError] = {}
        self._entries: dict[int, Entry] = {}
        #: the messages that others' messages lead to, at their senders, as far as is known
        self.leads: dict[Sent, list[Sent]] = {}

    def note_sent(self, recorder: Recorder, to: int) -> bool:
        """Note that a message is encoded; tell whether it takes tensors along that are joined."""
        if recorder.edges:
            self.sends[recorder.message_id] = SendFunction(recorder.edges, to)
        return bool(recorder.edges)

    @staticmethod
    def leads_of(entry: Entry) -> list[Sent]:
        """Return the messages that gradients go back along from an entry."""
        return [(node.sender, node.message_id) for node in entry.exits]

    def all_leads(self, me: int, message_id: int) -> dict[Sent, list[Sent]]:
        """Return what a message of this worker leads to, and these in turn, as far as is known."""
        if not self.receives:  # there is nothing yet that it could lead to
            after_reply(lambda: self._prepare(message_id))
            return {(me, message_id): []}
        found: dict[Sent, list[Sent]] = {}
        todo = [(me, message_id)]
        while todo and len(found) < MOST_LEADS:
            sent = todo.pop()
            if sent in found:
                continue
            worker, number = sent
            if worker == me:
                leads: list[Sent] | None = self.leads_of(self.entry(number))
            else:
                leads = self.leads.get(sent)
            if leads is not None:
                found[sent] = leads
                todo += leads
        return found

    def take(self, leaves: Leaves) -> None:
        """Take the gradients of a pass; unless anybody sees it, add them up after the answer."""
        if leaves.by_node:
            leaves.settle(self._gradients, self.lock)
        elif leaves.gradients:
            self._taken.append(leaves)
            after_reply(self._add_up)

    def _add_up(self) -> None:
        with self._adding:
            try:
                while self._taken:
                    self._taken.pop(0).settle(self._gradients, self.lock)
            except Exception as exc:  # as when there is no memory
                self._error = exc

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """Return the gradients so far, by leaf.

        Raises:
            Exception: they could not be added up.
        """
        self._add_up()
        if self._error is not None:
            raise self._error
        with self.lock:
            return dict(self._gradients)

    def begin(self, pass_id: int, run: Any) -> dict[int, Any]:
        """Note that a pass begins here; return the gradients that came before."""
        with self.lock:
            self.passes[pass_id] = run
            return self._early.pop(pass_id, {})

    def arrive(self, pass_id: int, gradients: dict[int, Any]) -> Any:
        """Return the pass that gradients are for; None: they are kept until it begins."""
        with self.lock:
            run = self.passes.get(pass_id)
            if run is None:
                self._early.setdefault(pass_id, {}).update(gradients)
            return run

    def entry(self, message_id: int) -> Entry:
        """Return where the gradients of a message that was sent come in."""
        entry = self._entries.get(message_id)
        if entry is None:
            node = self.sends[message_id]
            entry = self._entries[message_id] = Entry(node.next_functions, self.is_exit)
        return entry

    def _prepare(self, message_id: int) -> None:
        with contextlib.suppress(RpcError):  # whoever asks is told
            self.entry(message_id)

    def is_exit(self, node: Any) -> bool:
        """Tell whether a node is a receive function of this context.

        Raises:
            RuntimeError: it is one of another context.
        """
        if not is_receive(node):
            return False
        if self.receives.get(node.message_id) is not node:
            raise RpcError(
                f"Autograd context no longer valid: a tensor that takes part in context {self.id} "
                "came here by RPC in another context; detach() it, or receive it again in this one."
            )
        return True

    # torch's names

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Any]:
        return dict(self.sends)

    def _recv_functions(self) -> dict[int, Any]:
        return dict(self.receives)

    def _known_worker_ids(self) -> set[int]:
        return set(self.known)
