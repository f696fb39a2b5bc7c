"""The Ray transport: a call is an actor call on the peer's actor endpoint.

The ObjectRef of the actor call completes the call: in the waiting thread (``ray.get``) if there is
one, else by the ref's completion callback; no polling, no thread per call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from rayrpc._concurrency.outcome import Error, Outcome, Value
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame
from rayrpc._protocol.transport import Deferred, Pending, PendingReply, Serve, Transport, served
from rayrpc._transports.expected_replies import ExpectedReplies
from rayrpc._transports.ray.cluster import through_client
from rayrpc._transports.ray.endpoint import (
    DEFERRED,
    Address,
    Wire,
    from_wire,
    hosted_endpoint,
    to_wire,
)
from rayrpc._transports.ray.relay import RELAY_GROUPS, Relay
from rayrpc.errors import CallError, CallLostError, WorkerDiedError

__all__ = ["RayTransport", "cause_of"]

logger = logging.getLogger(__name__)

# How long a closing worker waits until its last replies are sent.
CLOSE_SECONDS = 1.0


def cause_of(error: BaseException) -> str:
    """Return Ray's reason for the death of an actor, in one line."""
    text = " ".join(_plain(error).split())
    if "owner has died" in text:
        return "its process died, or exited without shutdown()"
    if "ray.kill" in text:
        return "it was ended by ray.kill or by the process that started it"
    if "node has died" in text or "node was dead" in text:
        return "its node died"
    detail = re.search(r"exit detail: (.*?\.)(?: |$)", text)
    if detail:
        return f"its process died: {detail.group(1)}"
    found = re.search(r"because (.*)", text)
    return (found.group(1) if found else text)[:300].strip()


def _plain(error: BaseException) -> str:
    return re.sub(r"\x1b\[\d+m", "", str(error))


def translate(peer: Member, error: BaseException) -> CallError:
    """Return the rayrpc error for an error of Ray on a call to ``peer``."""
    if isinstance(error, RayTaskError):
        return CallError(f"RPC worker {peer.name!r} could not handle a call: {_plain(error)}")
    if isinstance(error, ActorUnavailableError):
        return CallLostError(
            f"The connection to RPC worker {peer.name!r} on node {peer.node} was cut during a "
            f"call: whether the function ran is not known ({cause_of(error)}). Call again if it "
            "may run twice."
        )
    if isinstance(error, RayActorError):
        return WorkerDiedError(peer.name, cause_of(error), peer.node)
    return CallLostError(f"The reply of RPC worker {peer.name!r} was lost: {cause_of(error)}")


class _RayPending(Pending):
    __slots__ = ("_call_id", "_peer", "_ref", "_reply", "_transport")

    def __init__(self, transport: RayTransport, peer: Member, call_id: int, ref: Any) -> None:
        self._transport = transport
        self._peer = peer
        self._call_id = call_id
        self._ref = ref
        self._reply: Pending | None = None  # once the callee has deferred it

    def _deferred(self) -> Pending:
        if self._reply is None:
            self._reply = self._transport.expect_reply(self._call_id, self._peer)
        return self._reply

    def wait(self, timeout: float | None) -> Frame:
        if self._reply is not None:
            return self._reply.wait(timeout)
        start = time.monotonic()
        try:
            wire = ray.get(self._ref, timeout=timeout)
        except GetTimeoutError:
            raise TimeoutError from None
        except RayError as exc:
            raise translate(self._peer, exc) from exc
        if wire is not DEFERRED:
            return from_wire(wire)
        if timeout is not None:
            timeout = max(0.0, timeout - (time.monotonic() - start))
        return self._deferred().wait(timeout)

    def on_done(self, callback: Callable[[Outcome[Frame]], None], urgent: bool = True) -> None:
        # runs in Ray's own thread, where any call into Ray would deadlock
        def completed(result: Any) -> None:
            if isinstance(result, BaseException):  # Ray Client has others than Ray's own
                callback(Error(translate(self._peer, result)))
            elif result is DEFERRED:
                self._deferred().on_done(callback)
            else:
                callback(Value(from_wire(result)))

        self._ref._on_completed(completed)


class RayTransport(Transport):
    """Call peers by their actor endpoints; serve calls that arrive at this process's own.

    Args:
        worker (str): name of this worker.
        token (str): of its membership.
        namespace (str): Ray namespace of the endpoints' names.
        joined (Callable): returns an ObjectRef; the relay, if one is needed, starts when it is
            ready, and calls to the relay wait until then.
    """

    name = "ray"

    def __init__(
        self, worker: str, token: str, namespace: str, joined: Callable[[], Any] = lambda: None
    ) -> None:
        self._token = token
        self._closed = False
        self._find: Callable[[int], Member | None] = lambda _: None
        self._serve: Serve | None = None
        self._replies = ExpectedReplies(lambda worker_id: self._find(worker_id))
        self._lock = threading.Lock()
        self._threads = ThreadCache("rayrpc-ray", soft_limit=32)
        self._polling = 0
        self._has_polled = False  # the relay has returned at least one frame
        self._results: deque[tuple[int, Wire]] = deque()  # on their way to the relay
        self._is_giving = False
        self._handles: dict[str, Any] = {}  # of peers' endpoints, by token
        self._plain = through_client()
        endpoint = hosted_endpoint()
        self._hosted = endpoint and endpoint.reserve()
        if self._hosted is not None:
            self._address = Address(self._hosted.name, namespace)
        else:
            self._address = Address(f"{worker}#{token}", namespace)
            self._relay = self._start_relay(worker, joined())

    def _start_relay(self, worker: str, joined: Any) -> Any:
        options: dict[str, Any] = {}
        if not self._plain:
            # on this process's node, so that the relay dies with it
            options["scheduling_strategy"] = (
                ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    ray.get_runtime_context().get_node_id(), soft=False
                )
            )
        remote: Any = ray.remote
        relay = remote(num_cpus=0, concurrency_groups=RELAY_GROUPS)(Relay)
        name, namespace = self._address
        return relay.options(name=name, namespace=namespace, **options).remote(
            worker, joined, self._plain
        )

    @property
    def address(self) -> Address:
        return self._address

    @property
    def node(self) -> str:
        return str(ray.util.get_node_ip_address())

    @property
    def node_id(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def start(
        self, serve: Serve, find: Callable[[int], Member | None], secret: bytes = b""
    ) -> None:
        self._serve = serve
        self._find = find
        if self._hosted is not None:
            self._hosted.attach(self)
        else:
            self._start_poller()

    def call(self, peer: Member, frame: Frame) -> Pending:
        try:
            ref = self._handle(peer).handle.remote(to_wire(frame, self._plain))
        except (RayError, WorkerDiedError) as exc:
            error = exc if isinstance(exc, WorkerDiedError) else translate(peer, exc)
            pending = PendingReply()
            pending.complete(Error(error))
            return pending
        return _RayPending(self, peer, frame.call_id, ref)

    def _handle(self, peer: Member) -> Any:
        """Return the handle of a peer's endpoint."""
        handle = self._handles.get(peer.token)
        if handle is None:
            try:
                handle = self._handles[peer.token] = peer.address.find()
            except ValueError:
                raise WorkerDiedError(peer.name, "it has ended", peer.node) from None
        return handle

    def on_peer_lost(self, peer: Member, error: BaseException) -> None:
        self._handles.pop(peer.token, None)
        self._replies.fail(error, token=peer.token)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._replies.fail(CallError("RPC was shut down on this worker"))
        if self._hosted is not None:
            self._hosted.detach()
            self._hosted.watch.release(self._token)
        elif ray.is_initialized():
            if self._has_polled:  # else no peer waits for a reply; the relay may not run yet
                with contextlib.suppress(RayError):
                    ray.get(self._relay.close.remote(self._token, CLOSE_SECONDS))
            ray.kill(self._relay)
        self._threads.close()

    # -- replies apart from their calls --------------------------------------------------------

    def expect_reply(self, call_id: int, peer: Member) -> Pending:
        return self._replies.expect(call_id, peer)

    def on_reply(self, call_id: int, wire: Wire) -> None:
        """Take a reply that a peer sent by ``send_reply``."""
        self._replies.on_reply(call_id, from_wire(wire))

    def send_reply(self, request: Frame, reply: Frame) -> None:
        caller = self._find(request.src)
        if caller is not None and not self._closed:
            with contextlib.suppress(WorkerDiedError):
                handle = self._handle(caller)
                handle.deliver.remote(request.call_id, to_wire(reply, self._plain))

    # -- serving ------------------------------------------------------------------------------

    def answer(self, wire: Wire, may_block: bool) -> Wire:
        """Serve a peer's request; return its reply, or DEFERRED.

        Args:
            wire: the request.
            may_block: this thread may be kept for as long as the user's function runs.
        """
        assert self._serve is not None
        frame = from_wire(wire)
        reply = served(self._serve, frame, may_block)
        if isinstance(reply, Deferred):
            # in another thread than the one that completes it, which may be Ray's
            reply.on_done(lambda late: self._threads.submit(lambda: self.send_reply(frame, late)))
            return DEFERRED
        return to_wire(reply, plain=isinstance(wire, tuple))

    def _start_poller(self) -> None:
        self._polling += 1
        self._threads.submit(self._poll)

    def _poll(self) -> None:
        """Take frames from the relay and serve them, until two other threads do."""
        results: list[tuple[int, Wire]] = []
        while not self._closed:
            try:
                items = ray.get(self._relay.exchange.remote(results))
            except RayActorError:
                if not self._closed:
                    logger.error("the relay of this worker is gone: no peer can reach it")
                return
            except SystemExit:  # what Ray raises in its users' threads
                if not self._closed:
                    logger.error("Ray was shut down under RPC: call rpc.shutdown() before")
                return
            except Exception:
                if not self._closed:
                    raise
                return
            self._has_polled = True
            with self._lock:
                self._polling -= 1
                alone = self._polling == 0
            if alone and not self._closed:
                self._start_poller()
            results = []
            last = len(items) - 1
            for position, (kind, number, wire) in enumerate(items):
                if kind == "reply":
                    self.on_reply(number, wire)
                elif position < last:
                    self._threads.submit(functools.partial(self._take, number, wire, None))
                else:
                    self._take(number, wire, results)
            with self._lock:
                enough = self._polling >= 2
                if not enough:
                    self._polling += 1
                    results += self._results
                    self._results.clear()
            if enough:
                for result in results:
                    self._give(*result)
                return

    def _take(self, number: int | None, wire: Wire, results: list[tuple[int, Wire]] | None) -> None:
        """Serve a frame; append its reply to ``results`` for the next exchange, or send it."""
        assert self._serve is not None
        frame = from_wire(wire)
        reply = served(self._serve, frame)
        if isinstance(reply, Deferred):
            reply.on_done(
                lambda late: self._threads.submit(lambda: self._reply(frame, number, late))
            )
        elif number is not None and results is not None:
            results.append((number, to_wire(reply, self._plain)))
        else:
            self._reply(frame, number, reply)

    def _reply(self, frame: Frame, number: int | None, reply: Frame) -> None:
        if number is None:
            self.send_reply(frame, reply)
        else:
            self._give(number, to_wire(reply, self._plain))

    def _give(self, number: int, wire: Wire) -> None:
        """Send a result to the relay, together with those that are added meanwhile."""
        with self._lock:
            self._results.append((number, wire))
            if self._is_giving:
                return
            self._is_giving = True
        self._threads.submit(self._give_all)

    def _give_all(self) -> None:
        while True:
            with self._lock:
                results = list(self._results)
                self._results.clear()
                if not results or self._closed:
                    self._is_giving = False
                    return
            with contextlib.suppress(RayError):  # the relay has ended, and the calls with it
                ray.get(self._relay.give.remote(results))
