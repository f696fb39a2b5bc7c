"""Backward passes over several workers.

Who calls ``backward`` leads the pass:

1. *Explore.*  From the roots it follows the received messages that they lead to, and what those
   lead to at their senders: replies say so, and who is still in doubt asks.  What is not found
   takes no part: nobody will wait for its gradients.
2. *Begin.*  Every worker that takes part is told which of its messages do, with the first gradients
   if they come from the leader.
3. *Propagate.*  Gradients go back along the messages, all that a worker has for another at a time,
   and each worker runs its part (``grad_graph``) as they come in.  What that yields for who sent
   them goes along with the answer.

The answer to *begin* comes when the part is over, or fails; or when the part can only go on with
gradients from the leader, who then gets that answer to one of its next messages.  So two workers
take turns, and each message of a pass between them is the answer to another.  A part is over when
its graph has been run, whether or not others have answered to its gradients: they tell the leader
themselves what becomes of these.

Torch describes such a pass as its SMART mode, and has built the FAST one, which takes every message
of the context for used.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.futures import Future

from rayrpc._autograd.context import DistAutogradContext
from rayrpc._autograd.graph import Entry, GradGraph
from rayrpc._autograd.hook import call_outside, contexts, find_context
from rayrpc._runtime import current
from rayrpc.errors import RpcError, WorkerDiedError

__all__ = ["Gradients", "Pass", "begin_part", "give_up"]

#: gradients of the tensors of messages, None for a tensor that was not used, by message
Gradients = dict[int, Sequence[torch.Tensor | None]]


#: what a worker says to gradients: others, for who sent them, and to the leader one of the below
Answer = tuple[Gradients, int]
# How it stands with a worker's part, as far as the leader has to know.  (An enum, or a class for
# the answer, would take longer to pickle than all the rest of one.)
PROMISED = 0  # another answer will say so
WAITING = 1  # for gradients from the leader, and nothing else
OVER = 2


class Pass:
    """This worker's part of a backward pass.

    Args:
        context (DistAutogradContext): of the pass.
        pass_id (int): names it in the context.
        entries (dict[int, Entry]): what takes part here.
        retain (bool): keep the graph for another pass.
        leader (int): id of the worker that leads the pass.
    """

    def __init__(
        self,
        context: DistAutogradContext,
        pass_id: int,
        entries: dict[int, Entry],
        retain: bool,
        leader: int,
    ) -> None:
        self._context = context
        self.id = pass_id
        self._leader = leader
        self._graph = GradGraph(entries, retain)
        self._agent = current.get_agent()
        self._me = self._agent.info.id
        self._home = contexts()
        self._lock = threading.Lock()
        self._open = 1  # what has to end first: this worker's graph; at the leader, others' parts
        self._is_over = False
        self._is_failed = False
        self._is_running = False
        self._is_fed = False
        self._is_promised = True  # an answer that will tell the leader of the end is under way
        self._last: Gradients = {}  # goes along with it
        self._asking = 0  # gradients sent to the leader that it has not answered yet
        self._waiting: set[int] = set()  # at the leader: whose parts wait for gradients from it
        #: completes with the pass
        self.future: Any = Future()
        with self._home.lock:
            self._home.passes += 1

    def begin(self, gradients: Gradients, source: int | None = None) -> Gradients:
        """Feed it for the first time; see ``feed``."""
        early = self._context.begin(self.id, self)
        why = self._context.called_off.get(self.id)
        if why is not None:
            self.fail(why)
        return self.feed({**early, **gradients}, source)

    def on_peer_lost(self, worker: int, error: WorkerDiedError) -> None:
        """Note that a worker died; the leader will end this."""

    def feed(self, gradients: Gradients, source: int | None = None) -> Gradients:
        """Take gradients, and run what they make possible.

        Returns:
            what that yields for ``source``, the worker that sent them; others are sent theirs.
        """
        back: Gradients = {}
        with self._lock:
            for message_id, each in gradients.items():
                self._graph.feed(message_id, each)
            self._is_fed = True
            if self._is_running or self._is_over:
                return back
            self._is_running = True
        try:
            while self._run(source, back):
                pass
        except BaseException as exc:
            if not self.fail(exc) and source != self._leader:
                self._complain(exc)
        return back

    def _run(self, source: int | None, back: Gradients) -> bool:
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
        for message_id, each in out.pop(self._me, {}).items():
            self._graph.feed(message_id, each)
            self._is_fed = True
        if source is not None:
            back.update(out.pop(source, {}))
        if stage.leaves is not None:
            self._last = out.pop(self._leader, {})  # the end is told at once
        for worker, gradients in out.items():
            self._propagate(worker, gradients)
        if stage.leaves is None:
            return True
        self._context.take(stage.leaves)
        self._close_one()
        return False

    def _propagate(self, worker: int, gradients: Gradients) -> None:
        is_waiting = worker in self._waiting
        self._waiting.discard(worker)
        if worker == self._leader:
            with self._lock:
                self._asking += 1
        self._ask(worker, _propagate, gradients, self._me, is_waiting)

    def _ask(self, worker: int, func: Any, *args: Any) -> None:
        """Call another worker; its error ends the pass."""
        self._call(worker, func, (self._context.id, self.id, *args))

    def _call(self, worker: int, func: Any, args: Any) -> None:
        call_outside(worker, func, args, None).add_done_callback(
            lambda answer: self._answered(worker, answer.value)
        )

    def _answered(self, worker: int, answer: Callable[[], Answer]) -> None:
        try:
            gradients, state = answer()
        except BaseException as exc:
            if not self.fail(exc):
                self._complain(exc)
            if not isinstance(exc, Exception):  # an interrupt
                raise
            return
        if state == WAITING:
            self._waiting.add(worker)
        if gradients:
            self.feed(gradients)
        if worker == self._leader:
            with self._lock:
                self._asking -= 1
        if state == OVER:
            self._close_one()

    def _complain(self, error: BaseException) -> None:
        """Tell the leader of an error when no answer will."""
        told = error if isinstance(error, WorkerDiedError) else self._error_here(error)
        with contextlib.suppress(RpcError):  # RPC was shut down, or the leader has just left
            call_outside(self._leader, give_up, (self._context.id, self.id, told), None)

    def answer(self, back: Gradients, source: int) -> Any:
        """Return what to answer to gradients from ``source``, a Future; see ``feed``."""
        with self._lock:
            is_due = source == self._leader and not self._is_promised
            self._is_promised |= is_due
        return self.promised(back) if is_due else _now((back, PROMISED))

    def promised(self, back: Gradients) -> Any:
        """Return the answer that tells the leader of the end, unless it is the leader's turn."""
        with self._lock:
            if self._is_over:
                ended = self.future if self._is_failed else None
            elif not (self._is_running or self._asking) and self._waits_for_leader():
                self._is_promised = False
                return _now((back, WAITING))
            else:
                ended = self.future
        if ended is None:
            return _now(({**self._last, **back}, OVER))
        if back:
            self._propagate(self._leader, back)
        return ended

    def _waits_for_leader(self) -> bool:
        sends = self._context.sends
        return all(sends[number].to == self._leader for number in self._graph.missing())

    def _close_one(self) -> None:
        with self._lock:
            self._open -= 1
            if self._open or self._is_over:
                return
            self._is_over = True
        self._end()
        self.future.set_result((self._last, OVER))

    def fail(self, error: BaseException) -> bool:
        """End the pass with an error, unless it is over; tell whether the leader hears of it."""
        with self._lock:
            if self._is_over:
                return False
            self._is_over = self._is_failed = True
        self._end()
        if not isinstance(error, RpcError):
            told = self._error_here(error)
            told.__cause__ = error.with_traceback(None)
            error = told
        self.future.set_exception(error)
        return self._is_promised

    def _error_here(self, error: BaseException) -> RpcError:
        return RpcError(f"Error on Node {self._me}: {error}")

    def _end(self) -> None:
        self._context.passes.pop(self.id, None)
        with self._home.lock:
            self._home.passes -= 1


def _now(answer: Answer) -> Any:
    future: Any = Future()
    future.set_result(answer)
    return future


# -- what workers ask of one another ----------------------------------------------------------


def _gives_future(func: Any) -> Any:
    """Mark a function for ``async_execution``, as it is."""
    func._wrapped_async_rpc_function = func
    return func


@_gives_future
def begin_part(
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
    return run.promised(run.begin(gradients, leader))


@_gives_future
def _propagate(
    context_id: int, pass_id: int, gradients: Gradients, source: int, is_waiting: bool
) -> Any:
    run = find_context(context_id).arrive(pass_id, gradients)
    if run is not None:
        return run.answer(run.feed(gradients, source), source)
    if is_waiting:
        raise RpcError(f"the part of worker {current.get_agent().info.id} in the pass has ended")
    return _now(({}, PROMISED))


def give_up(context_id: int, pass_id: int, why: RpcError) -> None:
    context = contexts().get(context_id)
    if context is None:
        return
    context.called_off[pass_id] = why  # begin_part may come later
    run = context.passes.get(pass_id)
    if run is not None:
        run.fail(why)
