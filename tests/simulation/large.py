"""Large messages of simulated workers: values that make them, and limits at which they begin.

The limits are small, so that a run takes milliseconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

from rayrpc._transports.direct import (
    bulk_replies,
    mapped_segments,
    message_reader,
    server,
    server_connection,
    shared_memory,
    stream,
    transport,
)

__all__ = ["Large", "Limits", "limited"]


class Large:
    """A value whose bytes travel in a buffer: by shared memory, or by a second connection.

    Args:
        text (str): tells it from others.
        size (int): of the buffer, in bytes.
    """

    def __init__(self, text: str, size: int = 2000) -> None:
        self.data: Any = bytearray(text.encode().ljust(size))

    def __reduce__(self) -> Any:
        return _large, (pickle.PickleBuffer(self.data),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Large) and bytes(self.data) == bytes(other.data)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Large({bytes(self.data).decode().rstrip()!r}, {len(self.data)})"


def _large(data: Any) -> Large:
    value = Large("", 0)
    value.data = data
    return value


@dataclasses.dataclass(frozen=True)
class Limits:
    """From which sizes messages are large, and what else programs may set."""

    shared: int = 1000
    bulk: int = 1000
    unread: int = 10_000
    receive_buffer: int = 600
    segments: int = 8
    descriptors: int = 8
    idle_seconds: float = 2.0  # for which a thread waits for a message


@contextlib.contextmanager
def limited(limits: Limits) -> Iterator[None]:
    """Have messages be large from few bytes on."""
    new = [
        (transport, "BULK_BYTES", limits.bulk),
        (server_connection, "BULK_BYTES", limits.bulk),
        (server, "IDLE_SECONDS", limits.idle_seconds),
        (stream, "SHARED_BYTES", limits.shared),
        (stream, "MAX_UNREAD_BYTES", limits.unread),
        (bulk_replies, "MAX_UNREAD_BYTES", limits.unread),
        (message_reader, "CAPACITY", limits.receive_buffer),
        (shared_memory, "MIN_SEGMENT_BYTES", 4096),
        (shared_memory, "MAX_SEGMENTS", limits.segments),
        (mapped_segments, "MAX_DESCRIPTORS", limits.descriptors),
    ]
    old = [(module, name, getattr(module, name)) for module, name, _ in new]
    for module, name, value in new:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in old:
            setattr(module, name, value)
