"""Ray's object store: values and errors there, ObjectRefs that complete later, and values of refs.

An object is a pickle with buffers, made by the runtime, which unpickles it wherever it is read:

    put                    the object is there at once
    promise, complete      a ``PendingObjects`` actor keeps the readers waiting until it is there

Torch is never imported here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import itertools
import pickle
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from rayrpc._concurrency.outcome import Error, Outcome, Value, text_of
from rayrpc._concurrency.threads import ThreadCache
from rayrpc._protocol.messages import PLAIN_TYPES, Payload, flat
from rayrpc._transports.ray import ray_api
from rayrpc._transports.ray.cluster import through_client
from rayrpc._transports.ray.raylet_watch import end_with_raylet
from rayrpc.errors import ArgumentTypeError, CallError, RpcError

__all__ = ["Codec", "RayObjects"]

# Readers of objects that are not there yet; each is an idle coroutine of the actor. A concurrency
# group of this size would be as many threads in old Rays.
MOST_WAITING = 100_000

# Values of at most so many bytes are sent, not their references, if they are at hand: a connection
# is faster than the store, but the value is in memory twice meanwhile.
AT_HAND_BYTES = 256 << 20
# How long it may take to read what is there.
AT_HAND_SECONDS = 1.0
_LOCATE = "get_local_object_locations"


class Codec(NamedTuple):
    """How objects are pickled.

    Args:
        encode (Callable): pickles a value or an error.
        module, name (str): of the function that unpickles it, given the pickle, its buffers and its
            ObjectRefs, and returns the value, or raises the error.
    """

    encode: Callable[[Outcome[Any]], Payload]
    module: str
    name: str


class _Stored:
    """A pickled object; where Ray unpickles it, it becomes the value, or Ray's form of its error.

    Args:
        parts (list): names of the module and function that unpickle it, the pickle, its ObjectRefs
            in a list, and its buffers.
    """

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return _unpickle, (*self.parts[:4], *map(pickle.PickleBuffer, self.parts[4:]))


def _unpickle(module: str, name: str, data: bytes, refs: list[Any], *buffers: Any) -> Any:
    load = getattr(importlib.import_module(module), name)
    try:
        return load(data, buffers, refs)
    except Exception as exc:
        # `ray.get` raises such a value, as an error of the type of its cause
        return RayTaskError("rayrpc", text_of(exc), exc)


class PendingObjects:
    """Keep the readers of objects waiting that are not there yet.

    Args:
        worker (str): name of the worker that will complete them.
    """

    def __init__(self, worker: str) -> None:
        end_with_raylet()
        self._worker = worker
        self._objects: dict[int, asyncio.Future[list[Any]]] = {}

    def __repr__(self) -> str:
        return f"rayrpc.PendingObjects({self._worker})"

    async def wait(self, number: int) -> _Stored:
        """Return an object once it is there."""
        parts = await self._object(number)
        del self._objects[number]
        return _Stored(parts)

    async def complete(self, number: int, parts: list[Any]) -> None:
        """Take an object; its reader may come later."""
        self._object(number).set_result(parts)

    def _object(self, number: int) -> asyncio.Future[list[Any]]:
        if number not in self._objects:
            self._objects[number] = asyncio.get_running_loop().create_future()
        return self._objects[number]


class RayObjects:
    """Ray's object store, for one worker; an ``ObjectStore``.

    Args:
        worker (str): name of the worker.
        codec (Codec): pickles objects.

    Attributes:
        type (type): of references to objects.
    """

    def __init__(self, worker: str, codec: Codec) -> None:
        self._worker = worker
        self._codec = codec
        self._threads = ThreadCache("rayrpc-objects", soft_limit=1)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._actor: Any = None
        self._pending: dict[int, Any] = {}  # the actor of each object that is not there yet
        self._callbacks: dict[int, Callable[[Outcome[Any]], object]] = {}  # of ``when_ready``
        self._node: str | None = None
        self._closed = False
        self.type: type = ray.ObjectRef
        # the size of an object, without asking anybody; old Rays, and Ray Client, do not know it
        found = getattr(ray.experimental, _LOCATE, None)
        if through_client():
            from ray.util.client.common import ClientObjectRef

            self.type, found = ClientObjectRef, None
        self._locate: Callable[[list[Any]], dict[Any, dict[str, Any]]] | None = found

    def check(self, ref: Any) -> None:
        """Raise a TypeError unless ``ref`` is an ObjectRef."""
        if not isinstance(ref, self.type):
            raise ArgumentTypeError(f"object_ref must be a ray.ObjectRef, got {ref!r}")

    def at_hand(self, ref: Any) -> Value[Any] | None:
        """Return the value of a small object that is here; see ``ObjectStore``."""
        try:
            if not self._is_near(ref):
                return None
            ready, _ = ray_api.wait([ref], timeout=0)
            return Value(ray_api.get(ref, timeout=AT_HAND_SECONDS)) if ready else None
        except Exception:  # what reads it at the callee raises it
            return None

    def _is_near(self, ref: Any) -> bool:
        """Tell whether an object is known to be on this node, and not too large."""
        if self._locate is None:
            return False
        if self._node is None:
            self._node = ray.get_runtime_context().get_node_id()
        found = self._locate([ref]).get(ref, {})
        nodes = found.get("node_ids")  # none: it is in this process
        return 0 < (found.get("object_size") or 0) <= AT_HAND_BYTES and (
            not nodes or self._node in nodes
        )

    def when_ready(self, ref: Any, callback: Callable[[Outcome[Any]], object]) -> None:
        """Call ``callback`` with an object's value or error; see ``ObjectStore``."""
        number = next(self._numbers)
        self._callbacks[number] = callback

        # in Ray's own thread, where any call into Ray would deadlock
        def completed(result: Any) -> None:
            if isinstance(result, RayTaskError):
                result = Error(result.as_instanceof_cause())
            else:
                result = Error(result) if isinstance(result, RayError) else Value(result)
            self._threads.submit(lambda: self._call_back(number, result))

        try:
            ref._on_completed(completed)
        except Exception as exc:
            self._call_back(number, Error(exc))
        if self._closed:  # just now, perhaps before the callback was there
            self._call_back(number, self._shut_down())

    def put(self, outcome: Outcome[Any]) -> Any:
        """Store a value or an error; return the ObjectRef."""
        if not ray.is_initialized():
            raise RpcError("Ray has ended: this worker has no object store any more")
        if isinstance(outcome, Value) and type(outcome.value) in PLAIN_TYPES:
            # Ray's own form of these is as good, and smaller
            return ray.put(outcome.value)
        return ray.put(_Stored(self._parts(outcome)))

    def promise(self) -> tuple[Any, Callable[[Outcome[Any]], object]]:
        """Return the ObjectRef of an object that is not there yet, and what completes it."""
        number = next(self._numbers)
        with self._lock:
            if self._closed:
                self._shut_down().unwrap()
            if self._actor is None:
                self._actor = self._start_actor()
            actor = self._actor
        ref = ray_api.submit(actor.wait, number)
        self._pending[number] = actor
        if self._closed:  # just now, perhaps before the object was there to be failed
            self._complete(number, self._shut_down())
        return ref, functools.partial(self._complete, number)

    def close(self) -> None:
        """Fail the objects that are not there yet; idempotent.

        The actor ends by itself when the last handle is deleted and its readers have what they wait
        for.
        """
        with self._lock:
            self._closed = True
            self._actor = None
        for number in list(self._callbacks):
            self._call_back(number, self._shut_down())
        for number in list(self._pending):
            self._complete(number, self._shut_down())
        self._threads.close()

    def _shut_down(self) -> Error:
        return Error(CallError(f"RPC was shut down on worker {self._worker!r}"))

    def _start_actor(self) -> Any:
        remote: Any = ray.remote
        shown = type(f"{self._worker} (pending objects)", (PendingObjects,), {})
        actor = remote(num_cpus=0, max_concurrency=MOST_WAITING)(shown)
        here = ray_api.on_this_node(soft=True)
        return actor.options(scheduling_strategy=here, max_restarts=-1).remote(self._worker)

    def _call_back(self, number: int, outcome: Outcome[Any]) -> None:
        """Give an object to what waits for it, unless it has been given one."""
        callback = self._callbacks.pop(number, None)
        if callback is not None:
            callback(outcome)

    def _complete(self, number: int, outcome: Outcome[Any]) -> None:
        """Complete an object, unless it is complete: in another thread, as this may be Ray's."""
        actor = self._pending.pop(number, None)
        if actor is not None:
            self._threads.submit(lambda: self._send(actor, number, outcome))

    def _send(self, actor: Any, number: int, outcome: Outcome[Any]) -> None:
        with contextlib.suppress(RayError):  # Ray has ended
            ray_api.submit(actor.complete, number, self._parts(outcome))

    def _parts(self, outcome: Outcome[Any]) -> list[Any]:
        payload = self._codec.encode(outcome)
        refs = [] if payload.objects is None else list(payload.objects.refs)
        buffers = (pickle.PickleBuffer(flat(buffer)) for buffer in payload.buffers)
        return [self._codec.module, self._codec.name, payload.data, refs, *buffers]
