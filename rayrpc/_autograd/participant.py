"""Backward passes over several workers, and one worker's part in them.

The worker that calls ``backward`` leads the pass (``leader.py``):

1. *Explore.*  The leader finds the received tensors that the roots depend on, and then the tensors
   that these depend on at their senders: replies carry this information, and the leader requests
   the rest.  A tensor that is not found takes no part: no worker waits for its gradient.
2. *Begin.*  The leader sends each worker that takes part the list of its tensors that do, with the
   worker's first gradients if these come from the leader.
3. *Propagate.*  A worker sends gradients back to the senders of messages, in one request all that
   it has for one worker, and runs its part (``graph.py``) as gradients arrive.  Gradients for the
   sender of a request are returned in the reply.

The state of a part:

    WAITING ──gradients──> RUNNING ──gradients, while a thread runs a stage──> RERUN
    WAITING <──no stage is ready── RUNNING <──next stage── RERUN
                                   RUNNING, RERUN ──last stage──> FINISHED ──> DONE
                                   RUNNING, RERUN ──no more stages──> WHOLE_RUN ──> FINISHED
    any but DONE ──error, abort, release of the context──> FAILED

In WHOLE_RUN one run of torch's engine does the rest of the part, takes gradients as they arrive,
and sends others as they are complete.  It has a thread of its own if it may have to wait.

A part in FINISHED is done at once, whether or not other workers have replied to its gradients; only
the leader's part stays in FINISHED until all other parts are done.

The reply to *begin* reports the part's end to the leader.  But if the part can only go on with
gradients from the leader, it replies NEEDS_GRADIENTS, and the reply to the leader's next request
reports the end.  So a pass of two workers consists of the leader's requests and their replies.
Whether the part owes the leader a report:

    report is due ──reply NEEDS_GRADIENTS──> not due ──request of the leader──> report is due

If the part fails while no report is due, it calls the leader (``abort_part``).

Torch describes such a pass as its SMART mode.  It implements only the FAST mode, which assumes that
the roots depend on every message of the context.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.futures import Future

from rayrpc._autograd import graph
from rayrpc._autograd.accumulate import LeafGradients
from rayrpc._autograd.context import DistAutogradContext
from rayrpc._autograd.current_context import call_without_context
from rayrpc._autograd.graph import Entry, GradGraph
from rayrpc._autograd.hook import serving_contexts
from rayrpc._autograd.part_calls import (
    ENDED,
    NEEDS_GRADIENTS,
    PENDING,
    Reply,
    abort_part,
    completed,
    propagate,
    returns_future,
)
from rayrpc._autograd.passes import Gradients
from rayrpc._concurrency.outcome import Error, complete
from rayrpc._runtime.agent import Agent
from rayrpc.errors import RpcError, WorkerDiedError

__all__ = ["BACKWARD", "DONE", "FAILED", "Participant", "begin_part", "names_of"]

#: the name under which waits for other parts are reported
BACKWARD = "a backward pass"

WAITING, RUNNING, RERUN, WHOLE_RUN, FINISHED, DONE, FAILED = range(7)


class Participant:
    """This worker's part of a backward pass.

    Args:
        context (DistAutogradContext): the context of the pass.
        pass_id (int): names the pass in the context.
        entries (dict[int, Entry]): the entries of this worker that take part, by message.
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
        self.id = pass_id
        #: completes with the last reply to the leader, when the part ends
        self.future: Future[Any] = Future()
        self._context = context
        self._leader = leader
        self._graph = GradGraph(entries, retain)
        self._contexts = context.home
        self._agent: Agent = context.home.agent
        self._me = self._agent.info.id
        self._lock = threading.Lock()
        self._state = WAITING
        self._report_due = True
        self._requests_to_leader = 0  # without a reply so far
        self._last_gradients: Gradients = {}  # for the leader, in the reply that reports the end
        self._contexts.count_pass(1)

    def begin(self, gradients: Gradients, source: int | None = None) -> Gradients:
        """Register the part, and process its first gradients; see ``process_gradients``."""
        early = self._context.passes.add(self.id, self)
        return self.process_gradients({**early, **gradients}, source)

    def on_peer_lost(self, worker: int, error: WorkerDiedError) -> None:
        """Do nothing: the leader aborts the pass if it needs the worker."""

    # -- running the graph ------------------------------------------------------------------------

    def process_gradients(self, gradients: Gradients, source: int | None = None) -> Gradients:
        """Add gradients, and run the stages that they complete.

        Args:
            gradients: the gradients, by the id of this worker's message.
            source: id of the worker whose request carried them; None: no request did.

        Returns:
            The gradients for ``source``, by its message; those for other workers are sent to them.
        """
        back: Gradients = {}
        with self._lock:
            for message_id, each in gradients.items():
                self._graph.add_gradients(message_id, each)
            if self._state != WAITING:
                if self._state == RUNNING:
                    self._state = RERUN
                return back
            self._state = RUNNING
        try:
            while self._run_stage(source, back):
                pass
        except BaseException as exc:
            if not self.fail(exc) and source != self._leader:
                self._report(exc)
        return back

    def _run_stage(self, source: int | None, back: Gradients) -> bool:
        """Run a stage; return False if there is none to run for now."""
        with self._lock:
            if self._state == FAILED:
                return False
            self._state = RUNNING
        stage = self._graph.run()
        if stage == graph.WHOLE_RUN:
            self._start_whole_run()
            return False
        if stage is None:
            with self._lock:
                if self._state == RUNNING:
                    self._state = WAITING
                return self._state == RERUN
        out: dict[int, Gradients] = {}
        for node, slots in stage.exits.items():
            out.setdefault(node.sender, {})[node.message_id] = [
                slots.get(slot) for slot in range(node.count)
            ]
        for message_id, each in out.pop(self._me, {}).items():
            self._graph.add_gradients(message_id, each)
        if source is not None:
            back.update(out.pop(source, {}))
        if stage.leaves is not None:
            self._last_gradients = out.pop(self._leader, {})
        for worker, gradients in out.items():
            self._send_gradients(worker, gradients)
        if stage.leaves is None:
            return True
        self._finish(stage.leaves)
        return False

    def _start_whole_run(self) -> None:
        with self._lock:
            if self._state == FAILED:
                return
            self._state = WHOLE_RUN
        if self._graph.is_whole:
            self._run_whole()
        else:
            self._agent.submit(self._run_whole)

    def _run_whole(self) -> None:
        try:
            leaves = self._graph.run_whole(self._leave, self._noted)
        except BaseException as exc:
            if not self.fail(exc):
                self._report(exc)
        else:
            self._finish(leaves)

    def _noted(self, message_id: int) -> AbstractContextManager[None]:
        """Return a context manager that reports the wait for a message's gradients."""
        to = self._context.messages.receiver_of(message_id)
        return self._agent.waits.noted(BACKWARD, lambda: names_of(self._agent, [to]))

    def _leave(self, node: Any, gradients: Sequence[torch.Tensor | None]) -> None:
        """Send the gradients of a receive function to the message's sender, during a whole run."""
        if node.sender == self._me:
            self._graph.add_gradients(node.message_id, gradients)
        else:
            self._send_gradients(node.sender, {node.message_id: gradients})

    def _finish(self, leaves: LeafGradients) -> None:
        self._context.add_gradients(leaves)
        with self._lock:
            if self._state == FAILED:
                return
            self._state = FINISHED
        self._on_part_ended()

    def _on_part_ended(self) -> None:
        """Complete this part; the leader's waits for the other parts."""
        self._complete()

    # -- requests of this worker ------------------------------------------------------------------

    def _send_gradients(self, worker: int, gradients: Gradients, is_needed: bool = False) -> None:
        """Send gradients to another worker.

        Args:
            is_needed: the part there cannot have ended, as it replied NEEDS_GRADIENTS.
        """
        if worker == self._leader:
            with self._lock:
                self._requests_to_leader += 1
        self._request(worker, propagate, gradients, self._me, is_needed)

    def _request(self, worker: int, func: Callable[..., Any], *args: Any) -> None:
        """Call another worker; an error of the call ends the pass."""
        self._call(worker, func, (self._context.id, self.id, *args))

    def _call(self, worker: int, func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        call_without_context(self._agent, worker, func, args, None).add_done_callback(
            lambda reply: self._on_callback(worker, reply.value)
        )

    def _on_callback(self, worker: int, get_reply: Callable[[], Reply]) -> None:
        """Process a reply in the thread that has received it."""
        self._on_reply(worker, get_reply)

    def _on_reply(self, worker: int, get_reply: Callable[[], Reply]) -> None:
        try:
            gradients, status = get_reply()
        except BaseException as exc:
            if not self.fail(exc):
                self._report(exc)
            if not isinstance(exc, Exception):  # an interrupt
                raise
            return
        self._process_reply(worker, gradients, status)

    def _process_reply(self, worker: int, gradients: Gradients, status: int) -> None:
        if gradients:
            self.process_gradients(gradients)
        if worker == self._leader:
            with self._lock:
                self._requests_to_leader -= 1

    # -- requests of other workers ----------------------------------------------------------------

    def process_request(self, gradients: Gradients, source: int) -> Future[Reply]:
        """Process gradients that worker ``source`` has sent; return a Future of the reply."""
        back = self.process_gradients(gradients, source)
        with self._lock:
            becomes_due = source == self._leader and not self._report_due
            self._report_due |= becomes_due
        return self.report_end(back) if becomes_due else completed((back, PENDING))

    def report_end(self, back: Gradients) -> Future[Reply]:
        """Return a Future of the reply that reports the end, or NEEDS_GRADIENTS, to the leader.

        Args:
            back: gradients for the leader.
        """
        with self._lock:
            state = self._state
            if state == WAITING and not self._requests_to_leader and self._needs_only_leader():
                self._report_due = False
                result = completed((back, NEEDS_GRADIENTS))
                return result
        if state == DONE:
            return completed(({**self._last_gradients, **back}, ENDED))
        if back:
            self._send_gradients(self._leader, back)
        return self.future

    def _needs_only_leader(self) -> bool:
        receiver_of = self._context.messages.receiver_of
        return all(receiver_of(number) == self._leader for number in self._graph.missing())

    # -- the end ----------------------------------------------------------------------------------

    def _complete(self) -> None:
        if self._end(DONE):
            self.future.set_result((self._last_gradients, ENDED))

    def fail(self, error: BaseException) -> bool:
        """End the part with an error, unless it has ended.

        Returns:
            True if this call ended the part, and a reply reports the error to the leader.
        """
        if not self._end(FAILED):
            return False
        self._graph.abort()
        if not isinstance(error, RpcError):
            named = self._named(error)
            named.__cause__ = error
            error = named
        complete(self.future, Error(error))
        return self._report_due

    def _end(self, state: int) -> bool:
        """Enter DONE or FAILED; return False if the part had ended before."""
        with self._lock:
            if self._state in (DONE, FAILED):
                return False
            self._state = state
        self._context.passes.remove(self.id)
        self._contexts.count_pass(-1)
        return True

    def _report(self, error: BaseException) -> None:
        """Send an error to the leader by a call, as no reply reports it."""
        reported = error if isinstance(error, WorkerDiedError) else self._named(error)
        args = (self._context.id, self.id, reported)
        with contextlib.suppress(RpcError):  # RPC was shut down, or the leader has just left
            call_without_context(self._agent, self._leader, abort_part, args, None)

    def _named(self, error: BaseException) -> RpcError:
        return RpcError(f"Error on Node {self._me}: {error}")


def names_of(agent: Agent, workers: Iterable[int]) -> list[str]:
    """Return the names of workers, without those that have left."""
    members = map(agent.members.find, workers)
    return [member.name for member in members if member is not None]


@returns_future
def begin_part(
    context_id: int,
    pass_id: int,
    messages: dict[int, list[int]],
    retain: bool,
    leader: int,
    gradients: Gradients,
) -> Future[Reply]:
    """Begin this worker's part of a pass, for its leader.

    Args:
        context_id: the id of the pass's context.
        pass_id: names the pass in the context.
        messages: the numbers of the tensors that take part, by the id of this worker's message.
        retain: keep the graph for another pass.
        leader: id of the worker that leads the pass.
        gradients: the first gradients from the leader, if there are any.
    """
    context = serving_contexts().find_context(context_id)
    entries = {
        message_id: context.messages.entry(message_id, slots)
        for message_id, slots in messages.items()
    }
    part = Participant(context, pass_id, entries, retain, leader)
    return part.report_end(part.begin(gradients, leader))
