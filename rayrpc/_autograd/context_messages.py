"""One worker's messages in a context: send and receive functions, and tensors' dependencies."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from rayrpc._autograd.functions import Recorder, SendFunction, is_receive
from rayrpc._autograd.graph import Entry
from rayrpc._concurrency.reader import after_reply
from rayrpc.errors import RpcError

__all__ = ["ContextMessages", "TensorKey"]

# A reply carries direct and indirect dependencies of its tensors, for this many tensors at most.
MAX_DEPENDENCIES = 64

#: names a sent tensor: the sender's id, the message's id, the tensor's number in the message
TensorKey = tuple[int, int, int]


class ContextMessages:
    """Hold the send and receive functions of a context's messages; thread-safe.

    Args:
        context_id (int): the context's id.
    """

    def __init__(self, context_id: int) -> None:
        self._context_id = context_id
        self._lock = threading.Lock()
        self._sends: dict[int, SendFunction] = {}  # by the message's id
        self._receives: dict[int, Any] = {}
        # the direct dependencies of other workers' tensors, as far as they are known
        self._dependencies: dict[TensorKey, list[TensorKey]] = {}
        self._entries: dict[tuple[int, int], Entry] = {}

    # -- functions ----------------------------------------------------------------------------

    def add_sent(self, recorder: Recorder, to: int) -> bool:
        """Make the send function of an encoded message; return False if no tensor was recorded."""
        if not recorder.gates:
            return False
        function = SendFunction(recorder.gates, to)
        with self._lock:
            self._sends[recorder.message_id] = function
        return True

    def add_received(self, message_id: int, node: Any, sender: int) -> None:
        """Add the receive function of a message from a worker."""
        node.sender = sender
        with self._lock:
            self._receives[message_id] = node

    def receiver_of(self, message_id: int) -> int:
        """Return the id of the worker to which a message was sent."""
        return self._sends[message_id].to

    def sent(self) -> dict[int, Any]:
        """Return the send functions, by the message's id."""
        with self._lock:
            result = dict(self._sends)
        return result

    def received(self) -> dict[int, Any]:
        """Return the receive functions, by the message's id."""
        with self._lock:
            result = dict(self._receives)
        return result

    # -- entries ------------------------------------------------------------------------------

    def entry(self, message_id: int, slots: Iterable[int]) -> Entry:
        """Return the entry by which the gradients of sent tensors enter this worker's graph.

        Args:
            message_id: the id of the message with the tensors.
            slots: the tensors' numbers in the message.
        """
        return Entry.union([self._slot_entry(message_id, slot) for slot in slots])

    def _slot_entry(self, message_id: int, slot: int) -> Entry:
        entry = self._entries.get((message_id, slot))
        if entry is None:
            send = self._sends[message_id]
            edges, gates = {slot: send.next_functions[slot]}, {slot: send.gates[slot]}
            entry = Entry(edges, self.is_exit, gates)
            with self._lock:
                entry = self._entries.setdefault((message_id, slot), entry)
        return entry

    def is_exit(self, node: Any) -> bool:
        """Tell whether a node is a receive function of this context.

        Raises:
            RuntimeError: it is a receive function of another context.
        """
        if not is_receive(node):
            return False
        if self._receives.get(node.message_id) is not node:
            raise RpcError(
                "Autograd context no longer valid: a tensor that takes part in context "
                f"{self._context_id} came here by RPC in another context; detach() it, or receive "
                "it again in this one."
            )
        return True

    # -- dependencies -------------------------------------------------------------------------

    def add_dependencies(self, dependencies: Mapping[TensorKey, list[TensorKey]]) -> None:
        """Add the direct dependencies of tensors of other workers' messages."""
        with self._lock:
            self._dependencies.update(dependencies)

    def known_dependencies(self, tensor: TensorKey) -> list[TensorKey] | None:
        """Return the direct dependencies of another worker's tensor; None if they are not known."""
        return self._dependencies.get(tensor)

    @staticmethod
    def dependencies_of(entry: Entry) -> list[TensorKey]:
        """Return the received tensors that an entry leads to: their senders get the gradients."""
        exits: list[tuple[Any, int]] = [edge[:2] for edge in entry.targets if is_receive(edge.node)]
        return [(node.sender, node.message_id, slot) for node, slot in exits]

    def all_dependencies(self, me: int, message_id: int) -> dict[TensorKey, list[TensorKey]]:
        """Return the direct and indirect dependencies of a sent message's tensors.

        Dependencies that this worker does not know are left out, as are those beyond a limit.
        """
        todo = [(me, message_id, slot) for slot in range(len(self._sends[message_id].gates))]
        if not self._receives:  # no message that the tensors could depend on
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
                direct = self._dependencies.get(key)
            if direct is not None:
                found[key] = direct
                todo += direct
        return found

    def _prepare_entries(self, message_id: int) -> None:
        with contextlib.suppress(RpcError):  # raised again in the pass that needs the entry
            self.entry(message_id, range(len(self._sends[message_id].gates)))
