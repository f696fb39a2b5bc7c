"""The part of the worker that leads a backward pass; see ``participant.py`` for the pass.

The leader's state for each other worker's part:

    UNSTARTED ──begin_part──> PENDING ──reply──> NEEDS_GRADIENTS ──gradients──> PENDING
                              PENDING ──reply──> ENDED

The leading thread, which called ``backward``, sends its calls in batches.  It waits itself for the
reply to the last call of a batch, so that no other thread has to wake it.  Its states:

    QUEUEING ──batch is sent──> DIRECT ──its last reply──> QUEUEING
    QUEUEING ──no call is queued, or the pass has ended──> DIRECT
    QUEUEING ──callback of another reply──> DIRECT ──callback returns──> QUEUEING

In QUEUEING its calls are queued for the next batch, in DIRECT they are sent at once.  The calls of
other threads are always sent at once.  While the leading thread waits, it may be the reader of a
connection, and run the callback of another reply: it is in DIRECT then, as a queued call would not
be sent before the wait ends.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rayrpc._autograd.context import DistAutogradContext
from rayrpc._autograd.current_context import call_without_context, start_without_context
from rayrpc._autograd.explore import explore
from rayrpc._autograd.graph import ROOTS, Entry
from rayrpc._autograd.hook import contexts_of
from rayrpc._autograd.part_calls import ENDED, NEEDS_GRADIENTS, PENDING, Reply, abort_part
from rayrpc._autograd.participant import BACKWARD, DONE, FAILED, Participant, begin_part, names_of
from rayrpc._autograd.passes import Gradients
from rayrpc._concurrency.reader import release_reader
from rayrpc._runtime.agent import Agent
from rayrpc.errors import RpcError, WorkerDiedError

__all__ = ["Leader", "run_backward"]

UNSTARTED = -1  # beside the statuses of a reply
QUEUEING, DIRECT = range(2)


class Leader(Participant):
    """The part of the worker that leads a pass, and waits for the others.

    Make it in the thread that waits.

    Args:
        others (dict): the numbers of the tensors that take part, by the id of the other worker
            that sent them, and then of the message.
        context, pass_id, entries, retain: as for ``Participant``.
    """

    def __init__(
        self,
        context: DistAutogradContext,
        pass_id: int,
        entries: dict[int, Entry],
        retain: bool,
        others: dict[int, dict[int, set[int]]],
    ) -> None:
        super().__init__(context, pass_id, entries, retain, context.home.agent.info.id)
        self._others = others
        self._retain = retain
        self._status = dict.fromkeys(others, UNSTARTED)
        received = {node.message_id for each in entries.values() for node in each.exits}
        # all gradients for any other worker come from this one, and begin that worker's part
        self._to_begin = [each for each, sent in others.items() if not sent.keys() <= received]
        self._open_parts = 1 + len(others)  # that are not done; the leader's is one of them
        self._thread = threading.get_ident()
        self._calling = QUEUEING
        self._queue: list[tuple[int, Callable[..., Any], tuple[Any, ...]]] = []

    def run(self, roots: Gradients) -> None:
        """Run the pass from its roots, and wait for its end.

        Args:
            roots: the gradients of the entry ``ROOTS``.

        Raises:
            RuntimeError: a worker's part of the pass failed, or a worker cannot be reached.
        """
        try:
            self.begin(roots)
            for worker in self._to_begin:
                if self._change_status(worker, UNSTARTED, PENDING):
                    self._begin_part(worker, {})
            while batch := self._take_batch():
                for call in batch[:-1]:
                    super()._call(*call)
                worker, func, args = batch[-1]
                started = start_without_context(self._agent, worker, func, args, None)
                try:
                    self._on_reply(worker, functools.partial(self._await_reply, started))
                finally:
                    started.abandon()
        except Exception as exc:  # a worker cannot be reached
            self.fail(exc)
        release_reader()
        with self._agent.waits.noted(BACKWARD, self._unended):
            self.future.wait()

    def _unended(self) -> list[str]:
        """Return the names of the workers whose parts have not ended."""
        unended = [each for each, status in self._status.items() if status != ENDED]
        return names_of(self._agent, unended)

    def _await_reply(self, wait: Callable[..., Reply]) -> Reply:
        self._calling = DIRECT
        try:
            with self._agent.waits.noted(BACKWARD, self._unended):
                return wait(self._has_ended)
        finally:
            self._calling = QUEUEING

    def _take_batch(self) -> list[tuple[int, Callable[..., Any], tuple[Any, ...]]]:
        """Return the queued calls; enter DIRECT if there is none to send."""
        if not self._queue or self._has_ended():
            self._calling = DIRECT
            return []
        batch, self._queue = self._queue, []
        return batch

    def _call(self, worker: int, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self._calling != DIRECT and threading.get_ident() == self._thread:
            self._queue.append((worker, func, args))
        else:
            super()._call(worker, func, args)

    def _on_callback(self, worker: int, get_reply: Callable[[], Reply]) -> None:
        if threading.get_ident() != self._thread:
            self._on_reply(worker, get_reply)
            return
        calling, self._calling = self._calling, DIRECT
        try:
            self._on_reply(worker, get_reply)
        finally:
            self._calling = calling

    # -- the others' parts ------------------------------------------------------------------------

    def _change_status(self, worker: int, before: int, after: int) -> bool:
        """Change the status of a part; return False if it is not ``before``."""
        with self._lock:
            if self._status[worker] != before:
                return False
            self._status[worker] = after
            return True

    def _begin_part(self, worker: int, gradients: Gradients) -> None:
        """Have a worker begin its part, whose status has just been changed from UNSTARTED."""
        messages = {number: sorted(slots) for number, slots in self._others[worker].items()}
        self._request(worker, begin_part, messages, self._retain, self._me, gradients)

    def _send_gradients(self, worker: int, gradients: Gradients, is_needed: bool = False) -> None:
        if self._change_status(worker, UNSTARTED, PENDING):
            self._begin_part(worker, gradients)
        else:
            is_needed = self._change_status(worker, NEEDS_GRADIENTS, PENDING)
            super()._send_gradients(worker, gradients, is_needed)

    def _process_reply(self, worker: int, gradients: Gradients, status: int) -> None:
        if status != PENDING:
            with self._lock:
                if self._status[worker] != ENDED:  # by a later reply that another thread handles
                    self._status[worker] = status
        if gradients:
            self.process_gradients(gradients)
        if status == ENDED:
            self._on_part_ended()

    def _on_part_ended(self) -> None:
        """Complete the pass if the part that ended, the leader's or another, is the last."""
        with self._lock:
            self._open_parts -= 1
            if self._open_parts:
                return
        self._complete()

    # -- the end ----------------------------------------------------------------------------------

    def _has_ended(self) -> bool:
        return self._state in (DONE, FAILED)

    def on_peer_lost(self, worker: int, error: WorkerDiedError) -> None:
        """End the pass, if a worker that takes part died."""
        if worker in self._others:
            self.fail(error)

    def fail(self, error: BaseException) -> bool:
        """End the pass with an error, and abort the others' parts, unless it has ended.

        Returns:
            True: no call has to report the error to the leader.
        """
        if super().fail(error):
            self._agent.submit(self._abort_others)
        return True

    def _abort_others(self) -> None:
        error = RpcError(f"the backward pass of worker {self._me} failed elsewhere")
        for worker, status in self._status.items():
            if status != UNSTARTED and self._agent.members.find(worker) is not None:
                with contextlib.suppress(RpcError):  # RPC was shut down, or the worker just left
                    args = (self._context.id, self.id, error)
                    call_without_context(self._agent, worker, abort_part, args, None)


def run_backward(
    context_id: int, roots: Sequence[torch.Tensor], retain: bool, agent: Agent | None = None
) -> None:
    """Run a backward pass from ``roots``, and wait until it is done on all workers.

    Args:
        context_id: the id of a context of this worker.
        roots: scalars with a ``grad_fn``.
        retain: keep the graph for another pass.
        agent: this worker's agent in the context's group; default: in the default group.

    Raises:
        RuntimeError: there is no such context, a root is no such scalar, or a worker's part of
            the pass failed.
        WorkerDiedError: a worker that takes part died.
    """
    contexts = contexts_of(agent)
    context = contexts.find_context(context_id)
    _check(roots)
    edges = {slot: (root.grad_fn, root.output_nr) for slot, root in enumerate(roots)}
    root = Entry(edges, context.messages.is_exit)
    others = explore(context, root)
    here = others.pop(contexts.agent.info.id, {})
    entries = {number: context.messages.entry(number, slots) for number, slots in here.items()}
    entries[ROOTS] = root
    leader = Leader(context, contexts.new_id(), entries, retain, others)
    try:
        leader.run({ROOTS: [torch.ones_like(each) for each in roots]})
    except BaseException as exc:  # also an interrupt
        leader.fail(exc)
        if isinstance(exc.__cause__, KeyboardInterrupt):  # it struck this worker's own part
            raise exc.__cause__ from None
        raise


def _check(roots: Sequence[torch.Tensor]) -> None:
    if not roots:
        raise RpcError("No tensors provided for gradient computation.")
    for root in roots:
        shape = tuple(root.shape)
        if not root.requires_grad:
            raise RpcError(f"requires_grad not set on root of shape {shape}")
        if root.numel() != 1:
            raise RpcError(f"root of shape {shape} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RpcError(f"root of shape {shape} does not have a valid gradient function.")
