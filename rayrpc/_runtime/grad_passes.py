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
take turns, and each message of a pass between them is the answer to another.

Torch describes such a pass as its SMART mode, and has built the FAST one, which takes every message
of the context for used.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.futures import Future

from rayrpc._runtime import current
from rayrpc._runtime.grad_context import DistAutogradContext, Sent
from rayrpc._runtime.grad_graph import Entry, GradGraph
from rayrpc._runtime.grad_hook import call_outside, contexts, find_context, start_outside
from rayrpc._runtime.turns import step_aside
from rayrpc.errors import RpcError, WorkerDiedError

__all__ = ["run_backward"]

ROOTS = -1  # known by this, beside the ids of messages
NO_TIMEOUT = 0.0  # a part may take long; that a worker dies is noticed

#: gradients of the tensors of messages, None for a tensor that was not used, by message
Gradients = dict[int, Sequence[torch.Tensor | None]]


class State(enum.IntEnum):
    """How it stands with a worker's part, as far as the leader has to know."""

    PROMISED = 0  #: another answer will say so
    WAITING = 1  #: for gradients from the leader, and nothing else
    OVER = 2


class Answer(NamedTuple):
    """What a worker says to gradients: others, for who sent them, and to the leader its state."""

    gradients: Gradients
    state: State


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
        self._open = 1  # what has to end first: this worker's graph, others' parts, and calls
        self._is_over = False
        self._is_failed = False
        self._is_running = False
        self._is_fed = False
        self._is_promised = True  # an answer that will tell the leader of the end is under way
        self._last: Gradients = {}  # goes along with it
        self._waiting: set[int] = set()  # at the leader: whose parts wait for gradients from it
        #: completes with the pass
        self.future: Any = Future()
        with self._home.lock:
            self._home.passes += 1

    def begin(self, gradients: Gradients, source: int | None = None) -> Gradients:
        """Feed it for the first time; see ``feed``."""
        return self.feed({**self._context.begin(self.id, self), **gradients}, source)

    def gone(self, worker: int, error: WorkerDiedError) -> None:
        """Note that a worker died; the leader will end this."""

    def feed(self, gradients: Gradients, source: int | None = None) -> Gradients:
        """Take gradients, and run what they make possible.

        Returns:
            what that yields for ``source``, the worker that sent them; others are sent theirs.
        """
        for message_id, each in gradients.items():
            self._graph.feed(message_id, each)
        back: Gradients = {}
        with self._lock:
            self._is_fed = True
            if self._is_running or self._is_over:
                return back
            self._is_running = True
        try:
            while self._run(source, back):
                pass
        except BaseException as exc:
            self.fail(exc)
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
        if list(out) == [self._leader] and stage.leaves is not None and self._open == 1:
            self._last = out.pop(self._leader)  # nothing else holds that answer up
        for worker, gradients in out.items():
            self._propagate(worker, gradients)
        if stage.leaves is None:
            return True
        stage.leaves.settle(self._context.gradients, self._context.lock)
        self._close_one()
        return False

    def _propagate(self, worker: int, gradients: Gradients) -> None:
        is_waiting = worker in self._waiting
        self._waiting.discard(worker)
        self._ask(worker, _propagate, gradients, self._me, is_waiting)

    def _ask(self, worker: int, func: Any, *args: Any) -> None:
        """Call another worker; the pass ends after its answer, or with its error."""
        with self._lock:
            self._open += 1
        self._call(worker, func, (self._context.id, self.id, *args))

    def _call(self, worker: int, func: Any, args: Any) -> None:
        call_outside(worker, func, args, NO_TIMEOUT).add_done_callback(
            lambda answer: self._answered(worker, answer.value)
        )

    def _answered(self, worker: int, answer: Callable[[], Answer]) -> None:
        try:
            gradients, state = answer()
        except BaseException as exc:
            self.fail(exc)
            return
        if state is State.WAITING:
            self._waiting.add(worker)
        if gradients:
            self.feed(gradients)
        if state is State.OVER:
            self._close_one()
        self._close_one()

    def answer(self, back: Gradients, source: int) -> Any:
        """Return what to answer to gradients from ``source``, a Future; see ``feed``."""
        with self._lock:
            is_due = source == self._leader and not self._is_promised
            self._is_promised |= is_due
        return self.promised(back) if is_due else _now(Answer(back, State.PROMISED))

    def promised(self, back: Gradients) -> Any:
        """Return the answer that tells the leader of the end, unless it is the leader's turn."""
        with self._lock:
            if self._is_over:
                ended = self.future if self._is_failed else None
            elif self._open == 1 and not self._is_running and self._waits_for_leader():
                self._is_promised = False
                return _now(Answer(back, State.WAITING))
            else:
                ended = self.future
        if ended is None:
            return _now(Answer({**self._last, **back}, State.OVER))
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
        self.future.set_result(Answer(self._last, State.OVER))

    def fail(self, error: BaseException) -> None:
        """End the pass with an error, unless it is over."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = self._is_failed = True
        self._end()
        if not isinstance(error, RpcError):
            told = RpcError(f"Error on Node {self._me}: {error}")
            told.__cause__ = error.with_traceback(None)
            error = told
        self.future.set_exception(error)

    def _end(self) -> None:
        self._context.passes.pop(self.id, None)
        with self._home.lock:
            self._home.passes -= 1


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
            for worker in self._at_once:  # who gets gradients from here alone hears with them
                self._tell(worker, {})
            self.begin(roots)
            while asked := self._take_asked():
                for call in asked[:-1]:
                    super()._call(*call)
                worker, func, args = asked[-1]
                self._answered(worker, start_outside(worker, func, args, NO_TIMEOUT))
        except BaseException as exc:  # a worker cannot be reached
            self.fail(exc)
        step_aside()
        self.future.wait()

    def _take_asked(self) -> list[tuple[int, Any, Any]]:
        """Return the calls to make now; none: this thread makes no more."""
        with self._lock:
            asked = self._asked
            if not asked or self._is_over:
                self._asked = None
                return []
            self._asked = []
            return asked

    def gone(self, worker: int, error: WorkerDiedError) -> None:
        """End the pass, if a worker that takes part died."""
        if worker in self._parts:
            self.fail(error)

    def _tell(self, worker: int, gradients: Gradients) -> None:
        message_ids = sorted(self._to_tell.pop(worker))
        with self._lock:
            self._open += 1  # its part
        self._ask(worker, _begin, message_ids, self._retain, self._leader, gradients)

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


def _now(answer: Answer) -> Any:
    future: Any = Future()
    future.set_result(answer)
    return future


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
    run = LedPass(context, contexts().new_id(), {ROOTS: root, **entries}, retain, parts)
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


def _gives_future(func: Any) -> Any:
    """Mark a function for ``async_execution``, as it is."""
    func._wrapped_async_rpc_function = func
    return func


def _explore(context_id: int, message_ids: list[int]) -> list[tuple[int, int]]:
    """Return the messages, with who sent them, that messages of this worker's depend on."""
    context = find_context(context_id)
    return [each for number in message_ids for each in context.leads_of(context.entry(number))]


@_gives_future
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
    return _now(Answer({}, State.PROMISED))


def _give_up(context_id: int, pass_id: int, leader: int) -> None:
    context = contexts().get(context_id)
    run = context.passes.get(pass_id) if context is not None else None
    if run is not None:
        run.fail(RpcError(f"the backward pass of worker {leader} failed elsewhere"))
