"""Backward passes over several workers.

Who calls ``backward`` leads the pass:

1. *Explore.*  From the roots it follows the received messages that they lead to, and what those
   lead to at their senders: replies say so, and who is still in doubt asks.  What is not found
   takes no part: nobody will wait for its gradients.
2. *Begin.*  Every worker that takes part is told which of its messages do, with the first gradients
   if they come from the leader.  Its answer comes when its part is done, maybe with the last
   gradients, or at once when that fails or the worker dies.
3. *Propagate.*  Gradients go back along the messages, all that a worker has for another at a time,
   and each worker runs its part (``grad_graph``) as they come in.

Torch describes such a pass as its SMART mode, and has built the FAST one, which takes every message
of the context for used.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.futures import Future

from rayrpc._runtime import current
from rayrpc._runtime.grad_context import DistAutogradContext, Sent
from rayrpc._runtime.grad_graph import Entry, GradGraph
from rayrpc._runtime.grad_hook import call_outside, call_outside_sync, contexts, find_context
from rayrpc._runtime.turns import step_aside
from rayrpc.errors import RpcError, WorkerDiedError

__all__ = ["run_backward"]

ROOTS = -1  # known by this, beside the ids of messages
NO_TIMEOUT = 0.0  # a part may take long; that a worker dies is noticed

#: gradients of the tensors of messages, None for a tensor that was not used, by message
Gradients = dict[int, Sequence[torch.Tensor | None]]


class Pass:
    """This worker's part of a backward pass.

    Args:
        context (DistAutogradContext): of the pass.
        pass_id (int): names it in the context.
        entries (dict[int, Entry]): what takes part here.
        retain (bool): keep the graph for another pass.
        leader (int): id of the worker that leads the pass.
        parts (dict): at the leader: the messages of others that take part, by their worker.
    """

    def __init__(
        self,
        context: DistAutogradContext,
        pass_id: int,
        entries: dict[int, Entry],
        retain: bool,
        leader: int,
        parts: dict[int, set[int]] | None = None,
    ) -> None:
        self._context = context
        self.id = pass_id
        self._entries = entries
        self._retain = retain
        self._leader = leader
        self._parts = parts or {}
        self._to_begin = dict(self._parts)  # those that were not told yet
        self._answer: Gradients | None = None
        self._thread = threading.get_ident()
        self._asked_here: list[tuple[int, Any, Any, float]] | None = None
        self._graph = GradGraph(entries, retain)
        self._agent = current.get_agent()
        self._home = contexts()
        self._lock = threading.Lock()
        self._open = 1  # what has to end first: this worker's graph, and answers
        self._is_over = False
        self._is_unsettled = True
        self._is_running = False
        self._is_fed = False
        #: completes with the pass
        self.future: Any = Future()
        with self._home.lock:
            self._home.passes += 1
        early = context.begin(pass_id, self)
        if early:
            self.feed(early)

    def lead(self) -> None:
        """Tell those who take part; who gets gradients from here alone is told along with them."""
        received = {node.message_id for each in self._entries.values() for node in each.exits}
        for worker, message_ids in self._parts.items():
            if not message_ids <= received:
                self._begin(worker, {})

    def _begin(self, worker: int, gradients: Gradients) -> None:
        message_ids = sorted(self._to_begin.pop(worker))
        self._ask(worker, _begin, message_ids, self._retain, self._leader, gradients)

    def gone(self, worker: int, error: WorkerDiedError) -> None:
        """Note that a worker died."""
        if worker in self._parts:
            self.fail(error)

    def feed(self, gradients: Gradients) -> None:
        """Take gradients that came in, and run what they make possible."""
        for message_id, each in gradients.items():
            self._graph.feed(message_id, each)
        with self._lock:
            self._is_fed = True
            if self._is_running or self._is_over:
                return
            self._is_running = True
        try:
            while self._run():
                pass
        except BaseException as exc:
            self.fail(exc)

    def _run(self) -> bool:
        """Run a stage; return False if there is nothing to do for now."""
        self._is_fed = False
        stage = self._graph.run()
        if stage is None:
            with self._lock:
                self._is_running = self._is_fed and not self._is_over
                return self._is_running
        out: dict[int, Gradients] = {}
        for node, slots in stage.exits.items():
            out.setdefault(node.sender, {})[node.message_id] = [
                slots.get(slot) for slot in range(node.count)
            ]
        for message_id, each in out.pop(self._agent.info.id, {}).items():
            self._graph.feed(message_id, each)
            self._is_fed = True
        if list(out) == [self._leader] and stage.leaves is not None and self._open == 1:
            self._answer = out.pop(self._leader)  # nothing else holds the answer up
        for worker, gradients in out.items():
            if worker in self._to_begin:
                self._begin(worker, gradients)
            else:
                self._ask(worker, _propagate, gradients, timeout=self._agent.rpc_timeout)
        if stage.leaves is not None:
            stage.leaves.settle(self._context.gradients, self._context.lock)
            self._is_unsettled = False
            self._close_one()
            return False
        return True

    def _ask(self, worker: int, func: Any, *args: Any, timeout: float = NO_TIMEOUT) -> None:
        """Call another worker; the pass ends after its answer, or with its error."""
        with self._lock:
            self._open += 1
            if self._asked_here is not None and threading.get_ident() == self._thread:
                self._asked_here.append((worker, func, args, timeout))
                return
        self._call(worker, func, args, timeout)

    def _call(self, worker: int, func: Any, args: Any, timeout: float) -> None:
        args = (self._context.id, self.id, *args)
        call_outside(worker, func, args, timeout).add_done_callback(
            lambda answer: self._answered(answer.value)
        )

    def wait(self, roots: Gradients) -> None:
        """Run the pass from its roots, and wait for its end; at the leader.

        While there is one call to make, this thread makes it and waits for the answer itself: no
        other has to wake up.
        """
        self._asked_here = []
        self.lead()
        self.feed(roots)
        while True:
            with self._lock:
                asked = self._asked_here
                if len(asked) != 1 or self._open != 1 + self._is_unsettled or self._is_over:
                    self._asked_here = None
                    break
                self._asked_here = []
            worker, func, args, timeout = asked[0]
            args = (self._context.id, self.id, *args)
            call = functools.partial(call_outside_sync, worker, func, args, timeout)
            self._answered(call)
        for each in asked:
            self._call(*each)
        step_aside()
        self.future.wait()

    def _answered(self, answer: Callable[[], Gradients | None]) -> None:
        try:
            gradients = answer()
        except BaseException as exc:
            self.fail(exc)
            return
        if gradients:
            self.feed(gradients)
        self._close_one()

    def _close_one(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open or self._is_over:
                return
            self._is_over = True
        self._end()
        self.future.set_result(self._answer)

    def fail(self, error: BaseException) -> None:
        """End the pass with an error, unless it is over."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
        self._end()
        if not isinstance(error, RpcError):
            told = RpcError(f"Error on Node {self._agent.info.id}: {error}")
            told.__cause__ = error.with_traceback(None)
            error = told
        self.future.set_exception(error)

    def _end(self) -> None:
        self._context.passes.pop(self.id, None)
        with self._home.lock:
            self._home.passes -= 1


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
    parts = _explore_all(context, root)
    entries = {message_id: context.entry(message_id) for message_id in parts.pop(me, ())}
    run = Pass(context, contexts().new_id(), {ROOTS: root, **entries}, retain, me, parts)
    try:
        run.wait({ROOTS: [torch.ones_like(each) for each in roots]})
    except BaseException:
        for worker in parts:
            if agent.find(worker) is not None:
                call_outside(worker, _give_up, (context_id, run.id, me), agent.rpc_timeout)
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


def _explore_all(context: DistAutogradContext, root: Entry) -> dict[int, set[int]]:
    """Return the messages that take part in a pass, by the worker that sent them."""
    agent = current.get_agent()
    parts: dict[int, set[int]] = {}
    found = context.leads_of(root)
    while found:
        asked = []
        new: dict[int, list[int]] = {}
        for worker, message_id in found:
            known = parts.setdefault(worker, set())
            if message_id not in known:
                known.add(message_id)
                new.setdefault(worker, []).append(message_id)
        here = new.pop(agent.info.id, [])
        told: list[Sent] = []
        for worker, message_ids in new.items():
            unknown = []
            for message_id in message_ids:
                if (leads := context.leads.get((worker, message_id))) is None:
                    unknown.append(message_id)
                else:
                    told += leads
            if unknown:
                args = (context.id, unknown)
                asked.append(call_outside(worker, _explore, args, agent.rpc_timeout))
        found = told + (_explore(context.id, here) if here else [])
        step_aside()
        for answer in asked:
            found += answer.wait()
    return parts


# -- what workers ask of one another ----------------------------------------------------------


def _explore(context_id: int, message_ids: list[int]) -> list[tuple[int, int]]:
    """Return the messages, with who sent them, that messages of this worker's depend on."""
    context = find_context(context_id)
    return [each for number in message_ids for each in context.leads_of(context.entry(number))]


def _begin(
    context_id: int,
    pass_id: int,
    message_ids: list[int],
    retain: bool,
    leader: int,
    gradients: Gradients,
) -> Any:
    context = find_context(context_id)
    entries = {message_id: context.entry(message_id) for message_id in message_ids}
    run = Pass(context, pass_id, entries, retain, leader)
    if gradients:
        run.feed(gradients)
    return run.future


_begin._wrapped_async_rpc_function = _begin  # type: ignore[attr-defined]


def _propagate(context_id: int, pass_id: int, gradients: Gradients) -> None:
    run = find_context(context_id).arrive(pass_id, gradients)
    if run is not None:
        run.feed(gradients)


def _give_up(context_id: int, pass_id: int, leader: int) -> None:
    context = contexts().get(context_id)
    run = context.passes.get(pass_id) if context is not None else None
    if run is not None:
        run.fail(RpcError(f"the backward pass of worker {leader} failed elsewhere"))
