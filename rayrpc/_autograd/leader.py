"""The part of the worker that leads a backward pass; see ``grad_passes``."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from rayrpc._autograd.context import DistAutogradContext
from rayrpc._autograd.explore import explore_all
from rayrpc._autograd.graph import Entry
from rayrpc._autograd.hook import call_outside, contexts, find_context, start_outside
from rayrpc._autograd.participant import (
    Gradients,
    Pass,
    begin_part,
    give_up,
)
from rayrpc._concurrency.reader import release_reader
from rayrpc._runtime import current
from rayrpc.errors import RpcError, WorkerDiedError

__all__ = ["run_backward"]

ROOTS = -1  # known by this, beside the ids of messages


class LedPass(Pass):
    """The part of the worker that leads a pass, and waits for the others.

    Args:
        parts (dict): the messages of others that take part, by their worker.
        context, pass_id, entries, retain: as for ``Pass``.
    """

    def __init__(
        self,
        context: DistAutogradContext,
        pass_id: int,
        entries: dict[int, Entry],
        retain: bool,
        parts: dict[int, set[int]],
    ) -> None:
        super().__init__(context, pass_id, entries, retain, current.get_agent().info.id)
        self._parts = parts
        self._to_tell = dict(parts)  # those that were not told to begin yet
        received = {node.message_id for each in entries.values() for node in each.exits}
        self._at_once = [each for each, message_ids in parts.items() if not message_ids <= received]
        self._retain = retain
        self._thread = threading.get_ident()
        # calls that this thread is to make while it waits; None: it waits no longer
        self._asked: list[tuple[int, Any, Any]] | None = []

    def wait(self, roots: Gradients) -> None:
        """Run the pass from its roots, and wait for its end.

        This thread waits for the answer to the last of its calls itself, so that no other has to
        wake up.
        """
        try:
            self.begin(roots)
            for worker in self._at_once:  # who gets gradients from here alone hears with them
                if worker in self._to_tell:
                    self._tell(worker, {})
            while asked := self._take_asked():
                for call in asked[:-1]:
                    super()._call(*call)
                worker, func, args = asked[-1]
                wait = start_outside(worker, func, args, None)
                self._answered(worker, functools.partial(wait, self._is_ended))
        except Exception as exc:  # a worker cannot be reached
            self.fail(exc)
        release_reader()
        self.future.wait()

    def _is_ended(self) -> bool:
        return self._is_over

    def fail(self, error: BaseException) -> bool:
        """End the pass with an error, unless it is over, and everybody's part of it."""
        if super().fail(error):
            self._agent.submit(self._call_off)
        return True

    def _call_off(self) -> None:
        why = RpcError(f"the backward pass of worker {self._me} failed elsewhere")
        for worker in self._parts:
            if worker not in self._to_tell and self._agent.find(worker) is not None:
                with contextlib.suppress(RpcError):  # RPC was shut down, or it has just left
                    call_outside(worker, give_up, (self._context.id, self.id, why), None)

    def _take_asked(self) -> list[tuple[int, Any, Any]]:
        """Return the calls to make now; none: this thread makes no more."""
        with self._lock:
            asked = self._asked
            if not asked or self._is_over:
                self._asked = None
                return []
            self._asked = []
            return asked

    def on_peer_lost(self, worker: int, error: WorkerDiedError) -> None:
        """End the pass, if a worker that takes part died."""
        if worker in self._parts:
            self.fail(error)

    def _tell(self, worker: int, gradients: Gradients) -> None:
        message_ids = sorted(self._to_tell.pop(worker))
        with self._lock:
            self._open += 1
        self._ask(worker, begin_part, message_ids, self._retain, self._leader, gradients)

    def _propagate(self, worker: int, gradients: Gradients) -> None:
        if worker in self._to_tell:
            self._tell(worker, gradients)
        else:
            super()._propagate(worker, gradients)

    def _call(self, worker: int, func: Any, args: Any) -> None:
        if self._asked is not None and threading.get_ident() == self._thread:
            self._asked.append((worker, func, args))
        else:
            super()._call(worker, func, args)


def run_backward(context_id: int, roots: Sequence[torch.Tensor], retain: bool) -> None:
    """Run a backward pass from ``roots``, and wait until it is done everywhere.

    Raises:
        RuntimeError: there is no such context, or a worker's part of the pass failed.
    """
    context = find_context(context_id)
    _check(roots)
    agent = current.get_agent()
    me = agent.info.id
    edges = [(root.grad_fn, root.output_nr) for root in roots]
    root = Entry(edges, context.is_exit)
    parts = explore_all(context, root)
    entries = {message_id: context.entry(message_id) for message_id in parts.pop(me, ())}
    entries[ROOTS] = root
    run = LedPass(context, contexts().new_id(), entries, retain, parts)
    try:
        run.wait({ROOTS: [torch.ones_like(each) for each in roots]})
    except BaseException as exc:  # also an interrupt
        run.fail(exc)
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
