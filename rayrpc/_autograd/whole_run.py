"""One run of torch's engine through a worker's part of a pass, while gradients arrive and leave.

All nodes run in one run of the engine, as they do in a local pass: each once, when all gradients
that reach it have arrived.  Gradients of sent messages come in at their gates, behind nodes that
wait:

    start ──> wait for message 9 ──┬──> gates of message 9 ──> the graph ──> leaves
                                   │                             └──> receive functions
                                   └──> wait for message 7 ──┬──> gates of message 7 ──> ...
                                                             └──> wait for message 2 ──> ...

The engine's thread blocks in a waiting node.  Two rules make that safe:

- The engine runs the ready node with the largest sequence number; waiting nodes have 0, and all
  others have more.  So it waits only when it has nothing else to run.  All nodes run in this one
  thread.  If nodes of accelerators ran in threads of their own, one of these could fail, or make
  another node ready for the waiting thread, and the waiting thread would not be notified.
- The run waits for messages in the reverse order in which they were sent.  The gradients of a sent
  message may depend on gradients that leave here, but only on those of messages that were received
  after it was sent.  These depend only on nodes that were made later still, thus on messages that
  were sent later, whose gradients the run has waited for before.  So no worker waits, directly or
  through others, for gradients that it would itself compute only after the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from rayrpc._autograd.accumulate import IsolatedLeaves
from rayrpc._autograd.edges import edge_at
from rayrpc._autograd.engine import run_engine, run_id
from rayrpc._autograd.functions import ANCHOR, running
from rayrpc._concurrency.waiting import Notifier
from rayrpc.errors import RpcError

__all__ = ["Leave", "Noted", "WholeRun"]

# Longest time between two checks of a waiting run for an abort.
CHECK_SECONDS = 1.0

Leave = Callable[[Any, Sequence[torch.Tensor | None]], None]
Noted = Callable[[int], AbstractContextManager[object]]


class WholeRun:
    """Run torch's engine once through the rest of a part; see above.

    Args:
        seeds (dict): the gradients of the roots, by edge.
        gates (Mapping): for each message to wait for, by its id: the gates of its tensors that
            take part, by their number.
        nodes (Collection): all nodes that may run, but for those of leaves.
        exits (Collection): the receive functions among them.
        leaves (Collection): the nodes of leaves.
        leave (Callable): takes a receive function and its gradients.
        noted (Callable): returns a context manager for the wait for a message, given its id.
    """

    def __init__(
        self,
        seeds: dict[GradientEdge, torch.Tensor],
        gates: Mapping[int, Mapping[int, torch.Tensor]],
        nodes: Collection[Any],
        exits: Collection[Any],
        leaves: Collection[Any],
        leave: Leave,
        noted: Noted,
    ) -> None:
        self._seeds = seeds
        self._gates = gates
        self._nodes = nodes
        self._exits = exits
        self._leaves = leaves
        self._leave = leave
        self._noted = noted
        self._changed = Notifier()
        self._arrived: dict[int, Sequence[torch.Tensor | None]] = {}
        self._is_aborted = False
        self._id: int | None = None  # of the run of the engine

    def add_gradients(self, message_id: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the gradients of a message's tensors; None for one that was not used."""
        self._arrived[message_id] = gradients
        self._changed.notify_all()

    def abort(self) -> None:
        """Fail the run at the wait that it is in, or at its next one."""
        self._is_aborted = True
        self._changed.notify_all()

    def run(self, retain: bool, is_captured: bool) -> dict[Any, torch.Tensor]:
        """Run all nodes; return the gradients of leaves, by node.

        Args:
            retain: keep the graph for another pass.
            is_captured: stop before leaves' nodes; their own hooks do not run then.

        Raises:
            RuntimeError: the run was aborted, or a node failed.
        """
        gates = [gate.grad_fn for each in self._gates.values() for gate in each.values()]
        for node in (*self._nodes, *gates):
            if node._sequence_nr() == 0:  # true of the first node that a thread has made
                node._set_sequence_nr(1)
        seeds = dict(self._seeds)
        self._seeds = {}
        start = self._make_waiting_nodes()  # in torch 2.5 only the tensor keeps its node alive
        if start is not None:
            seeds[edge_at(start.grad_fn)] = torch.empty(0)
        if not seeds:
            return {}
        with running(self, self._exits), torch.autograd.set_multithreading_enabled(False):
            if is_captured:
                targets = [edge_at(node) for node in self._leaves]
                # the engine runs what leads to a target: the receive functions lead to the anchor
                anchor = edge_at(_anchor_node)
                results = run_engine(seeds, retain, [*targets, anchor])
                found = zip(self._leaves, results, strict=False)
                return {node: gradient for node, gradient in found if gradient is not None}
            seeds[edge_at(_first_node)] = torch.zeros(())
            isolated = IsolatedLeaves(self._leaves, self._is_in_run)
            isolated.run(lambda: run_engine(seeds, retain, None))
            return isolated.gradients

    # -- for gates, receive functions, waiting nodes ----------------------------------------------

    def begun(self) -> None:
        """Note the id of the engine's run; the first node of the run calls this."""
        self._id = run_id()
        self._changed.notify_all()

    def arrived(self, message_id: int, slot: int) -> torch.Tensor | None:
        """Return the gradient of a sent tensor."""
        return self._arrived[message_id][slot]

    def leave(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        """Take the gradients of a receive function."""
        self._leave(node, gradients)

    def wait(self, message_id: int) -> None:
        """Wait until the gradients of a message have arrived.

        Raises:
            RuntimeError: the run was aborted.
        """
        if message_id in self._arrived:
            return
        with self._noted(message_id):
            while message_id not in self._arrived:
                if self._is_aborted:
                    raise RpcError("the backward pass has ended")
                self._changed.wait_until(
                    lambda: message_id in self._arrived or self._is_aborted, CHECK_SECONDS
                )

    def _is_in_run(self) -> bool:
        """Tell, in a hook, whether this run called it, and not another run of the same nodes."""
        # another run may call the hook before the first node of this run has noted the id
        self._changed.wait_until(lambda: self._id is not None, CHECK_SECONDS)
        return run_id() == self._id

    def _make_waiting_nodes(self) -> torch.Tensor | None:
        """Return an output of the node that waits first; None if there is no message."""
        following: Any = None
        function: Any = _Wait
        with torch.enable_grad():
            for message_id in sorted(self._gates):
                gates = self._gates[message_id].values()
                following = function.apply(message_id, following, *gates)
                following.grad_fn._set_sequence_nr(0)
        return following  # type: ignore[no-any-return]


class _Wait(torch.autograd.Function):
    """Wait for a message's gradients, before its gates and the next waiting node run."""

    @staticmethod
    def forward(
        ctx: Any, message_id: int, following: torch.Tensor | None, *gates: torch.Tensor
    ) -> torch.Tensor:
        ctx.message_id = message_id
        ctx.count = len(gates)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        run = running.here()
        assert isinstance(run, WholeRun)
        run.wait(ctx.message_id)
        start = torch.empty(0)
        has_following = ctx.needs_input_grad[1]
        return None, start if has_following else None, *[start] * ctx.count


_anchor_node: Any = ANCHOR.view_as(ANCHOR).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

# The engine runs the nodes of leaves first; the node of this leaf notes the id of the run.
_first = torch.zeros((), requires_grad=True)
_first_node: Any = _first.view(1).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _note_run(gradients: Any) -> tuple[None]:
    run = running.here()
    if isinstance(run, WholeRun):
        run.begun()
    return (None,)  # nothing is accumulated


_first_node.register_prehook(_note_run)
