"""What travels between two workers.

A call is one frame there and one frame back:

    caller ── CALL / REMOTE / FETCH / CONTROL ──> callee
    caller <────────── VALUE / ERROR ──────────── callee

    CALL      run a function, send back its value
    REMOTE    run a function, keep its value in an RRef, send back that it is there
    FETCH     send back the value of an RRef
    CONTROL   messages of the RRef protocol alone

A frame is a header of plain values, a pickled payload, and a *list* of buffers (the tensors'
bytes), never one blob, so that a transport may move the buffers in its own way.  Any frame may
carry messages of the RRef protocol along (``control``) and entries of hooks (``meta``).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from rayrpc._protocol.ids import GloballyUniqueId

__all__ = [
    "ChildAccept",
    "Control",
    "Fork",
    "ForkAck",
    "ForkRequest",
    "Frame",
    "Kind",
    "Payload",
    "UserDelete",
    "flat",
]


class Kind(IntEnum):
    """What a frame asks for, or how a call ended."""

    CALL = 0
    REMOTE = 1
    FETCH = 2
    CONTROL = 3
    VALUE = 4
    ERROR = 5


class Fork(NamedTuple):
    """One RRef inside a payload: a share of it, made for the receiver.

    Args:
        rref_id (GloballyUniqueId): the RRef.
        fork_id (GloballyUniqueId): this share.
        owner (int): id of the worker that holds the value.
        parent (int): id of the worker that made the share.
    """

    rref_id: GloballyUniqueId
    fork_id: GloballyUniqueId
    owner: int
    parent: int


class Payload(NamedTuple):
    """A pickled object.

    Args:
        data (bytes): the pickle.
        buffers (list): those that left it.
        forks (tuple[Fork, ...]): the RRefs in it.
        lent (tuple): handles of further ones, which must live until the call is answered.
    """

    data: bytes
    buffers: list[Any]
    forks: tuple[Fork, ...] = ()
    lent: tuple[Any, ...] = ()


EMPTY = Payload(b"", [])


# The messages of the RRef protocol; ``rref_table`` tells what they mean.


class ForkRequest(NamedTuple):
    """User to owner: I hold this fork; count it."""

    seq: int
    rref_id: GloballyUniqueId
    fork_id: GloballyUniqueId


class ForkAck(NamedTuple):
    """Owner to user: your fork is counted."""

    seq: int
    fork_id: GloballyUniqueId


class ChildAccept(NamedTuple):
    """Child to parent: the owner counts my fork; you may drop yours."""

    seq: int
    fork_id: GloballyUniqueId


class UserDelete(NamedTuple):
    """User to owner: this fork is gone."""

    seq: int
    rref_id: GloballyUniqueId
    fork_id: GloballyUniqueId


Control = ForkRequest | ForkAck | ChildAccept | UserDelete


@dataclass(slots=True)
class Frame:
    """One message between two workers.

    Args:
        kind (Kind): what it is.
        session (int): the group session that it belongs to; frames of another are refused.
        src (int): id of the sending worker.
        call_id (int): number of the call on the caller.
        rref_id, fork_id: the RRef that a REMOTE makes and its first fork, or that a FETCH asks for
            (which has no fork, so that its id stands there).
        is_async (bool): the function returns a Future (``async_execution``).
        meta (dict | None): entries of hooks, by the hook's name.
        ack (int): how many messages of the RRef protocol from the receiver have all arrived.
        control (tuple[Control, ...]): messages of the RRef protocol that ride along.
        forks (tuple[Fork, ...]): the RRefs in the payload; it names them by position.
        data (bytes): the pickled payload.
        buffers (list): buffers that left the pickle.
    """

    kind: Kind
    session: int
    src: int
    call_id: int = 0
    rref_id: GloballyUniqueId | None = None
    fork_id: GloballyUniqueId | None = None
    is_async: bool = False
    meta: dict[str, Any] | None = None
    ack: int = 0
    control: tuple[Control, ...] = ()
    forks: tuple[Fork, ...] = ()
    data: bytes = b""
    buffers: list[Any] = field(default_factory=list)

    def pack(self) -> bytes:
        """Return all but the buffers as bytes.

        kind (1) | flags (1) | src (4) | session (8) | call id (8) | ack (8), then what the flags
        say: two identities (32), the length (4) of a pickle and the pickle; then the data.
        """
        flags = 0
        front = b""
        if self.is_async:
            flags = _IS_ASYNC
        if self.rref_id is not None:
            flags |= _HAS_IDS
            front = _IDS.pack(*self.rref_id, *(self.fork_id or self.rref_id))
        if self.control or self.forks or self.meta is not None:
            flags |= _HAS_MORE
            more = pickle.dumps((self.meta, self.control, self.forks), 5)
            front += _LENGTH.pack(len(more)) + more
        head = _HEAD.pack(self.kind, flags, self.src, self.session, self.call_id, self.ack)
        return head + front + self.data

    @staticmethod
    def unpack(head: bytes, buffers: Sequence[Any] = ()) -> Frame:
        """Return the frame that ``pack`` made, with its buffers."""
        kind, flags, src, session, call_id, ack = _HEAD.unpack_from(head)
        position = _HEAD.size
        rref_id = fork_id = meta = None
        control: tuple[Control, ...] = ()
        forks: tuple[Fork, ...] = ()
        if flags & _HAS_IDS:
            ids = _IDS.unpack_from(head, position)
            rref_id, fork_id = GloballyUniqueId(*ids[:2]), GloballyUniqueId(*ids[2:])
            position += _IDS.size
        if flags & _HAS_MORE:
            (length,) = _LENGTH.unpack_from(head, position)
            position += _LENGTH.size
            meta, control, forks = pickle.loads(head[position : position + length])
            position += length
        return Frame(
            _KINDS[kind],
            session,
            src,
            call_id,
            rref_id,
            fork_id,
            flags & _IS_ASYNC != 0,
            meta,
            ack,
            control,
            forks,
            head[position:],
            list(buffers) if buffers else [],
        )


_HEAD = struct.Struct("<BBiqQQ")
_IDS = struct.Struct("<qQqQ")
_LENGTH = struct.Struct("<I")
_IS_ASYNC, _HAS_IDS, _HAS_MORE = 1, 2, 4
_KINDS = tuple(Kind)


def flat(buffer: Any) -> memoryview:
    """Return the bytes of a frame's buffer, as they lie in memory."""
    if isinstance(buffer, pickle.PickleBuffer):  # it may be in Fortran's order
        return buffer.raw()
    return memoryview(buffer).cast("B")
