"""Contexts of distributed autograd on one worker, and how calls carry them.

A call made in a context takes along the context's id and that of its message; tensors that
require grad are joined to the graph there by a send and a receive function.  The callee has the
context from then on, until who opened it is done with it, or gone.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.futures import Future

from rayrpc._autograd.context import DistAutogradContext, Sent
from rayrpc._autograd.functions import Recorder, receive
from rayrpc._runtime import current
from rayrpc._runtime.hooks import Hook, IncomingCall, OutgoingCall
from rayrpc._runtime.invocation import Invocation
from rayrpc.errors import RpcError

if TYPE_CHECKING:
    from rayrpc._runtime.agent import Agent
    from rayrpc.errors import WorkerDiedError

__all__ = [
    "ContextFuture",
    "GradContexts",
    "call_outside",
    "contexts",
    "find_context",
    "start_outside",
]

ID_BITS = 48  # of a context's number; above these is the id of the worker that opened it
EPOCH_BITS = 40  # of the number for each worker that had this id
AUTOGRAD = "autograd"
# Calls that arrive after their context was released must not bring it back; so many are known.
MOST_OVER = 4096
# Who was called in a context hears of its end by the next call, or after one to two times this.
TELL_SECONDS = 0.02


class _Here(threading.local):
    context: DistAutogradContext | None = None


_here = _Here()


class _Inside:
    """Have a context, or none, as this thread's."""

    __slots__ = ("_context", "_outer")

    def __init__(self, context: DistAutogradContext | None) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._outer = _here.context
        _here.context = self._context

    def __exit__(self, *exc: object) -> None:
        _here.context = self._outer


class ContextFuture(Future):  # type: ignore[type-arg]
    """A Future whose callbacks run in the context that its call was made in."""

    def __init__(self, context: DistAutogradContext) -> None:
        super().__init__()
        self._context = context

    def then(self, callback: Any) -> Any:
        """Return a Future of what ``callback`` makes of this one."""
        result = ContextFuture(self._context)

        def run(done: Any) -> None:
            try:
                result.set_result(callback(done))
            except Exception as exc:
                result.set_exception(exc)

        self.add_done_callback(run)
        return result

    def add_done_callback(self, callback: Any) -> None:
        """Call ``callback`` with this Future once it is done."""
        context = self._context

        def run(done: Any) -> None:
            with _Inside(context):
                callback(done)

        super().add_done_callback(run)


class GradContexts(Hook):
    """The contexts of one worker."""

    name = AUTOGRAD

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._contexts: dict[int, DistAutogradContext] = {}
        self._over: dict[int, None] = {}  # the latest that were released
        self._to_tell: dict[int, list[int]] = {}  # contexts that are over, by worker
        self._tells = False  # a thread will tell
        self.passes = 0  # backward passes under way

    def attach(self, agent: Agent) -> None:
        self._agent = agent
        self._me = agent.info.id
        first = (self._me << ID_BITS) + ((agent.member.epoch << EPOCH_BITS) % (1 << ID_BITS))
        self._next_context = itertools.count(first).__next__
        self._next_message = itertools.count(first + 1).__next__

    def new_id(self) -> int:
        """Return a number for a message or a pass that no other has."""
        return self._next_message()

    # -- contexts -----------------------------------------------------------------------------

    def open(self) -> DistAutogradContext:
        """Open a context, and make it this thread's.

        Raises:
            RuntimeError: this thread has one.
        """
        if _here.context is not None:
            found = _here.context.id
            raise RpcError(f"Already have an autograd context id for this thread: {found}")
        context = DistAutogradContext(self._next_context())
        with self.lock:
            self._contexts[context.id] = context
        _here.context = context
        return context

    def here(self) -> DistAutogradContext:
        """Return this thread's context.

        Raises:
            RuntimeError: it has none.
        """
        if _here.context is None:
            raise RpcError(
                "Current thread doesn't have a valid autograd context. Please wrap your code "
                "using: `with torch.distributed.autograd.context() as context_id` to generate a "
                "valid context"
            )
        return _here.context

    def get(self, context_id: int) -> DistAutogradContext | None:
        """Return a context, if this worker has it."""
        return self._contexts.get(context_id)

    def release(self, context_id: int) -> None:
        """Let go of a context here, and at the workers that it came to from here.

        Raises:
            RuntimeError: there is none.
        """
        context = find_context(context_id)
        if _here.context is context:
            _here.context = None
        self._release(context, set())

    def _release(self, context: DistAutogradContext, but: set[int]) -> None:
        with self.lock:
            if self._contexts.pop(context.id, None) is None:
                return
            self._note_over(context.id)
        for each in list(context.passes.values()):
            each.fail(RpcError(f"autograd context {context.id} was released"))
        for worker in context.known - but - {self._me}:
            self._tell(worker, context.id)

    def _note_over(self, context_id: int) -> None:
        self._over[context_id] = None
        if len(self._over) > MOST_OVER:
            del self._over[next(iter(self._over))]

    def _tell(self, worker: int, context_id: int) -> None:
        """Have a worker told that a context is over: along with the next call to it, or soon."""
        with self.lock:
            self._to_tell.setdefault(worker, []).append(context_id)
            if self._tells:
                return
            self._tells = True
        self._agent.submit(self._tell_late)

    def _tell_late(self) -> None:
        """Tell who was not called for a while, until everybody is told."""
        seen: dict[int, list[int]] = {}
        while self._tells:
            time.sleep(TELL_SECONDS)
            with self.lock:
                # the same list as the last time: no call has taken it along
                due = [w for w, context_ids in self._to_tell.items() if seen.get(w) is context_ids]
                to_tell = [(worker, self._to_tell.pop(worker)) for worker in due]
                seen = self._to_tell.copy()
                self._tells = bool(seen)
            for worker, context_ids in to_tell:
                if self._agent.find(worker) is None:
                    continue
                args = context_ids, self._me
                with contextlib.suppress(RpcError):  # RPC was shut down, or it has just left
                    call_outside(worker, _released, args, self._agent.default_timeout)

    def _hear(self, context_ids: list[int], by: int) -> None:
        for context_id in context_ids:
            with self.lock:
                context = self._contexts.get(context_id)
                if context is None:  # its first call may be late
                    self._note_over(context_id)
            if context is not None:
                self._release(context, {by})

    def on_peer_lost(self, worker: int, error: WorkerDiedError) -> None:
        """End passes that need a worker, and let go of contexts that nobody else will end."""
        for context in list(self._contexts.values()):
            for run in list(context.passes.values()):
                run.on_peer_lost(worker, error)
            opener = context.id >> ID_BITS
            context.callers.discard(worker)
            if opener == worker or (opener != self._me and not context.callers):
                self._release(context, {worker})

    def debug_info(self) -> dict[str, str]:
        """Return torch's counters."""
        counts = {
            "num_current_backward_passes": self.passes,
            "num_autograd_contexts": len(self._contexts),
        }
        return {key: str(count) for key, count in counts.items()}

    def close(self) -> None:
        """Forget everything."""
        with self.lock:
            self._contexts.clear()
            self._to_tell.clear()

    # -- calls --------------------------------------------------------------------------------

    def wants(self) -> bool:
        return _here.context is not None

    def before_send(self, call: OutgoingCall) -> AbstractContextManager[Any]:
        builtin = torch.jit._builtins._find_builtin(call.invocation.func) is not None
        recorder = Recorder(self._next_message(), parameters=builtin)
        call.notes[AUTOGRAD] = self.here(), recorder
        return recorder

    def after_encode(self, call: OutgoingCall) -> None:
        context, recorder = call.notes[AUTOGRAD]
        context.note_sent(recorder, call.to.id)
        context.known.add(call.to.id)
        if self._contexts.get(context.id) is not context:  # it was released meanwhile
            self._tell(call.to.id, context.id)
        over: Sequence[int] = ()
        if call.to.id in self._to_tell:
            with self.lock:
                over = self._to_tell.pop(call.to.id, ())
        call.meta[AUTOGRAD] = context.id, recorder.message_id, over

    def make_future(self, call: OutgoingCall) -> Any:
        return ContextFuture(call.notes[AUTOGRAD][0])

    def before_run(self, call: IncomingCall) -> AbstractContextManager[Any]:
        context_id, message_id, over = call.meta[AUTOGRAD]
        if over:
            self._hear(over, call.src)
        with self.lock:
            context = self._contexts.get(context_id)
            if context is None:
                context = DistAutogradContext(context_id)
                if context_id not in self._over:  # else this call was late
                    self._contexts[context_id] = context
            context.callers.add(call.src)
        call.notes[AUTOGRAD] = [context, None]
        self._join(context, message_id, call.src)
        return _Inside(context)

    def on_undecodable(self, src: int, meta: Any) -> None:
        self._hear(meta[2], src)

    def before_resume(self, call: IncomingCall) -> AbstractContextManager[Any]:
        return _Inside(call.notes[AUTOGRAD][0])

    def before_reply(self, call: IncomingCall) -> AbstractContextManager[Any]:
        recorder = call.notes[AUTOGRAD][1] = Recorder(self._next_message(), parameters=False)
        return recorder

    def after_encode_reply(self, call: IncomingCall) -> None:
        context, recorder = call.notes[AUTOGRAD]
        if context.note_sent(recorder, call.src):
            leads: dict[Sent, list[Sent]] = {}
            with contextlib.suppress(RpcError):  # whoever asks is told
                leads = context.all_leads(self._me, recorder.message_id)
            call.reply_meta[AUTOGRAD] = recorder.message_id, leads

    def on_result(self, call: OutgoingCall, value: Any, meta: Any) -> Any:
        message_id, leads = meta
        context = call.notes[AUTOGRAD][0]
        self._join(context, message_id, call.to.id)
        context.leads.update(leads)
        return value

    def _join(self, context: DistAutogradContext, message_id: int, sender: int) -> None:
        node = receive(message_id)
        if node is not None:
            node.sender = sender
            context.receives[message_id] = node


def contexts() -> GradContexts:
    """Return the contexts of this process's worker.

    Raises:
        RuntimeError: RPC is not initialized.
    """
    for hook in current.get_agent().hooks:
        if isinstance(hook, GradContexts):
            return hook
    raise RpcError("this RPC agent was made without distributed autograd")


def find_context(context_id: int) -> DistAutogradContext:
    """Return a context by its id.

    Raises:
        RuntimeError: this worker has none with it.
    """
    context = contexts().get(context_id)
    if context is None:
        raise RpcError(f"Could not find autograd context with id: {context_id}")
    return context


def call_outside(worker: int, func: Any, args: Any, timeout: float | None) -> Any:
    """Call a worker outside of all contexts; return the Future."""
    agent = current.get_agent()
    with _Inside(None):
        return agent.caller.future(agent.lookup(worker), Invocation(func, args), timeout)


def start_outside(worker: int, func: Any, args: Any, timeout: float | None) -> Callable[..., Any]:
    """Call a worker outside of all contexts; return what waits for the result; see ``start``."""
    agent = current.get_agent()
    with _Inside(None):
        return agent.caller.start(agent.lookup(worker), Invocation(func, args), timeout)


def _released(context_ids: list[int], by: int) -> None:
    """Run where contexts came to, when they were released where they came from."""
    contexts()._hear(context_ids, by)
