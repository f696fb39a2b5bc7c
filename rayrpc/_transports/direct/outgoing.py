"""Messages to write to a connection, and what is left of them after a partial write."""

from __future__ import annotations

from typing import Any, NamedTuple

from rayrpc._protocol.messages import SharedForks
from rayrpc._transports.direct.shared_memory import Lease, copied

__all__ = ["MAX_PARTS", "Outgoing", "SEND_BYTES", "first_parts", "kept_of", "unsent_of"]

# How many parts go into one system call; systems allow 1024 and more.
MAX_PARTS = 512
# ... and how many bytes: while the system copies them, it processes no acknowledgements.
SEND_BYTES = 512 * 1024


class Outgoing(NamedTuple):
    """A message to write.

    Args:
        call_id (int): the id of its call.
        parts (list): its bytes, in parts.
        forks (SharedForks | None): the forks in it; released unless its writing begins.
        may_change (bool): the memory of its parts is the program's, which may write to it.
        is_pending (bool): its bytes count as the send queue's ``pending_bytes``.
        lease (Lease | None): the lease of the segment with its buffers.
    """

    call_id: int
    parts: list[Any]
    forks: SharedForks | None = None
    may_change: bool = False
    is_pending: bool = False
    lease: Lease | None = None

    @property
    def size(self) -> int:
        """The number of its bytes."""
        parts = self.parts
        return len(parts[0]) if len(parts) == 1 else sum(map(len, parts))

    def kept(self, written: int = 0) -> Outgoing:
        """Return the message as pending, with all that is not written in memory of its own."""
        if self.is_pending and not self.may_change:
            return self
        parts = self._kept_parts(written) if self.may_change else self.parts
        return Outgoing(self.call_id, parts, self.forks, is_pending=True, lease=self.lease)

    def _kept_parts(self, written: int) -> list[Any]:
        parts: list[Any] = []
        for part in self.parts:
            done = min(written, len(part))
            written -= done
            if done:
                parts.append(part[:done])
            if done < len(part):
                parts.append(part[done:] if isinstance(part, bytes) else copied(part[done:]))
        return parts


def first_parts(parts: list[Any]) -> list[Any]:
    """Return the beginning of a message's parts, for one system call."""
    left = SEND_BYTES
    first: list[Any] = []
    for part in parts[:MAX_PARTS]:
        first.append(part if len(part) <= left else memoryview(part)[:left])
        left -= len(first[-1])
        if not left:
            break
    return first


def unsent_of(messages: list[Outgoing], written: int) -> list[int]:
    """Return the calls of the messages of which no byte is written."""
    unsent = []
    for message in messages:
        if written <= 0:
            unsent.append(message.call_id)
        written -= message.size
    return unsent


def kept_of(messages: list[Outgoing], written: int) -> list[Outgoing]:
    """Return messages as pending, with all that is not written in memory of their own."""
    kept = []
    for message in messages:
        kept.append(message.kept(max(0, written)))
        written -= message.size
    return kept
