"""The messages between two workers.

A call is a request frame and a reply frame:

    caller ── CALL / REMOTE / FETCH / CONTROL ──> callee      anybody ── INSPECT ──> worker
    caller <────────── VALUE / ERROR ──────────── callee      anybody <── VALUE ──── worker

    CALL      run a function; the reply has its value
    REMOTE    run a function, keep its value in an RRef; the reply confirms that the RRef exists
    FETCH     the reply has the value of an RRef
    CONTROL   RRef messages alone
    INSPECT   the reply tells, as data, what the worker does; its sender need be no member
    VALUE     the call ended with a value
    ERROR     the call ended with an exception
    ELSEWHERE the reply comes by the transport that the request did not come by

A frame is a header of plain values, a pickled payload, and a *list* of buffers (the tensors'
bytes), never one blob, so that a transport may send the buffers in its own way.  RRef messages
(``control``) and entries of hooks (``meta``) are piggybacked on any frame.  References to objects
of the cluster's store are beside the payload: only Ray can send them, which counts them.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from rayrpc._protocol.ids import GloballyUniqueId

__all__ = [
    "Buffer",
    "ChildAccept",
    "Control",
    "Fork",
    "ForkAck",
    "ForkRequest",
    "Frame",
    "FrameError",
    "Kind",
    "Meta",
    "Objects",
    "PLAIN_TYPES",
    "Payload",
    "UserDelete",
    "flat",
    "size_of",
]


#: what has Python's buffer protocol: ``collections.abc.Buffer``, which only Python 3.12 brings
Buffer = Any
#: entries of hooks, by the hook's name
Meta = dict[str, Any]

#: types without inner objects, which any pickler takes as they are
PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes})


class Kind(IntEnum):
    """The kind of a frame; see above."""

    CALL = 0
    REMOTE = 1
    FETCH = 2
    CONTROL = 3
    VALUE = 4
    ERROR = 5
    INSPECT = 6
    ELSEWHERE = 7


class FrameError(EOFError):
    """A message is malformed.  It ends its connection: what follows it cannot be read."""


class Fork(NamedTuple):
    """A reference to an RRef in a payload, for the receiver to hold.

    Args:
        rref_id (GloballyUniqueId): the RRef.
        fork_id (GloballyUniqueId): this fork.
        owner (int): id of the worker that holds the value.
        parent (int): id of the worker that sent the fork.
    """

    rref_id: GloballyUniqueId
    fork_id: GloballyUniqueId
    owner: int
    parent: int


class SharedForks(tuple[Fork, ...]):
    """The forks in a request; released if it is deleted before a transport begins to send it.

    An exception, such as Ctrl-C, may strike the caller at any point.
    """

    _release: Callable[[Fork], None] | None = None

    @classmethod
    def of(cls, forks: Iterable[Fork], release: Callable[[Fork], None]) -> SharedForks:
        """Return the forks.

        Args:
            forks: to hold.
            release: called for each that is not sent; by the garbage collector, in any thread.
        """
        made = cls(forks)
        made._release = release
        return made

    def begin_to_send(self) -> None:
        """Note that the forks may arrive from now on."""
        self._release = None

    def __del__(self) -> None:
        if self._release is not None:
            for fork in self:
                self._release(fork)


class Objects(NamedTuple):
    """References to objects of the cluster's store in a payload.

    Args:
        refs (tuple): the references, as the store's own library has them; the payload refers to
            them by position.
        arguments (tuple[int, ...]): positions of those that arrive as the objects' values.
    """

    refs: tuple[Any, ...]
    arguments: tuple[int, ...] = ()


class Payload(NamedTuple):
    """A pickled object.

    Args:
        data (bytes): the pickle.
        buffers (list[Buffer]): its out-of-band buffers.
        forks (tuple[Fork, ...]): the RRefs in it that are shared.
        lent (tuple): handles of the RRefs in it that are lent; the caller keeps them alive until
            the reply arrives.
        objects (Objects | None): the references in it to objects of the cluster's store.
    """

    data: bytes
    buffers: list[Buffer]
    forks: tuple[Fork, ...] = ()
    lent: tuple[Any, ...] = ()
    objects: Objects | None = None


EMPTY = Payload(b"", [])


# The RRef messages; the protocol is in ``rref_table``.


class ForkRequest(NamedTuple):
    """User to owner: count this fork, which the user holds."""

    seq: int
    rref_id: GloballyUniqueId
    fork_id: GloballyUniqueId


class ForkAck(NamedTuple):
    """Owner to user: the fork is counted."""

    seq: int
    fork_id: GloballyUniqueId


class ChildAccept(NamedTuple):
    """Child to parent: the owner counts the child's fork; the parent may delete its own."""

    seq: int
    fork_id: GloballyUniqueId


class UserDelete(NamedTuple):
    """User to owner: this fork was deleted."""

    seq: int
    rref_id: GloballyUniqueId
    fork_id: GloballyUniqueId


Control = ForkRequest | ForkAck | ChildAccept | UserDelete


@dataclass(slots=True)
class Frame:
    """One message between two workers.

    What its sender has said in it stays; the transport that sends it notes in it what it needs.

    Args:
        kind (Kind): request or reply of which kind.
        session (int): of the sender's group; a receiver in another session refuses the frame.
        src (int): id of the sending worker.
        call_id (int): number of the call on the caller; above ``EPOCH_BITS``, the caller's epoch.
        rref_id, fork_id: the RRef that a REMOTE creates and its first fork, or the RRef that a
            FETCH reads, which needs no fork (on the wire, ``rref_id`` is in its place).
        is_async (bool): the function returns a Future (``async_execution``).
        meta (dict | None): entries of hooks, by the hook's name.
        ack (int): acknowledges all RRef messages of the receiver with a lower number; 0: none.
        control (tuple[Control, ...]): RRef messages.
        forks (tuple[Fork, ...]): the RRefs in the payload, which refers to them by position.
        data (bytes): the pickled payload.
        buffers (list[Buffer]): out-of-band buffers of the pickle.
        takes_slot (bool): the function counts among those that run at a time.
        objects (Objects | None): the references in the payload to objects of the cluster's store;
            ``pack`` leaves them out.
        is_stable (bool): the sender writes nothing to the buffers until the reply has arrived; else
            they may change as soon as the frame was given to a transport.
        pending (Pending | None): where the reply to a request will be, if it may arrive: the sender
            learns it here if an interrupt keeps the transport from returning it.
    """

    kind: Kind
    session: int
    src: int
    call_id: int = 0
    _: KW_ONLY
    rref_id: GloballyUniqueId | None = None
    fork_id: GloballyUniqueId | None = None
    is_async: bool = False
    meta: Meta | None = None
    ack: int = 0
    control: tuple[Control, ...] = ()
    forks: tuple[Fork, ...] = ()
    data: bytes = b""
    buffers: list[Buffer] = field(default_factory=list)
    takes_slot: bool = True
    objects: Objects | None = None
    is_stable: bool = field(default=False, compare=False)
    pending: Any = field(default=None, compare=False, repr=False)

    @property
    def unsent_forks(self) -> SharedForks | None:
        """Those of a request, for ``begin_to_send``."""
        return self.forks if type(self.forks) is SharedForks else None

    def begin_to_send(self) -> None:
        """Note that a request may arrive from now on; transports call it, or its forks'."""
        forks = self.unsent_forks
        if forks is not None:
            forks.begin_to_send()

    def drop_payload(self) -> None:
        """Free what a request carries, once it is decoded."""
        self.data, self.buffers, self.objects = b"", [], None

    def keep_buffers(self) -> None:
        """Copy the buffers, unless they are stable."""
        if not self.is_stable:
            self.buffers = [bytearray(flat(buffer)) for buffer in self.buffers]
            self.is_stable = True

    def pack(self) -> bytes:
        """Encode all but the buffers and objects.

        kind (1) | flags (1) | src (4) | session (8) | call id (8) | ack (8); if the flags say so,
        two identities (32), and the length (4) and checksum (4) of a pickle, and the pickle; then
        the data.
        """
        flags = 0
        front = b""
        if self.is_async:
            flags = _IS_ASYNC
        if not self.takes_slot:
            flags |= _NO_SLOT
        if self.rref_id is not None:
            flags |= _HAS_IDS
            front = _IDS.pack(*self.rref_id, *(self.fork_id or self.rref_id))
        if self.control or self.forks or self.meta is not None:
            flags |= _HAS_MORE
            more = pickle.dumps((self.meta, self.control, tuple(self.forks)), 5)
            front += _MORE.pack(len(more), zlib.crc32(more)) + more
        head = _HEAD.pack(self.kind, flags, self.src, self.session, self.call_id, self.ack)
        return head + front + self.data

    @staticmethod
    def unpack(
        head: bytes | memoryview, buffers: Sequence[Buffer] = (), objects: Objects | None = None
    ) -> Frame:
        """Decode the frame that ``pack`` encoded, and add its buffers and objects.

        Raises:
            FrameError: ``pack`` encoded nothing like it.
        """
        try:
            kind, flags, src, session, call_id, ack = _HEAD.unpack_from(head)
            frame = Frame(_KINDS[kind], session, src, call_id, ack=ack, objects=objects)
            position = _HEAD.size
            if flags:  # most frames have none
                frame.is_async = flags & _IS_ASYNC != 0
                frame.takes_slot = not flags & _NO_SLOT
                if flags & _HAS_IDS:
                    ids = _IDS.unpack_from(head, position)
                    frame.rref_id = GloballyUniqueId(*ids[:2])
                    frame.fork_id = GloballyUniqueId(*ids[2:])
                    position += _IDS.size
                if flags & _HAS_MORE:
                    length, checksum = _MORE.unpack_from(head, position)
                    position += _MORE.size + length
                    more = _unpack_more(head[position - length : position], checksum)
                    frame.meta, frame.control, frame.forks = more
                if flags > _ALL_FLAGS or position > len(head):
                    raise FrameError("the flags of a frame do not fit its length")
            if kind in _RREF_KINDS and frame.rref_id is None:
                raise FrameError("a frame names no RRef")
            frame.data = bytes(head[position:])
            if buffers:
                frame.buffers = list(buffers)
            return frame
        except (IndexError, struct.error) as exc:  # the kind is unknown, or the head too short
            raise FrameError(f"the header of a frame is malformed: {exc}") from None


def _unpack_more(
    data: bytes | memoryview, checksum: int
) -> tuple[Meta | None, tuple[Control, ...], tuple[Fork, ...]]:
    """Unpickle hooks' entries, RRef messages and forks.

    Unpickling damaged bytes may take any amount of memory, so their checksum is compared first.
    """
    if zlib.crc32(data) != checksum:
        raise FrameError("the RRef messages of a frame are damaged")
    try:
        meta, control, forks = pickle.loads(data)
    except Exception as exc:
        raise FrameError(f"the RRef messages of a frame cannot be unpickled: {exc}") from exc
    return meta, control, forks


_HEAD = struct.Struct("<BBiqQQ")
_IDS = struct.Struct("<qQqQ")
_MORE = struct.Struct("<II")
_IS_ASYNC, _HAS_IDS, _HAS_MORE, _NO_SLOT = 1, 2, 4, 8
_ALL_FLAGS = _IS_ASYNC | _HAS_IDS | _HAS_MORE | _NO_SLOT
_KINDS = tuple(Kind)
_RREF_KINDS = (int(Kind.REMOTE), int(Kind.FETCH))


def flat(buffer: Buffer) -> memoryview:
    """Return the bytes of a frame's buffer, in the order of memory."""
    if isinstance(buffer, pickle.PickleBuffer):  # it may be in Fortran order
        return buffer.raw()
    return memoryview(buffer).cast("B")


def size_of(frame: Frame | Payload) -> int:
    """Return the bytes of the buffers of a frame or payload in all."""
    return sum(flat(buffer).nbytes for buffer in frame.buffers)
