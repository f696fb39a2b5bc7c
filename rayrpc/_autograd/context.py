"""One worker's share of a context of distributed autograd.

It holds the send and receive functions of the context's messages, the gradients that passes left
for leaves of this worker, and the passes under way.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from rayrpc._autograd.accumulate import LeafGradients
from rayrpc._autograd.functions import Recorder, SendFunction, is_receive
from rayrpc._autograd.graph import Entry
from rayrpc._concurrency.outcome import fresh
from rayrpc._concurrency.reader import after_reply
from rayrpc.errors import RpcError, WorkerDiedError

__all__ = ["DistAutogradContext", "Gradients", "PassPart", "TensorKey"]

# A reply carries direct and indirect dependencies of its tensors, for this many tensors at most.
MAX_DEPENDENCIES = 64

#: names a tensor that was sent: the id of the sender, of the message, and the tensor's number there
TensorKey = tuple[int, int, int]

#: gradients of the tensors of messages, None for a tensor that was not used, by message
Gradients = dict[int, Sequence[torch.Tensor | None]]


class PassPart(Protocol):
    """This worker's part of a backward pass, as far as its context needs it."""

    def process_request(self, gradients: Gradients, source: int) -> Any:
        """Add gradients that a worker sent; return the reply or a Future of it."""

    def fail(self, error: BaseException) -> bool:
        """End the part with an error, unless it has ended."""

    def on_peer_lost(self, worker: int, error: WorkerDiedError) -> None:
        """Handle the death of a worker."""


class DistAutogradContext:
    """One worker's share of a context.

    Args:
        context_id (int): the context's id.
        home (GradContexts): the contexts of the worker, this one among them.
        holder (object, optional): its ``__exit__`` releases it, unless an interrupt comes first.

    Source: ``torch.distributed.autograd.DistAutogradContext``.
    """

    def __init__(self, context_id: int, home: Any, holder: object = None) -> None:
        self.id = context_id
        self.home = home
        self._holder = None if holder is None else weakref.ref(holder)
        #: of messages that were sent and received, by the message's id
        self.sends: dict[int, SendFunction] = {}
        self.receives: dict[int, Any] = {}
        #: workers that were called in it from here
        self.known_workers: set[int] = set()
        #: workers that called this one in it
        self.callers: set[int] = set()
        #: parts of backward passes under way, by the pass's id
        self.passes: dict[int, PassPart] = {}
        #: why passes were aborted, by their id; an abort may arrive before the start of a part
        self.aborted: dict[int, RpcError] = {}
        #: the tensors that tensors of other workers' messages depend on, as far as is known
        self.dependencies: dict[TensorKey, list[TensorKey]] = {}
        self._lock = threading.Lock()
        self._entries: dict[tuple[int, int], Entry] = {}
        self._early: dict[int, Gradients] = {}  # for passes that have yet to start here
        self._gradients: dict[torch.Tensor, torch.Tensor] = {}  # by leaf
        self._pending: list[LeafGradients] = []  # to be added to these
        self._accumulation = threading.Lock()
        self._error: Exception | None = None  # of an accumulation after the reply

    @property
    def is_abandoned(self) -> bool:
        """Whether an interrupt has kept its holder from releasing it."""
        if self._holder is None:
            return False
        holder = self._holder()
        return holder is None or _has_left(holder)

    # -- messages ---------------------------------------------------------------------------------

    def add_send_function(self, recorder: Recorder, to: int) -> bool:
        """Make the send function of an encoded message; return False if it has no tensors."""
        if recorder.gates:
            self.sends[recorder.message_id] = SendFunction(recorder.gates, to)
        return bool(recorder.gates)

    def entry(self, message_id: int, slots: Iterable[int]) -> Entry:
        """Return the entry of the gradients of sent tensors into this worker's graph.

        Args:
            message_id: of their message.
            slots: their numbers in it.
        """
        return Entry.union([self._slot_entry(message_id, slot) for slot in slots])

    def _slot_entry(self, message_id: int, slot: int) -> Entry:
        entry = self._entries.get((message_id, slot))
        if entry is None:
            send = self.sends[message_id]
            edges, gates = {slot: send.next_functions[slot]}, {slot: send.gates[slot]}
            entry = self._entries[message_id, slot] = Entry(edges, self.is_exit, gates)
        return entry

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

    @staticmethod
    def dependencies_of(entry: Entry) -> list[TensorKey]:
        """Return the tensors to whose senders gradients from an entry leave."""
        exits: list[tuple[Any, int]] = [edge[:2] for edge in entry.targets if is_receive(edge.node)]
        return [(node.sender, node.message_id, slot) for node, slot in exits]

    def all_dependencies(self, me: int, message_id: int) -> dict[TensorKey, list[TensorKey]]:
        """Return the dependencies of the tensors of a message of this worker, and theirs in turn.

        They are as complete as is known here.
        """
        todo = [(me, message_id, slot) for slot in range(len(self.sends[message_id].gates))]
        if not self.receives:  # the message can depend on none
            after_reply(lambda: self._prepare_entries(message_id))
            return {key: [] for key in todo[:MAX_DEPENDENCIES]}
        found: dict[TensorKey, list[TensorKey]] = {}
        while todo and len(found) < MAX_DEPENDENCIES:
            key = todo.pop()
            if key in found:
                continue
            worker, number, slot = key
            if worker == me:
                direct: list[TensorKey] | None = self.dependencies_of(
                    self._slot_entry(number, slot)
                )
            else:
                direct = self.dependencies.get(key)
            if direct is not None:
                found[key] = direct
                todo += direct
        return found

    def _prepare_entries(self, message_id: int) -> None:
        with contextlib.suppress(RpcError):  # raised again in the pass that needs the entry
            self.entry(message_id, range(len(self.sends[message_id].gates)))

    # -- gradients --------------------------------------------------------------------------------

    def add_gradients(self, leaves: LeafGradients) -> None:
        """Add the gradients of a pass; after the reply, unless DDP's hooks have to run."""
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

    # -- passes -----------------------------------------------------------------------------------

    def add_pass(self, pass_id: int, part: PassPart) -> Gradients:
        """Register this worker's part of a pass; return the gradients that came before it."""
        with self._lock:
            self.passes[pass_id] = part
            result = self._early.pop(pass_id, {})
        return result

    def find_pass(self, pass_id: int, gradients: Gradients) -> PassPart | None:
        """Return the part that gradients are for; if there is none, keep them for its start."""
        with self._lock:
            part = self.passes.get(pass_id)
            if part is None:
                self._early.setdefault(pass_id, {}).update(gradients)
            return part

    # -- torch's names ----------------------------------------------------------------------------

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Any]:
        return dict(self.sends)

    def _recv_functions(self) -> dict[int, Any]:
        return dict(self.receives)

    def _known_worker_ids(self) -> set[int]:
        return set(self.known_workers)


def _has_left(holder: object) -> bool:
    """Tell whether the exception that this thread handles was raised in an ``__exit__``."""
    error = sys.exc_info()[1]
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_name == "__exit__" and frame.f_locals.get("self") is holder:
                return True
        error = error.__context__
    return False
