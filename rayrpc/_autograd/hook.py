"""Contexts of distributed autograd on one worker, and how calls carry them.

A call made in a context carries the ids of the context and of its message; tensors that require
grad connect the graphs of both workers by a send and a receive function.  The callee then has the
context, too, until the worker that opened it releases it or leaves.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from rayrpc._autograd.context import DistAutogradContext
from rayrpc._autograd.context_messages import TensorKey
from rayrpc._autograd.current_context import (
    ContextFuture,
    UseContext,
    call_without_context,
    thread,
)
from rayrpc._autograd.functions import Recorder, Refusal, attach_received
from rayrpc._protocol.ids import EPOCH_BITS
from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent
from rayrpc._runtime.current_call import current_call
from rayrpc._runtime.hooks import Hook, IncomingCall, OutgoingCall
from rayrpc.errors import RpcError, WorkerDiedError

__all__ = ["GradContexts", "contexts_of", "first_number", "serving_contexts"]

# The low bits of a context's id are its number, the high ones the id of the worker that opened it.
ID_BITS = 48
AUTOGRAD = "autograd"
# Number of released contexts whose ids are kept: a call that arrives late must not open them again.
MAX_RELEASED = 4096
# A release is sent with the next call to the worker, or by a call of its own after one to two times
# this.
NOTIFY_SECONDS = 0.02


class GradContexts(Hook):
    """Hold the contexts of one worker in its group; other groups' calls take no part in them.

    A thread is in one context at most, whatever the context's group.

    Args:
        agent (Agent): the worker's agent in the group.
        first (int): number of the first context; for a group other than the default one, what
            ``first_number`` returns.
    """

    name = AUTOGRAD
    of_thread = True

    def __init__(self, agent: Agent, first: int = 0) -> None:
        self.agent = agent
        self._me = agent.info.id
        number = (agent.member.epoch << EPOCH_BITS) + first
        first = (self._me << ID_BITS) + number % (1 << ID_BITS)
        self._next_context = itertools.count(first).__next__
        self._next_message = itertools.count(first + 1).__next__
        self._lock = threading.Lock()
        self._contexts: dict[int, DistAutogradContext] = {}
        self._released: dict[int, None] = {}  # the ids of the latest, in order
        self._to_notify: dict[int, list[int]] = {}  # released contexts, by worker
        self._notifies = False  # a thread runs ``_notify_late``
        self._passes = 0  # backward passes under way

    def new_id(self) -> int:
        """Return a new, unique id for a message or a pass."""
        return self._next_message()

    # -- contexts -----------------------------------------------------------------------------

    def new(self, holder: object = None) -> DistAutogradContext:
        """Return a new context, for ``open``.

        Args:
            holder: the object that releases it; see ``DistAutogradContext``.
        """
        return DistAutogradContext(self._next_context(), self, holder)

    def open(self, context: DistAutogradContext) -> None:
        """Open a context, and make it this thread's.

        Raises:
            RuntimeError: this thread is in a context already.
        """
        found = thread.context
        if found is not None:
            if not found.is_abandoned:
                raise RpcError(f"Already have an autograd context id for this thread: {found.id}")
            found.home.end(found)
        with self._lock:
            self._contexts[context.id] = context
        thread.context = context

    def current(self) -> DistAutogradContext:
        """Return this thread's context.

        Raises:
            RuntimeError: this thread is in no context.
        """
        if thread.context is None:
            raise RpcError(
                "Current thread doesn't have a valid autograd context. Please wrap your code "
                "using: `with torch.distributed.autograd.context() as context_id` to generate a "
                "valid context"
            )
        return thread.context

    def get(self, context_id: int) -> DistAutogradContext | None:
        """Return a context, if this worker has it."""
        return self._contexts.get(context_id)

    def find_context(self, context_id: int) -> DistAutogradContext:
        """Return a context.

        Raises:
            RuntimeError: this worker has none with this id.
        """
        context = self._contexts.get(context_id)
        if context is None:
            raise RpcError(f"Could not find autograd context with id: {context_id}")
        return context

    def release(self, context_id: int) -> None:
        """Release a context here, and at the workers that were called in it from here.

        Raises:
            RuntimeError: this worker has none with this id.
        """
        self.end(self.find_context(context_id))

    def end(self, context: DistAutogradContext) -> None:
        """Release a context; may be called again after an interrupt, at whatever point it came."""
        if thread.context is context:
            thread.context = None
        self._release(context, set(), again=True)

    def receive_released(self, context_ids: list[int], by: int) -> None:
        """Release contexts that a caller of this worker, ``by``, has released."""
        for context_id in context_ids:
            with self._lock:
                context = self._contexts.get(context_id)
                if context is None:  # the first call in it may be late
                    self._remember_released(context_id)
            if context is not None:
                self._release(context, {by})

    def _release(
        self, context: DistAutogradContext, informed: set[int], again: bool = False
    ) -> None:
        with self._lock:
            is_first = self._contexts.pop(context.id, None) is not None
            self._remember_released(context.id)
        if not (is_first or again):
            return
        for part in context.passes.under_way():
            part.fail(RpcError(f"autograd context {context.id} was released"))
        for worker in context.callees() - informed - {self._me}:
            self._notify(worker, context.id)

    def _remember_released(self, context_id: int) -> None:
        self._released[context_id] = None
        if len(self._released) > MAX_RELEASED:
            del self._released[next(iter(self._released))]

    def _notify(self, worker: int, context_id: int) -> None:
        """Notify a worker of a release: by the next call to it, or by ``_notify_late``."""
        with self._lock:
            self._to_notify.setdefault(worker, []).append(context_id)
            is_due = not self._notifies
        if is_due:
            self.agent.submit(self._notify_late)

    def _notify_late(self) -> None:
        """Notify workers that were not called for a while, until all are notified."""
        with self._lock:
            if self._notifies:
                return
            self._notifies = True
        seen: dict[int, list[int]] = {}
        goes_on = True
        while goes_on:
            time.sleep(NOTIFY_SECONDS)
            with self._lock:
                # the list is the same as the last time: no call has carried it
                due = [w for w, ids in self._to_notify.items() if seen.get(w) is ids]
                notices = [(worker, self._to_notify.pop(worker)) for worker in due]
                seen = self._to_notify.copy()
                goes_on = self._notifies = bool(seen)
            for worker, context_ids in notices:
                agent = self.agent
                if agent.members.find(worker) is None:
                    continue
                args = context_ids, self._me
                with contextlib.suppress(RpcError):  # RPC was shut down, or the worker just left
                    call_without_context(agent, worker, _released, args, agent.default_timeout)

    def on_peer_lost(self, worker: int, error: WorkerDiedError) -> None:
        """End passes that need the lost worker; release contexts that no other will release."""
        for context in list(self._contexts.values()):
            for part in context.passes.under_way():
                part.on_peer_lost(worker, error)
            opener = context.id >> ID_BITS
            has_callers = context.remove_caller(worker)
            if opener == worker or (opener != self._me and not has_callers):
                self._release(context, {worker})

    def count_pass(self, change: int) -> None:
        """Add to the number of passes under way."""
        with self._lock:
            self._passes += change

    def debug_info(self) -> dict[str, str]:
        """Return torch's counters."""
        counts = {
            "num_current_backward_passes": self._passes,
            "num_autograd_contexts": len(self._contexts),
        }
        return {key: str(count) for key, count in counts.items()}

    def close(self) -> None:
        """Drop all contexts."""
        with self._lock:
            self._contexts.clear()
            self._to_notify.clear()

    # -- calls --------------------------------------------------------------------------------

    def wants(self) -> bool:
        return thread.context is not None

    def before_send(self, call: OutgoingCall) -> AbstractContextManager[Any]:
        context = self.current()
        if context.home is not self:
            return Refusal(context.home.agent.key, self.agent.key)
        builtin = torch.jit._builtins._find_builtin(call.invocation.func) is not None
        recorder = Recorder(self._next_message(), parameters=builtin)
        call.notes[AUTOGRAD] = context, recorder
        return recorder

    def after_encode(self, call: OutgoingCall) -> None:
        if AUTOGRAD not in call.notes:
            return
        context, recorder = call.notes[AUTOGRAD]
        context.messages.add_sent(recorder, call.to.id)
        context.add_callee(call.to.id)
        if self._contexts.get(context.id) is not context:  # it was released meanwhile
            self._notify(call.to.id, context.id)
        released: Sequence[int] = ()
        if call.to.id in self._to_notify:
            with self._lock:
                released = self._to_notify.pop(call.to.id, ())
        call.meta[AUTOGRAD] = context.id, recorder.message_id, released

    def make_future(self, call: OutgoingCall) -> Any:
        return ContextFuture(call.notes[AUTOGRAD][0]) if AUTOGRAD in call.notes else None

    def before_run(self, call: IncomingCall) -> AbstractContextManager[Any]:
        context_id, message_id, released = call.meta[AUTOGRAD]
        if released:
            self.receive_released(released, call.src)
        with self._lock:
            context = self._contexts.get(context_id)
            if context is None:
                context = DistAutogradContext(context_id, self)
                if context_id not in self._released:  # else this call was late
                    self._contexts[context_id] = context
            context.add_caller(call.src)
        call.notes[AUTOGRAD] = [context, None]
        self._attach_message(context, message_id, call.src)
        return UseContext(context)

    def on_undecodable(self, src: int, meta: Any) -> None:
        self.receive_released(meta[2], src)

    def before_resume(self, call: IncomingCall) -> AbstractContextManager[Any]:
        return UseContext(call.notes[AUTOGRAD][0])

    def before_reply(self, call: IncomingCall) -> AbstractContextManager[Any]:
        recorder = call.notes[AUTOGRAD][1] = Recorder(self._next_message(), parameters=False)
        return recorder

    def after_encode_reply(self, call: IncomingCall) -> None:
        context, recorder = call.notes[AUTOGRAD]
        if context.messages.add_sent(recorder, call.src):
            dependencies: dict[TensorKey, list[TensorKey]] = {}
            with contextlib.suppress(RpcError):  # raised again in the pass that explores it
                dependencies = context.messages.all_dependencies(self._me, recorder.message_id)
            call.reply_meta[AUTOGRAD] = recorder.message_id, dependencies

    def on_result(self, call: OutgoingCall, value: Any, meta: Any) -> Any:
        message_id, dependencies = meta
        context = call.notes[AUTOGRAD][0]
        self._attach_message(context, message_id, call.to.id)
        context.messages.add_dependencies(dependencies)
        return value

    def _attach_message(self, context: DistAutogradContext, message_id: int, sender: int) -> None:
        node = attach_received(message_id)
        if node is not None:
            context.messages.add_received(message_id, node, sender)


def first_number(group: str) -> int:
    """Return the number of a group's first context, far from the numbers of other groups."""
    return zlib.crc32(group.encode()) << (EPOCH_BITS - 32)


def contexts_of(agent: Agent | None = None) -> GradContexts:
    """Return the contexts of a worker of this process.

    Args:
        agent: the worker's agent; default: the agent in the default group.

    Raises:
        RuntimeError: RPC is not initialized.
    """
    return _contexts_among((agent or current.get_agent()).hooks)


def serving_contexts() -> GradContexts:
    """Return the contexts of the worker that serves the call for which this thread runs."""
    call = current_call.get()
    return contexts_of() if call is None else _contexts_among(call.hooks)


def _contexts_among(hooks: Sequence[Hook]) -> GradContexts:
    for hook in hooks:
        if isinstance(hook, GradContexts):
            return hook
    raise RpcError("this RPC agent was made without distributed autograd")


def _released(context_ids: list[int], by: int) -> None:
    """Release contexts at this worker, as the caller, ``by``, has released them."""
    serving_contexts().receive_released(context_ids, by)
