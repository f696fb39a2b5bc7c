"""What the reducers of one pickle use: RRefs and ObjectRefs leave it, and come back to it.

RRefs leave a pickle as forks, listed in the payload's header, so that none is lost when the rest
cannot be unpickled, or are lent.  References to objects of the cluster's store leave it as they
are, for Ray to send.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._protocol.messages import Fork, Objects
from rayrpc._runtime.serialization.devices import DeviceMap
from rayrpc.errors import RpcError, SerializationError

__all__ = [
    "ArgumentObject",
    "Encoding",
    "NoRRefs",
    "Sharer",
    "object_types",
    "reduce_argument",
    "reduce_object",
    "reduce_rref",
    "session",
]

Reducer = Callable[[Any], Any]

#: the classes of references to objects of the cluster's store
object_types: set[type] = set()


class Sharer(Protocol):
    """Makes forks of RRefs, and RRefs of forks; ``RRefContext`` is one."""

    def share(self, rref: Any, to: int | None, into: list[Fork]) -> None:
        """Fork ``rref`` for worker ``to``; add the fork to ``into``."""

    def lend(self, rref: Any, to: int | None) -> GloballyUniqueId | None:
        """Return the identity of ``rref`` if ``to`` owns it and counts our fork, else None."""

    def borrow(self, rref_id: GloballyUniqueId) -> Any:
        """Return the RRef that this worker owns, and another lent to it."""

    def release_later(self, fork: Fork) -> None:
        """Undo a fork that was not sent; safe in any thread that collects garbage."""

    def unshare(self, fork: Fork) -> None:
        """Undo a fork that was not sent."""

    def receive(self, fork: Fork) -> Any:
        """Return the RRef of a received fork."""

    def discard(self, fork: Fork) -> None:
        """Receive a fork and release it."""


class NoRRefs:
    """A ``Sharer`` for payloads that can have no RRef, as no worker would count its forks.

    Args:
        reason (str): the text of the error of one that has.
    """

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _refuse(self, *_: Any) -> NoReturn:
        raise SerializationError(self._reason)

    share = lend = borrow = unshare = release_later = receive = discard = _refuse


class Encoding:
    """What the reducers of one pickle use, and what they collect."""

    __slots__ = (
        "_arguments",
        "_lends",
        "_refs",
        "_sharer",
        "_to",
        "buffers",
        "by_value",
        "devices",
        "forks",
        "lent",
    )

    def __init__(
        self,
        sharer: Sharer,
        to: int | None,
        lends: bool,
        by_value: bool,
        devices: DeviceMap | None,
    ) -> None:
        self._sharer = sharer
        self._to = to
        self._lends = lends
        self.by_value = by_value
        self.devices = devices
        self.buffers: list[pickle.PickleBuffer] = []
        self.forks: list[Fork] = []
        self.lent: list[Any] = []
        self._refs: list[Any] = []
        self._arguments: list[int] = []

    @property
    def objects(self) -> Objects | None:
        """The references to objects of the cluster's store; None if there are none."""
        return Objects(tuple(self._refs), tuple(self._arguments)) if self._refs else None

    def share(self, rref: Any) -> Any:
        if self._lends and (rref_id := self._sharer.lend(rref, self._to)) is not None:
            self.lent.append(rref)
            return _borrow_rref, tuple(rref_id)
        position = len(self.forks)
        self._sharer.share(rref, self._to, self.forks)
        return _receive_rref, (position,)

    def refer(self, ref: Any, is_argument: bool) -> Any:
        position = len(self._refs)
        self._refs.append(ref)
        if is_argument:
            self._arguments.append(position)
        return _receive_object, (position,)


class _Session(threading.local):
    """The pickles that this thread is making or reading."""

    encoding: Encoding | None = None
    sharer: Sharer | None = None  # of the codec that decodes
    receive: Callable[[int], Any] | None = None
    objects: Sequence[Any] = ()  # references, and values, by position
    reduce: Reducer | None = None  # for RRefs, in a user's pickler


session = _Session()


def reduce_rref(rref: Any) -> Any:
    """Replace an RRef by its identity, if it is lent, else by the position of its fork."""
    if session.reduce is not None:
        return session.reduce(rref)
    if session.encoding is None:
        return rref.__reduce__()  # raises torch's own error
    return session.encoding.share(rref)


def _receive_rref(position: int) -> Any:
    if session.receive is None:
        raise RpcError("An RRef can only be unpickled from an RPC that brought it.")
    return session.receive(position)


def _borrow_rref(created_on: int, local_id: int) -> Any:
    if session.sharer is None:
        raise RpcError("An RRef can only be unpickled from an RPC that brought it.")
    return session.sharer.borrow(GloballyUniqueId(created_on, local_id))


class ArgumentObject:
    """A reference to an object of the cluster's store that arrives as the object's value.

    Args:
        ref: the reference.
    """

    def __init__(self, ref: Any) -> None:
        self.ref = ref


def reduce_object(ref: Any) -> Any:
    """Replace a reference to an object of the cluster's store by its position."""
    if session.encoding is None:
        return ref.__reduce__()
    return session.encoding.refer(ref, is_argument=False)


def reduce_argument(argument: ArgumentObject) -> Any:
    """Replace an argument by the position of the reference that it is."""
    assert session.encoding is not None
    return session.encoding.refer(argument.ref, is_argument=True)


def _receive_object(position: int) -> Any:
    if position >= len(session.objects):
        raise RpcError(
            "An ObjectRef can only be unpickled from an RPC that brought it; an exception brings "
            "none: keep ObjectRefs out of its arguments."
        )
    return session.objects[position]
