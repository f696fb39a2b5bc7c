"""The Ray transport: a call is an actor call on the peer's actor endpoint.

The ObjectRef of the actor call completes the call: in the waiting thread (``ray.get``) if there is
one, else by the ref's completion callback; no polling, no thread per call.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    RayError,
)

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.outcome import Error, Outcome, Value
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, size_of
from rayrpc._protocol.transport import Deferred, Pending, PendingReply, Serve, Transport, served
from rayrpc._transports.expected_replies import ExpectedReplies
from rayrpc._transports.ray import ray_api
from rayrpc._transports.ray.cluster import through_client
from rayrpc._transports.ray.endpoint import (
    ATTACH_SECONDS,
    DEFERRED,
    Address,
    Wire,
    from_wire,
    hosted_endpoint,
    to_wire,
)
from rayrpc._transports.ray.ray_errors import translate
from rayrpc._transports.ray.relay import RELAY_GROUPS, Relay
from rayrpc._transports.ray.relay_client import RelayClient
from rayrpc.errors import CallError, CallLostError, WorkerDiedError

__all__ = ["RayTransport"]

logger = logging.getLogger(__name__)

# How long a closing worker waits until its last replies are sent.
CLOSE_SECONDS = 1.0
# How often the endpoint of a worker that has just joined is looked for.
FIND_SECONDS = 0.02


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
            wire = ray_api.get(self._ref, timeout=timeout)
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
    """

    name = "ray"

    def __init__(self, worker: str, token: str, namespace: str) -> None:
        self._worker = worker
        self._token = token
        self._closed = False
        self._find: Callable[[int], Member | None] = lambda _: None
        self._serve: Serve | None = None
        self._replies = ExpectedReplies(lambda worker_id: self._find(worker_id))
        self._threads = ThreadCache("rayrpc-ray", soft_limit=32)
        self._handles: dict[str, Any] = {}  # of peers' endpoints, by token
        self._searches: dict[str, list[tuple[Frame, PendingReply]]] = {}  # what waits for handles
        self._lock = threading.Lock()
        self._sent_bytes = 0
        self._plain = through_client()
        endpoint = hosted_endpoint()
        self._hosted = endpoint and endpoint.reserve()
        self._relay: RelayClient | None = None  # once an attached worker has started
        name = _relay_name(worker, token) if self._hosted is None else self._hosted.name
        self._address = Address(name, namespace)

    def _start_relay(self) -> Any:
        options: dict[str, Any] = {}
        if not self._plain:
            # on this process's node, so that the relay dies with it
            options["scheduling_strategy"] = ray_api.on_this_node(soft=False)
        remote: Any = ray.remote
        # `ps` shows the name of the class
        shown = type(f"{self._worker} (relay)", (Relay,), {})
        relay = remote(num_cpus=0, max_restarts=-1, concurrency_groups=RELAY_GROUPS)(shown)
        name, namespace = self._address
        return relay.options(name=name, namespace=namespace, **options).remote(
            self._worker, self._plain
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

    @property
    def is_hosted(self) -> bool:
        return self._hosted is not None

    def start(
        self, serve: Serve, find: Callable[[int], Member | None], secret: bytes = b""
    ) -> None:
        self._threads.start()
        self._serve = serve
        self._find = find
        if self._hosted is not None:
            self._hosted.attach(self)
        else:
            # only now: its process costs nearly a second of CPU, which joining workers need
            self._relay = RelayClient(
                self._start_relay(),
                self._to_wire,
                self._threads,
                self.on_reply,
                self.send_reply,
                self._on_relay_restarted,
            )
            self._relay.start(serve)

    def _on_relay_restarted(self) -> None:
        self._replies.fail(
            CallLostError(
                f"The relay of RPC worker {self._worker!r} died, and the reply to a call with it: "
                "whether the function ran is not known. Call again if it may run twice."
            )
        )

    def call(self, peer: Member, frame: Frame) -> Pending:
        frame.begin_to_send()
        if peer.token in self._handles:
            return self._send(peer, frame)
        frame.keep_buffers()  # it is sent later
        frame.pending = found = PendingReply()
        with self._lock:
            waiting = self._searches.get(peer.token)
            if waiting is None:
                waiting = self._searches[peer.token] = []
                self._threads.submit(lambda: self._search(peer))
            waiting.append((frame, found))
        return found

    def _search(self, peer: Member) -> None:
        """Find a peer's endpoint, which takes minutes where Ray cannot be reached; then call it."""
        outcome: Error | None = None
        try:
            self._handle(peer)
        except Exception as exc:
            outcome = Error(_translated(peer, exc))
        while True:
            with self._lock:
                waiting = self._searches[peer.token]
                if not waiting:
                    del self._searches[peer.token]
                    return
                frame, found = waiting.pop(0)
            if outcome is not None:
                found.complete(outcome)
            else:
                found.follow(self._send(peer, frame))

    def _send(self, peer: Member, frame: Frame) -> Pending:
        try:
            ref = ray_api.submit(self._handle(peer).handle, self._to_wire(frame))
        except Exception as exc:
            frame.pending = failed = PendingReply()
            failed.complete(Error(_translated(peer, exc)))
            return failed
        frame.pending = pending = _RayPending(self, peer, frame.call_id, ref)
        return pending

    def _handle(self, peer: Member) -> Any:
        """Return the handle of a peer's endpoint; wait for a relay that is just starting."""
        handle = self._handles.get(peer.token)
        if handle is not None:
            return handle
        deadline = Deadline(ATTACH_SECONDS)
        while True:
            try:
                handle = self._handles[peer.token] = peer.address.find()
                return handle
            except ValueError:
                now = self._find(peer.id)
                is_member = now is not None and now.token == peer.token
                if not is_member or deadline.expired or self._closed:
                    raise WorkerDiedError(peer.name, "it has ended", peer.node) from None
                time.sleep(FIND_SECONDS)

    def on_peer_lost(self, peer: Member, error: BaseException) -> None:
        self._handles.pop(peer.token, None)
        self._replies.fail(error, token=peer.token)

    def kill(self, peer: Member) -> None:
        if peer.address.actor != _relay_name(peer.name, peer.token):
            ray.kill(self._handle(peer))

    def sent_bytes(self) -> dict[str, int]:
        return {"ray": self._sent_bytes}

    def _to_wire(self, frame: Frame, plain: bool | None = None) -> Wire:
        """Return the form of a frame that Ray sends; count its bytes.

        Args:
            frame: to send.
            plain: the receiver uses Ray Client; None: not known.
        """
        wire = to_wire(frame, self._plain if plain is None else plain)
        head = wire if isinstance(wire, bytes) else wire[0]
        count = len(head) + size_of(frame)
        with self._lock:
            self._sent_bytes += count
        return wire

    def flush_replies(self, timeout: float) -> None:
        if self._hosted is not None:
            self._hosted.flush_replies(timeout)
        elif self._relay is not None and ray.is_initialized():
            self._relay.flush_replies(timeout)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._replies.fail(CallError("RPC was shut down on this worker"))
        if self._hosted is not None:
            self._hosted.detach()
            self._hosted.watch.release(self._token)
        elif self._relay is not None and ray.is_initialized():
            self._relay.close(self._token, CLOSE_SECONDS)
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
                ray_api.submit(handle.deliver, request.call_id, self._to_wire(reply))

    def _send_later(self, request: Frame, reply: Frame) -> None:
        """Send a late reply, in another thread than the one that sets it, which may be Ray's."""
        reply.keep_buffers()
        self._threads.submit(lambda: self.send_reply(request, reply))

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
            reply.on_done(functools.partial(self._send_later, frame))
            return DEFERRED
        return self._to_wire(reply, plain=isinstance(wire, tuple))


def _relay_name(worker: str, token: str) -> str:
    return f"{worker}#{token}"


def _translated(peer: Member, error: Exception) -> Exception:
    return translate(peer, error) if isinstance(error, RayError) else error
