"""The way of a call at its caller: encode, send, wait or be called back, decode."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch.futures import Future

from rayrpc._concurrency.deadlines import Deadlines
from rayrpc._concurrency.outcome import Error, Outcome, Value, complete
from rayrpc._concurrency.reader import is_reader, release_reader
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.ids import GloballyUniqueId, WorkerInfo
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import EMPTY, Frame, Kind, Payload
from rayrpc._protocol.transport import Pending
from rayrpc._runtime.hooks import Hook, OutgoingCall, all_of
from rayrpc._runtime.invocation import Invocation
from rayrpc._runtime.rrefs.cell import Cell
from rayrpc._runtime.rrefs.context import RRefContext
from rayrpc._runtime.serialization.codec import Codec
from rayrpc._runtime.serialization.devices import DeviceRoutes, refuse
from rayrpc._runtime.serialization.remote_errors import rebuild
from rayrpc._runtime.serialization.tensors import NoDeviceError
from rayrpc.errors import CallError, CallTimeoutError, SerializationError, WorkerDiedError

__all__ = ["Caller", "Way"]

#: a fetch runs nothing
NOTHING = Invocation(lambda: None)

# How often a blocking call looks whether its own worker was shut down meanwhile.
LOOK_SECONDS = 0.5

Done = Callable[[Outcome[Any]], None]


class Way(Protocol):
    """How the caller's frames reach a peer; the agent's, which knows oneself from others."""

    def __call__(self, peer: Member, frame: Frame) -> Pending:
        """Send a frame and expect its reply."""


@dataclass(slots=True, eq=False)
class _Open:
    """A call that completes by callback."""

    caller: Caller
    id: int
    peer: Member
    lent: tuple[Any, ...]  # the transport keeps them by keeping ``reply``
    done: Done
    call: OutgoingCall | None
    arrived: Callable[[], None] | None

    def reply(self, outcome: Outcome[Frame]) -> None:
        """Take the outcome from a thread of the transport."""
        # the answer to ``remote`` says little, and no code of users waits for it
        if is_reader() or (self.arrived is not None and not _concerns_users(outcome)):
            self.caller._finish(self, outcome)
        else:
            self.caller._threads.submit(lambda: self.caller._finish(self, outcome))


def _timed_out(timeout: float | None) -> CallTimeoutError:
    if timeout is None:
        return CallTimeoutError("the caller of this RPC stopped waiting for its reply")
    # torch's text; programs look for it
    return CallTimeoutError(
        f"RPC ran for more than set timeout ({round(timeout * 1000)} ms) and will now be marked "
        "with an error"
    )


def _shut_down() -> CallError:
    return CallError("RPC was shut down on this worker before the call completed")


class Caller:
    """Make the calls of one worker.

    Args:
        me (WorkerInfo): this worker.
        session (int): of its group.
        main (str): identity of this process's ``__main__``.
        codec, devices, rrefs, threads: of this worker.
        way (Way): sends frames.
        hooks (list[Hook]): the agent's list.
    """

    def __init__(
        self,
        me: WorkerInfo,
        session: int,
        main: str,
        codec: Codec,
        devices: DeviceRoutes,
        rrefs: RRefContext,
        threads: ThreadCache,
        way: Way,
        hooks: list[Hook],
    ) -> None:
        self._me = me
        self._session = session
        self._main = main
        self._codec = codec
        self._devices = devices
        self._rrefs = rrefs
        self._threads = threads
        self._way = way
        self._hooks = hooks
        self._call_ids = itertools.count(1).__next__
        self._open: dict[int, _Open] = {}
        self._deadlines = Deadlines(self._open, self._expire)
        self._waits: dict[int, None] = {}  # calls that a thread waits for
        self._lock = threading.Lock()
        self._closed = False
        self.sent = 0

    @property
    def active(self) -> int:
        """The number of calls of users that have not completed."""
        return len(self._open) + len(self._waits)

    # -- the three ways to call ---------------------------------------------------------------

    def sync(self, to: Member, invocation: Invocation, timeout: float | None) -> Any:
        """Run a function on a worker and return its value; ``timeout`` in seconds."""
        return self.start(to, invocation, timeout)()

    def start(
        self, to: Member, invocation: Invocation, timeout: float | None
    ) -> Callable[..., Any]:
        """Run a function on a worker; return what waits for its value, to be called once.

        That may be given a function, which is asked twice a second whether to wait no longer.
        """
        hooks = self._wanted()
        if not hooks:
            is_async, payload = self._encode(to, invocation)
            frame = self._frame(Kind.CALL, to, payload, None, is_async)
            return self._post(to, frame, timeout, payload.lent)
        if any(hook.needs_future for hook in hooks):
            future = self.future(to, invocation, timeout, "sync")
            return lambda unwanted=None: future.wait()
        call = self._outgoing("sync", to, invocation)
        with self._sending(call, hooks):
            is_async, payload = self._encode(to, call.invocation)
            frame = self._frame(Kind.CALL, to, payload, self._encoded(call, hooks), is_async)
        return self._post(to, frame, timeout, payload.lent, call)

    def future(
        self, to: Member, invocation: Invocation, timeout: float | None, mode: str = "async"
    ) -> Any:
        """Run a function on a worker and return a Future of its value."""
        hooks = self._wanted()
        if not hooks:
            future: Any = Future()
            done = functools.partial(complete, future)
            is_async, payload = self._encode(to, invocation)
            frame = self._frame(Kind.CALL, to, payload, None, is_async)
            self._start(to, frame, timeout, payload.lent, done)
            return future
        call = self._outgoing(mode, to, invocation)
        with self._sending(call, hooks):
            is_async, payload = self._encode(to, call.invocation)
            frame = self._frame(Kind.CALL, to, payload, self._encoded(call, hooks), is_async)
            special = [made for hook in hooks if (made := hook.make_future(call)) is not None]
            future = special[0] if special else Future()
            done = functools.partial(complete, future)
            self._start(to, frame, timeout, payload.lent, done, call)
            for hook in hooks:
                future = hook.after_send(call, future)
        return future

    def remote(self, to: Member, invocation: Invocation, timeout: float | None) -> Any:
        """Run a function on a worker, which keeps the value; return the RRef."""
        call = self._outgoing("remote", to, invocation)
        hooks = self._wanted()
        with self._sending(call, hooks):
            # encode first: an argument that cannot be sent must not leave an RRef behind
            is_async, payload = self._encode(to, call.invocation)
            rref_id, fork_id, rref = self._rrefs.announce(to.id)
            frame = self._frame(Kind.REMOTE, to, payload, self._encoded(call, hooks), is_async)
            frame.rref_id, frame.fork_id = rref_id, fork_id
            creation = rref._creation = Cell()
            for hook in hooks:
                rref._future = hook.after_send(call, rref._get_future())
            # whether the answer is in time or late: the owner has the RRef from then on
            arrived = functools.partial(self._rrefs.created, rref_id, fork_id)
            self._start(to, frame, timeout, payload.lent, creation.set, call, arrived)
        return rref

    def fetch(self, to: Member, rref_id: GloballyUniqueId, timeout: float | None) -> Any:
        """Return a copy of the value of an RRef that a worker owns."""
        hooks = self._wanted()
        call = self._outgoing("fetch", to, NOTHING) if hooks else None
        meta = None
        if call is not None:
            with self._sending(call, hooks):
                meta = self._encoded(call, hooks)
        frame = self._frame(Kind.FETCH, to, EMPTY, meta, False)
        frame.rref_id = rref_id
        return self._post(to, frame, timeout, call=call)()

    def control(self, to: Member) -> None:
        """Send the messages of the RRef protocol that wait for a worker."""
        frame = self._frame(Kind.CONTROL, to, EMPTY, None, False)

        def heard(outcome: Outcome[Frame]) -> None:
            if isinstance(outcome, Value):
                self._hear_soon(to, outcome.value)
            elif not isinstance(outcome.error, WorkerDiedError):
                self._rrefs.on_send_failed(to.id)

        self._way(to, frame).on_done(heard, urgent=False)

    def on_peer_lost(self, peer: Member, error: BaseException) -> None:
        """End the calls to a worker that left or died."""
        for call_id, call in list(self._open.items()):
            if call.peer.token == peer.token:
                self._fail(call_id, error)

    def close(self) -> None:
        """End all calls."""
        self._closed = True
        self._deadlines.close()
        for call_id in list(self._open):
            self._fail(call_id, _shut_down())

    # -- frames -------------------------------------------------------------------------------

    def _wanted(self) -> list[Hook]:
        return [hook for hook in self._hooks if hook.wants()] if self._hooks else []

    def _sending(self, call: OutgoingCall, hooks: list[Hook]) -> AbstractContextManager[Any]:
        return all_of([hook.before_send(call) for hook in hooks])

    def _encoded(self, call: OutgoingCall, hooks: list[Hook]) -> dict[str, Any] | None:
        for hook in hooks:
            hook.after_encode(call)
        return call.meta or None

    def _outgoing(self, mode: str, to: Member, invocation: Invocation) -> OutgoingCall:
        return OutgoingCall(mode, WorkerInfo(to.name, to.id), self._me, invocation)

    def _encode(self, to: Member, invocation: Invocation) -> tuple[bool, Payload]:
        func = invocation.func
        is_async = hasattr(func, "_wrapped_async_rpc_function")
        try:
            devices = self._devices.of_calls(to.name)
            payload = self._codec.encode(
                tuple(invocation), to.id, to.main == self._main, devices, lends=True
            )
        except NoDeviceError as exc:
            raise refuse(exc.device, "Request", to.name) from None
        except SerializationError as exc:
            name = getattr(func, "__qualname__", repr(func))
            raise SerializationError(
                f"The call of {name} on RPC worker {to.name!r} {exc}"
            ) from exc.__cause__
        return is_async, payload

    def _frame(
        self,
        kind: Kind,
        to: Member,
        payload: Payload,
        meta: dict[str, Any] | None,
        is_async: bool,
    ) -> Frame:
        ack, control = self._rrefs.take_pending(to.id)
        data, buffers, forks, _ = payload
        number = self._call_ids()
        session, me = self._session, self._me.id
        rest = meta, ack, control, forks, data, buffers
        return Frame(kind, session, me, number, None, None, is_async, *rest)

    # -- replies ------------------------------------------------------------------------------

    def _post(
        self,
        to: Member,
        frame: Frame,
        timeout: float | None,
        lent: tuple[Any, ...] = (),
        call: OutgoingCall | None = None,
    ) -> Callable[..., Any]:
        """Send a call; return what waits for its value; see ``start``."""
        release_reader()
        self._waits[frame.call_id] = None
        with self._lock:
            self.sent += 1
        try:
            pending = self._way(to, frame)
        except BaseException:
            del self._waits[frame.call_id]
            raise
        return functools.partial(self._wait, to, frame.call_id, pending, timeout, lent, call)

    def _wait(
        self,
        to: Member,
        number: int,
        pending: Pending,
        timeout: float | None,
        lent: tuple[Any, ...],
        call: OutgoingCall | None,
        unwanted: Callable[[], bool] | None = None,
    ) -> Any:
        try:
            try:
                reply = self._await(pending, timeout, unwanted)
            except TimeoutError:
                pending.on_done(functools.partial(self._too_late, to, lent))
                raise _timed_out(timeout) from None
            return self._open_reply(to, reply, call)
        finally:
            del self._waits[number]

    def _await(
        self, pending: Pending, timeout: float | None, unwanted: Callable[[], bool] | None
    ) -> Frame:
        end = math.inf if timeout is None else time.monotonic() + timeout
        left = LOOK_SECONDS if timeout is None else timeout
        while True:
            try:
                return pending.wait(left if left < LOOK_SECONDS else LOOK_SECONDS)
            except TimeoutError:
                if self._closed:  # by another thread; nothing else would end this one
                    raise _shut_down() from None
                left = end - time.monotonic()
                if left <= 0 or (unwanted is not None and unwanted()):
                    raise

    def _start(
        self,
        to: Member,
        frame: Frame,
        timeout: float | None,
        lent: tuple[Any, ...],
        done: Done,
        call: OutgoingCall | None = None,
        arrived: Callable[[], None] | None = None,
    ) -> None:
        """Send a call that completes by callback.

        Args:
            to, frame, timeout: whom to ask what for how long.
            lent: the payload's.
            done: takes the outcome, once.
            call: what the hooks know it by.
            arrived: it is a ``remote``: called when the callee has answered, in time or late.
        """
        number = frame.call_id
        open_call = self._open[number] = _Open(self, number, to, lent, done, call, arrived)
        with self._lock:
            self.sent += 1
        if timeout is not None:
            self._deadlines.add(number, timeout)
        self._way(to, frame).on_done(open_call.reply, urgent=arrived is None)

    def _expire(self, call_id: int, timeout: float) -> None:
        call = self._open.pop(call_id, None)
        if call is not None:
            self._threads.submit(lambda: call.done(Error(_timed_out(timeout))))

    def _finish(self, call: _Open, outcome: Outcome[Frame]) -> None:
        if call.arrived is not None:
            call.arrived()
        if call.id not in self._open:
            self._too_late(call.peer, (), outcome)
            return
        result: Outcome[Any] = outcome
        if isinstance(outcome, Value):
            try:
                result = Value(self._open_reply(call.peer, outcome.value, call.call))
            except BaseException as exc:
                result = Error(exc)
        # only now: a call is active until its callbacks may run
        if self._open.pop(call.id, None) is not None:
            call.done(result)

    def _fail(self, call_id: int, error: BaseException) -> None:
        call = self._open.pop(call_id, None)
        if call is not None:
            self._threads.submit(lambda: call.done(Error(error)))

    def _too_late(self, to: Member, lent: tuple[Any, ...], outcome: Outcome[Frame]) -> None:
        """Take the reply of a call that was given up: it may bring RRefs, and ends the loan."""
        if isinstance(outcome, Value):
            reply = outcome.value

            def run() -> None:
                for fork in reply.forks:
                    self._rrefs.discard(fork)
                self._hear(to, reply)

            self._threads.submit(run)

    def soon(self, task: Callable[[], None]) -> None:
        """Run a task that may call users' code, here if this thread may be kept."""
        if is_reader():
            task()
        else:
            self._threads.submit(task)

    def _hear_soon(self, to: Member, reply: Frame) -> None:
        if reply.control:
            self.soon(lambda: self._hear(to, reply))
        else:
            self._rrefs.on_control(to.id, reply.ack, ())

    def _hear(self, to: Member, reply: Frame) -> None:
        self._rrefs.on_control(to.id, reply.ack, reply.control)
        self._rrefs.flush()

    def _open_reply(self, to: Member, reply: Frame, call: OutgoingCall | None = None) -> Any:
        if reply.control or reply.ack:
            self._rrefs.on_control(to.id, reply.ack, reply.control)
        if reply.kind is Kind.VALUE:
            value = self._codec.decode(reply.data, reply.buffers, reply.forks)
            if reply.forks:
                self._rrefs.flush()
            if reply.meta and call is not None:
                for hook in self._hooks:
                    if hook.name in reply.meta:
                        value = hook.on_result(call, value, reply.meta[hook.name])
            return value
        raise rebuild(*pickle.loads(reply.data))


def _concerns_users(outcome: Outcome[Frame]) -> bool:
    """Tell whether taking a reply may run code of users."""
    if isinstance(outcome, Error):
        return False
    reply = outcome.value
    return reply.kind is not Kind.VALUE or bool(reply.control)
