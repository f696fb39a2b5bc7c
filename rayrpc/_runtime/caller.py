"""A call at its caller: encode, send, wait or be called back, decode."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from rayrpc._concurrency.deadlines import DeadlineThread
from rayrpc._concurrency.outcome import Error, Outcome, Value, complete
from rayrpc._concurrency.reader import release_reader
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.ids import GloballyUniqueId, WorkerInfo
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import Pending
from rayrpc._runtime.call_errors import cancelled, shut_down, timed_out
from rayrpc._runtime.current_call import is_interrupt
from rayrpc._runtime.hooks import Hook, OutgoingCall, all_of, meta_of
from rayrpc._runtime.interrupting_calls import InterruptingCalls, guarded
from rayrpc._runtime.invocation import NOTHING, Invocation
from rayrpc._runtime.open_call import OpenCall, Request, Send
from rayrpc._runtime.reply_decoder import ReplyDecoder
from rayrpc._runtime.request_encoder import RequestEncoder
from rayrpc._runtime.rrefs.creation_site import users_line
from rayrpc._runtime.rrefs.handle_protocol import Handle
from rayrpc._runtime.started_call import StartedCall
from rayrpc._runtime.waiting_call import await_reply
from rayrpc._runtime.worker import Worker
from rayrpc.errors import CancelledError, WorkerDiedError

__all__ = ["Caller"]


class Caller:
    """Make the calls of one worker.

    Args:
        worker (Worker): the parts of that worker.
        threads (ThreadCache): the threads that complete calls.
        send (Send): sends frames.
        on_interrupted_send (Callable): called if an interrupt may have come during ``send``, or
            just after it.
    """

    def __init__(
        self,
        worker: Worker,
        threads: ThreadCache,
        send: Send,
        on_interrupted_send: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._me = worker.info
        self._rrefs = worker.rrefs
        self._hooks = worker.hooks
        self.threads = threads
        self.interrupting = InterruptingCalls(threads.submit)
        self._send = send
        self._on_interrupted_send = on_interrupted_send
        self._requests = RequestEncoder(worker)
        self._replies = ReplyDecoder(worker, threads.submit)
        self.new_id = self._requests.new_id
        #: runs a task that may run users' code
        self.run_callback = self._replies.run_callback
        self._open: dict[int, OpenCall] = {}
        self._deadlines = DeadlineThread(self._open, self._expire)
        self._waiting: dict[int, Request] = {}  # calls that a thread waits for
        self._lock = threading.Lock()
        self._closed = False
        #: called with a call whose wait was interrupted
        self.on_interrupted_wait: Callable[[Request], object] = id
        #: streams that are iterated; shutdown ends them
        self.streams: weakref.WeakSet[Any] = weakref.WeakSet()
        self.sent = 0

    @property
    def active(self) -> int:
        """The number of users' calls that have not completed."""
        return len(self._open) + len(self._waiting) + len(self.interrupting)

    def under_way(self) -> tuple[list[Request], list[OpenCall]]:
        """Return the calls that threads wait for, and those that complete by callback."""
        return list(self._waiting.values()), list(self._open.values())

    def _is_closed(self) -> bool:
        return self._closed

    def start_threads(self) -> None:
        """Start the threads that calls may need."""
        self.threads.start()
        self._deadlines.start()

    # -- the ways to call ---------------------------------------------------------------------

    @guarded(InterruptingCalls.make_and_drop)
    def sync(self, to: Member, invocation: Invocation, timeout: float | None) -> Any:
        """Run a function on a worker and return its value; ``timeout`` is in seconds."""
        __tracebackhide__ = True
        hooks = self._hooks_for("sync")
        if any(hook.needs_future for hook in hooks):
            future = self.future(to, invocation, timeout, "sync")
            release_reader()
            return future.wait()
        return self._post_and_wait(*self._request(to, invocation, timeout, hooks))

    @guarded(InterruptingCalls.make_and_drop)
    def start(self, to: Member, invocation: Invocation, timeout: float | None) -> StartedCall:
        """Run a function on a worker; return the call, to be waited for or abandoned."""
        hooks = self._hooks_for("sync")
        if any(hook.needs_future for hook in hooks):
            future = self.future(to, invocation, timeout, "sync")
            release_reader()
            return StartedCall(lambda unwanted: future.wait(), lambda: None)
        request, frame = self._request(to, invocation, timeout, hooks)
        try:
            of_call = request, self._post(request, frame)
            wait = functools.partial(self._wait, *of_call)
            return StartedCall(wait, functools.partial(self._abandon, *of_call))
        except BaseException:  # an interrupt
            self._abandon(request, frame.pending)
            raise

    def _request(
        self, to: Member, invocation: Invocation, timeout: float | None, hooks: list[Hook]
    ) -> tuple[Request, Frame]:
        """Return the request and the frame of a call that a thread waits for."""
        if not hooks:
            payload = self._requests.encode(to, invocation)
            frame = self._requests.frame(Kind.CALL, to, payload, None, invocation.func)
            return Request(to, frame.call_id, timeout, payload.lent, func=invocation.func), frame
        call = self._outgoing("sync", to, invocation)
        with all_of([hook.before_send(call) for hook in hooks]):
            payload = self._requests.encode(to, call.invocation)
            meta = meta_of(call, hooks, payload)
            frame = self._requests.frame(Kind.CALL, to, payload, meta, call.invocation.func)
        return Request(to, frame.call_id, timeout, payload.lent, call, func=invocation.func), frame

    @guarded(InterruptingCalls.make)
    def future(
        self, to: Member, invocation: Invocation, timeout: float | None, mode: str = "async"
    ) -> Any:
        """Run a function on a worker and return a Future of its value."""
        hooks = self._hooks_for(mode)
        if not hooks:
            future: Any = Future()
            payload = self._requests.encode(to, invocation)
            frame = self._requests.frame(Kind.CALL, to, payload, None, invocation.func)
            request = Request(to, frame.call_id, timeout, payload.lent, func=invocation.func)
            self._start(OpenCall(self, request, functools.partial(complete, future)), frame)
            return future
        call = self._outgoing(mode, to, invocation)
        with all_of([hook.before_send(call) for hook in hooks]):
            payload = self._requests.encode(to, call.invocation)
            meta = meta_of(call, hooks, payload)
            frame = self._requests.frame(Kind.CALL, to, payload, meta, call.invocation.func)
            special = [made for hook in hooks if (made := hook.make_future(call)) is not None]
            future = special[0] if special else Future()
            request = Request(to, frame.call_id, timeout, payload.lent, call, func=invocation.func)
            opened = OpenCall(self, request, functools.partial(complete, future))
            self._start(opened, frame)
            for hook in hooks:
                future = hook.after_send(call, future)
            opened.returned = future
        return future

    @guarded(InterruptingCalls.refuse)
    def remote(self, to: Member, invocation: Invocation, timeout: float | None) -> Handle:
        """Run a function on a worker, which keeps the value; return the RRef."""
        call = self._outgoing("remote", to, invocation)
        func, hooks = invocation.func, self._hooks_for("remote")
        with all_of([hook.before_send(call) for hook in hooks]):
            # encode first: an argument that cannot be sent must not leave an RRef behind
            payload = self._requests.encode(to, call.invocation)
            rref_id, fork_id = self._rrefs.new_id(), self._rrefs.new_id()
            try:
                rref = self._rrefs.announce(rref_id, fork_id, to.id, users_line())
                meta = meta_of(call, hooks, payload)
                of_rref = rref_id, fork_id
                frame = self._requests.frame(Kind.REMOTE, to, payload, meta, func, *of_rref)
                creation = rref._begin_creation()
                for hook in hooks:
                    rref._set_future(hook.after_send(call, rref._get_future()))
                request = Request(to, frame.call_id, timeout, payload.lent, call, True, func)
                # a late reply counts too: the owner has the RRef from then on
                on_created = functools.partial(self._rrefs.created, rref_id, fork_id)
                self._start(OpenCall(self, request, creation.set, on_created), frame)
            except BaseException:  # an interrupt: no handle is left, so the owner is to delete it
                self._rrefs.cancel(rref_id, fork_id)
                raise
        return rref

    @guarded(InterruptingCalls.refuse)
    def fetch(
        self, to: Member, rref_id: GloballyUniqueId, handle: object, timeout: float | None
    ) -> Any:
        """Return a copy of the value of an RRef that a worker owns.

        Args:
            to: the owner.
            rref_id: of the RRef.
            handle: of its fork here; kept until the reply arrives, even if no thread waits: else
                the owner might have deleted the RRef.
            timeout: in seconds; None: none.
        """
        __tracebackhide__ = True
        hooks = self._hooks_for("fetch")
        call = meta = None
        if hooks:
            call = self._outgoing("fetch", to, NOTHING)
            with all_of([hook.before_send(call) for hook in hooks]):
                meta = meta_of(call, hooks)
        frame = self._requests.frame(Kind.FETCH, to, meta=meta, rref_id=rref_id)
        request = Request(to, frame.call_id, timeout, (handle,), call, keeps_type=True)
        return self._post_and_wait(request, frame)

    def send_control(self, to: Member) -> None:
        """Send the pending messages of the RRef protocol for a worker."""
        frame = self._requests.frame(Kind.CONTROL, to)

        def on_ack(outcome: Outcome[Frame]) -> None:
            if isinstance(outcome, Value):
                self._replies.on_control_reply(to, outcome.value)
            elif not isinstance(outcome.error, WorkerDiedError):
                self._rrefs.on_send_failed(to.id)

        self._send(to, frame).on_done(on_ack, urgent=False)

    def on_peer_lost(self, peer: Member, error: BaseException) -> None:
        """Fail the calls to a worker that left or died, but for those whose reply has arrived."""
        for call_id, call in list(self._open.items()):
            if call.request.to.token == peer.token and not call.has_outcome:
                self._fail(call_id, error)

    def close(self) -> None:
        """Fail all calls."""
        self._closed = True
        self._deadlines.close()
        self.interrupting.close()
        for call_id in list(self._open):
            self._fail(call_id, shut_down())

    # -- requests -----------------------------------------------------------------------------

    def _hooks_for(self, mode: str) -> list[Hook]:
        """Return the hooks that take part in a call which this thread makes now."""
        return [hook for hook in self._hooks if hook.wants() and mode in hook.modes]

    def _outgoing(self, mode: str, to: Member, invocation: Invocation) -> OutgoingCall:
        return OutgoingCall(mode, WorkerInfo(to.name, to.id), self._me, invocation)

    # -- calls that a thread waits for --------------------------------------------------------

    def _post_and_wait(self, request: Request, frame: Frame) -> Any:
        __tracebackhide__ = True
        try:
            return self._wait(request, self._post(request, frame))
        except BaseException:  # an interrupt may come between the two
            self._abandon(request, frame.pending)
            raise

    def _post(self, request: Request, frame: Frame) -> Pending:
        """Send a call that a thread waits for; ``_wait`` or ``_abandon`` follows."""
        release_reader()
        frame.is_stable = True  # the caller waits
        try:
            self._waiting[request.id] = request
            with self._lock:
                self.sent += 1
            return self._send(request.to, frame)
        except BaseException:
            self._waiting.pop(request.id, None)
            self._orphan(request, frame, functools.partial(self._replies.release, request))
            raise

    def _orphan(
        self, request: Request, frame: Frame, on_late: Callable[[Outcome[Frame]], None]
    ) -> None:
        """Release the reply, if one arrives, to a call whose sending was interrupted."""
        request.lent = ()  # a request that was not sent would hold them for ever
        if frame.pending is not None:
            frame.pending.on_orphaned(on_late)
        self._on_interrupted_send()

    def _wait(
        self, request: Request, pending: Pending, unwanted: Callable[[], bool] | None = None
    ) -> Any:
        """Return the value of a call; see ``StartedCall``."""
        __tracebackhide__ = True
        taken: set[int] = set()
        request.thread = threading.get_ident()
        try:
            try:
                death_of = self._worker.members.death_of
                reply = await_reply(request, pending, death_of, self._is_closed, unwanted)
            except BaseException as exc:  # the reply may still arrive
                self._abandon(request, pending)
                if isinstance(exc, TimeoutError):
                    raise timed_out(request.timeout) from None
                if not isinstance(exc, Exception):
                    self.on_interrupted_wait(request)
                raise
            try:
                return self._replies.decode(request, reply, taken)
            except BaseException:  # an interrupt may come before its RRefs are decoded
                self._worker.codec.discard(reply.forks, taken)
                raise
        finally:
            self._waiting.pop(request.id, None)

    def _abandon(self, request: Request, pending: Pending) -> None:
        """Stop waiting for a call, and release what its reply brings."""
        if self._waiting.pop(request.id, self) is not self:
            pending.on_done(functools.partial(self._replies.release, request))

    # -- calls that complete by callback ------------------------------------------------------

    def _start(self, call: OpenCall, frame: Frame) -> None:
        request = call.request
        try:
            self._open[request.id] = call
            with self._lock:
                self.sent += 1
            if request.timeout is not None:
                self._deadlines.add(request.id, request.timeout)
            pending = self._send(request.to, frame)
            pending.on_done(call.on_reply, urgent=call.on_created is None)
            if self._closed:  # ``close`` may have run before this call was registered
                self._fail(request.id, shut_down())
        except BaseException:  # an interrupt: the program gets no Future of this call
            self._open.pop(request.id, None)
            call.end(by_reply=False)
            self._orphan(request, frame, call.on_reply)
            raise

    def _expire(self, call_id: int, timeout: float) -> None:
        self._fail(call_id, timed_out(timeout))

    def cancel(self, call: OpenCall) -> bool:
        """End a call with a ``CancelledError``, unless it has ended; return True if it had not."""
        request = call.request
        return self._fail(request.id, cancelled(request.func, request.to.name))

    def _fail(self, call_id: int, error: BaseException) -> bool:
        """End a call with an error; return False if it has ended in another way."""
        call = self._open.pop(call_id, None)
        if call is None or not call.end(by_reply=False):
            return False
        is_known = self._closed or isinstance(error, CancelledError)
        outcome = Error(error) if is_known else call.failed(error)
        self.threads.submit(lambda: call.done(outcome))
        return True

    def finish(self, call: OpenCall, outcome: Outcome[Frame]) -> None:
        """Complete a call with the outcome of its transport."""
        me = object()
        try:
            call.finishers.append(me)
            if call.finishers[0] is not me:  # an interrupted ``on_reply`` was called again
                return
            if call.on_created is not None:
                call.on_created()
            request = call.request
            if call.has_failed:
                self._replies.release(request, outcome)
                return
            result: Outcome[Any]
            if isinstance(outcome, Error):
                result = call.failed(outcome.error)
            else:
                try:
                    result = Value(self._replies.decode(request, outcome.value))
                except BaseException as exc:
                    if call.is_cheap(outcome) and is_interrupt(exc):
                        raise  # it interrupts this thread, not the call
                    result = call.failed(exc)
            if call.end(by_reply=True):
                # only now: a call is active until its callbacks may run
                self._open.pop(request.id, None)
                call.done(result)
        except BaseException:  # an interrupt: ``on_reply`` is called again
            if call.finishers[:1] == [me]:
                call.finishers.clear()
            raise
