"""A call at its callee: decode, run, encode."""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import monotonic, perf_counter
from types import CoroutineType
from typing import Any

from rayrpc._concurrency.latency_profile import SHORT_SECONDS, LatencyProfile
from rayrpc._concurrency.outcome import Error, Outcome, Value, attempt, without_frames
from rayrpc._concurrency.reader import release_reader
from rayrpc._concurrency.threads import Slots
from rayrpc._protocol.ids import EPOCH_BITS
from rayrpc._protocol.messages import EMPTY, Frame, Kind
from rayrpc._protocol.transport import Deferred, served
from rayrpc._runtime import running
from rayrpc._runtime.call_errors import cancelled
from rayrpc._runtime.cancelling import Cancelled, Cancelling, cancellable, interruptible
from rayrpc._runtime.coroutines import Coroutines, stepwise
from rayrpc._runtime.hooks import IncomingCall, all_of, hooks_in
from rayrpc._runtime.invocation import Invocation, user_function
from rayrpc._runtime.objects import receive
from rayrpc._runtime.reply_encoder import ReplyEncoder
from rayrpc._runtime.serialization.remote_errors import described_as
from rayrpc._runtime.served_call import ServedCall
from rayrpc._runtime.served_streams import ServedStreams, ValueRequest
from rayrpc._runtime.worker import Worker
from rayrpc.errors import CallError, CallTimeoutError
from rayrpc.futures import AnyFuture, value_of

__all__ = ["BeforeReply", "Callee"]

BeforeReply = Callable[[ServedCall, Outcome[Any]], object]


class Callee:
    """Serve the calls to one worker.

    Args:
        worker (Worker): the parts of that worker.
        slots (Slots): bounds how many users' functions run at a time.
        cancelling (Cancelling): cancels calls.
    """

    def __init__(self, worker: Worker, slots: Slots, cancelling: Cancelling) -> None:
        self._worker = worker
        self._cancelling = cancelling
        self._me = worker.info
        self._rrefs = worker.rrefs
        self._slots = slots
        self.replies = ReplyEncoder(worker)
        self._coroutines = Coroutines("rayrpc-loop")
        resumed = functools.partial(self._hooked, step="before_resume")
        self.streams = ServedStreams(
            worker, slots, self._coroutines, self._invoke, resumed, self._reply, _settle
        )
        self._quick = LatencyProfile()
        self._short = LatencyProfile(SHORT_SECONDS)
        self._lock = threading.Lock()
        self._calls: dict[ServedCall, None] = {}  # users' calls, until they are replied to
        self._fetches: dict[ServedCall, None] = {}  # those that wait for their values
        self._guests = worker.members.guests
        self.served = 0  # for members that are no guests
        #: answers INSPECT frames, given their data
        self.inspect: Callable[[bytes], bytes] = bytes
        #: make the contexts in which users' functions run
        self.around: list[Callable[[Invocation], AbstractContextManager[Any]]] = []
        self._before_reply: BeforeReply | None = None

    def before_reply(self, task: BeforeReply) -> None:
        """Have a task run when a user's function, or its Future, has ended, before the reply.

        Args:
            task: takes the call and its outcome.
        """
        first = self._before_reply
        if first is None:
            self._before_reply = task
        else:
            self._before_reply = lambda *ended: (first(*ended), task(*ended))

    def close(self) -> None:
        """End the async functions that run."""
        self._coroutines.close()

    @property
    def active(self) -> int:
        """The number of users' calls that are not replied to."""
        return len(self._calls)

    def under_way(self) -> list[ServedCall]:
        """Return users' calls, and fetches that wait for their values."""
        with self._lock:
            result = [*self._calls, *self._fetches]
        return result

    def active_for(self, is_member: Callable[[int], object]) -> int:
        """Return the number of calls under way whose callers wait for them.

        Args:
            is_member: tells whether the worker with an id is a member; others were lost.
        """
        with self._lock:
            result = sum(1 for call in self._calls if is_member(call.src))
        return result

    def serve(self, frame: Frame, may_block: bool = True) -> Frame | Deferred:
        """Answer a frame; see ``Serve``."""
        if frame.kind is Kind.INSPECT:
            data = self.inspect(frame.data)
            return Frame(Kind.VALUE, frame.session, self._me.id, frame.call_id, data=data)
        if frame.session != self._worker.session:
            error = CallError(
                f"RPC worker {self._me.name!r} got a call for an earlier run of its group: "
                "end the process that calls, or have it join again"
            )
            return self.replies.error(frame, error)
        if not self._worker.members.is_present(frame.src, frame.call_id >> EPOCH_BITS):
            return self.replies.refusal(frame)
        if frame.control or frame.ack:
            self._rrefs.on_control(frame.src, frame.ack, frame.control)
            if frame.control:
                self._rrefs.flush(but=frame.src)
        if frame.kind is Kind.CONTROL:
            return self.replies.frame(frame, Kind.VALUE, EMPTY)
        if frame.kind is Kind.FETCH:
            return self._fetch(frame)
        entry = ServedCall(frame.src, frame.call_id, frame.rref_id, self._worker.hooks)
        with self._lock:
            self._calls[entry] = None
            if frame.src not in self._guests:
                self.served += 1
        early = self._cancelling.early
        if early and (frame.src, frame.call_id) in early:
            entry.is_cancelled = True
        if frame.kind is Kind.REMOTE:
            assert frame.rref_id is not None and frame.fork_id is not None
            entry.cell = self._rrefs.own(frame.rref_id, frame.fork_id, frame.src)
        if frame.objects is not None and frame.objects.arguments:
            # it takes a slot once they have arrived: the call that makes them may need one
            deferred = Deferred()
            begin = functools.partial(self._run_later, frame, entry, deferred)
            receive(self._worker.objects, frame.objects, begin)
            return deferred
        if not frame.takes_slot:
            return self._run(frame, entry)
        if may_block and self._slots.enter():
            try:
                return self._run(frame, entry)
            finally:
                self._slots.leave()
        deferred = Deferred()
        self._run_later(frame, entry, deferred)
        return deferred

    def _run_later(
        self,
        frame: Frame,
        entry: ServedCall,
        deferred: Deferred,
        received: Outcome[list[Any]] | None = None,
    ) -> None:
        """Run a call in another thread; see ``_run``."""

        def run() -> None:
            if not deferred.hold(submit):
                _settle(deferred, frame, lambda: self._run(frame, entry, received))

        def submit() -> None:
            try:
                self._slots.submit(run)
            except RuntimeError as exc:  # no thread can be started
                outcome = Error(exc)
                self._on_undecodable(frame)
                _settle(deferred, frame, lambda: self._reply(frame, entry, outcome, None))

        submit()

    # -- one call -----------------------------------------------------------------------------

    def _run(
        self, frame: Frame, entry: ServedCall, received: Outcome[list[Any]] | None = None
    ) -> Frame | Deferred:
        """Run a call; ``received`` are the frame's objects, if some of them are arguments."""
        call: IncomingCall | None = None
        taken = monotonic() if frame.meta else 0.0
        try:
            if entry.is_cancelled:
                self._worker.codec.discard(frame.forks, set())
                raise asyncio.CancelledError
            invocation = self._decode(frame, received)
            frame.drop_payload()
            if frame.forks:
                self._confirm(frame)
            key = LatencyProfile.key(invocation.func, invocation.args)
            is_quick = self._quick.is_quick(key)
            if not is_quick:
                release_reader(briefly=self._short.is_quick(key))
            entry.func = key[1] if type(key) is tuple else invocation.func
            start = perf_counter()
            if frame.meta:
                call = IncomingCall(frame.src, invocation, frame.meta)
                call.arrived, call.taken = entry.since, taken
                with self._hooked(call, "before_run"):
                    value = self._invoke(entry, invocation, frame.is_async)
                call.invocation = None
            else:
                value = self._invoke(entry, invocation, frame.is_async)
            del invocation  # so that its arguments can be freed
            seconds = perf_counter() - start
            self._quick.record(key, seconds, self.active == 1)
            if not is_quick:
                self._short.record(key, seconds, self.active == 1)
        except BaseException as exc:
            if call is None:
                self._on_undecodable(frame)
            return self._reply(frame, entry, Error(exc), call)
        if type(value) is CoroutineType:
            return self._run_coroutine(frame, entry, value, call)
        if not frame.is_async:
            return self._reply(frame, entry, Value(value), call)
        return self._reply_when_done(frame, entry, value, call)

    def _decode(self, frame: Frame, received: Outcome[list[Any]] | None) -> Invocation:
        codec = self._worker.codec
        if frame.objects is None:
            return Invocation(*codec.decode(frame.data, frame.buffers, frame.forks))
        if isinstance(received, Error):
            codec.discard(frame.forks, set())
            received.unwrap()
        objects = frame.objects.refs if received is None else received.value
        return Invocation(*codec.decode(frame.data, frame.buffers, frame.forks, objects=objects))

    def _invoke(self, entry: ServedCall, invocation: Invocation, is_async: bool = False) -> Any:
        if not self.around:
            return interruptible(entry, running.run, invocation, is_async)
        with all_of([enter(invocation) for enter in list(self.around)]):
            return interruptible(entry, running.run, invocation, is_async)

    def _reply_when_done(
        self, frame: Frame, entry: ServedCall, value: Any, call: IncomingCall | None
    ) -> Frame | Deferred:
        """Reply with the value of a Future, when that is done."""
        if type(value) is ValueRequest:
            return self.streams.serve(frame, entry, value, call)
        if type(value) is Cancelled:
            self._cancelling.serve(frame.src, value.call_id, self.under_way)
            return self._reply(frame, entry, Value(None), call)
        if not isinstance(value, AnyFuture):
            error = RuntimeError(
                "Functions decorated with @rpc.async_function must return a "
                f"torch.futures.Future object, but got {type(value).__module__}."
                f"{type(value).__name__}"
            )
            return self._reply(frame, entry, Error(error), call)
        if value.done():
            return self._reply(frame, entry, attempt(lambda: value_of(value)), call)
        deferred = Deferred()

        def reply(done: Any) -> Frame:
            return self._reply(frame, entry, attempt(done.value), call)

        value.add_done_callback(lambda done: _settle(deferred, frame, lambda: reply(done)))
        return deferred

    def _run_coroutine(
        self, frame: Frame, entry: ServedCall, coroutine: Any, call: IncomingCall | None
    ) -> Deferred:
        """Reply when an async function returns (``async_execution``: when its Future is done)."""
        deferred = Deferred()

        def reply(outcome: Outcome[Any]) -> Frame | Deferred:
            if frame.is_async and isinstance(outcome, Value):
                return self._reply_when_done(frame, entry, outcome.value, call)
            return self._reply(frame, entry, outcome, call)

        if call is not None:
            coroutine = stepwise(coroutine, lambda: self._hooked(call, "before_resume"))
        coroutine = cancellable(entry, coroutine)
        self._coroutines.submit(
            coroutine, lambda outcome: _settle(deferred, frame, lambda: reply(outcome))
        )
        return deferred

    def _reply(
        self, frame: Frame, entry: ServedCall, outcome: Outcome[Any], call: IncomingCall | None
    ) -> Frame:
        try:
            if self._before_reply is not None:
                self._before_reply(entry, outcome)
            if entry.is_cancelled and isinstance(outcome, Error):
                outcome = self._cancelled(frame, entry)
            if entry.cell is not None:
                return self._keep(frame, entry, outcome, call)
            if isinstance(outcome, Error):
                return self.replies.error(frame, outcome.error, outcome.remote)
            return self.replies.value(frame, outcome.value, call)
        finally:
            with self._lock:
                self._calls.pop(entry, None)

    def _cancelled(self, frame: Frame, entry: ServedCall) -> Error:
        """Return the error of a call that was cancelled, which is not printed here."""
        error = cancelled(entry.func, self._me.name)
        return Error(error, described_as(f"On {self._me}:\n{error!r}\n", error, pickle.dumps))

    def _keep(
        self, frame: Frame, entry: ServedCall, outcome: Outcome[Any], call: IncomingCall | None
    ) -> Frame:
        """Fill the cell of a ``remote`` call; an error is raised where the RRef is used."""
        assert entry.cell is not None
        entry.cell.made = entry.func
        if isinstance(outcome, Error):
            # its frames would keep the function's arguments alive
            remote = outcome.remote or self.replies.describe(frame, outcome.error)
            name = "a function" if entry.func is None else user_function(entry.func)
            named = name and f"The call of {name} by remote on RPC worker {self._me.name!r}"
            outcome = Error(without_frames(outcome.error), remote, named)
        entry.cell.set(outcome)
        meta = None
        if call is not None:
            for hook in hooks_in(call.meta, self._worker.hooks):
                hook.after_kept(call)
            meta = call.reply_meta or None
        return self.replies.none(frame, meta)

    def _confirm(self, frame: Frame) -> None:
        """Wait until the RRefs among the arguments are confirmed, as torch does."""
        self._rrefs.flush(but=frame.src)
        timeout = self._worker.default_timeout
        if not self._rrefs.wait_confirmed(frame.forks, timeout):
            raise CallTimeoutError(
                f"RPC worker {self._me.name!r} waited {timeout} s for the owner of an RRef among "
                "the arguments to confirm it"
            )

    def _hooked(self, call: IncomingCall, step: str) -> AbstractContextManager[Any]:
        """Return one context for a step (``before_run``, ...) of the hooks that take part."""
        hooks = hooks_in(call.meta, self._worker.hooks)
        return all_of([getattr(hook, step)(call) for hook in hooks])

    def _on_undecodable(self, frame: Frame) -> None:
        meta = frame.meta or {}
        for hook in hooks_in(meta, self._worker.hooks):
            hook.on_undecodable(frame.src, meta[hook.name])

    # -- RRefs --------------------------------------------------------------------------------

    def _fetch(self, frame: Frame) -> Frame | Deferred:
        assert frame.rref_id is not None
        try:
            cell = self._rrefs.lookup(frame.rref_id)
        except CallError as exc:
            self._on_undecodable(frame)
            return self.replies.error(frame, exc)
        call = IncomingCall(frame.src, None, frame.meta) if frame.meta else None
        if call is not None:
            with self._hooked(call, "before_run"):
                pass  # it has no function to run
        if (outcome := cell.value) is not None:
            return self._fetched(frame, outcome, call)
        deferred = Deferred()
        entry = ServedCall(frame.src, frame.call_id, frame.rref_id)
        with self._lock:
            self._fetches[entry] = None

        def reply(outcome: Outcome[Any]) -> Frame:
            with self._lock:
                self._fetches.pop(entry, None)
            return self._fetched(frame, outcome, call)

        cell.on_done(lambda outcome: _settle(deferred, frame, lambda: reply(outcome)))
        return deferred

    def _fetched(self, frame: Frame, outcome: Outcome[Any], call: IncomingCall | None) -> Frame:
        if isinstance(outcome, Error):
            outcome.is_known = True
            return self.replies.error(frame, outcome.error, outcome.remote)
        return self.replies.value(frame, outcome.value, call)


def _settle(deferred: Deferred, frame: Frame, reply: Callable[[], Frame | Deferred]) -> None:
    """Set a late reply to ``frame``, to an ERROR frame if ``reply`` itself raises."""
    made = served(lambda *_: reply(), frame)
    if isinstance(made, Deferred):
        made.on_done(deferred.set)
    else:
        deferred.set(made)
