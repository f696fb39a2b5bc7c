"""One worker's parts of the backward passes of a context."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from rayrpc.errors import RpcError, WorkerDiedError

__all__ = ["Gradients", "PassPart", "Passes"]

#: the gradients of a message's tensors, by the message's id; None for a tensor that was not used
Gradients = dict[int, Sequence[torch.Tensor | None]]


class PassPart(Protocol):
    """What a context needs of this worker's part of a backward pass."""

    def process_request(self, gradients: Gradients, source: int) -> Any:
        """Add gradients that a worker sent; return the reply or a Future of it."""

    def fail(self, error: BaseException) -> bool:
        """End the part with an error, unless it has ended."""

    def on_peer_lost(self, worker: int, error: WorkerDiedError) -> None:
        """Handle the death of a worker."""


class Passes:
    """Find the part of a pass by the pass's id; keep what arrives before the part begins.

        UNKNOWN ── add ──> UNDER_WAY ── remove ──> ENDED: gradients are dropped
        UNKNOWN ── gradients, abort ──> EARLY ── add: the part takes them ──> UNDER_WAY

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[int, PassPart] = {}  # by the pass's id
        self._early: dict[int, Gradients] = {}
        self._aborted: dict[int, RpcError] = {}  # the error, by the pass's id
        self._ended: set[int] = set()

    def __len__(self) -> int:
        """Return the number of parts under way."""
        return len(self._parts)

    def add(self, pass_id: int, part: PassPart) -> Gradients:
        """Add a part, and fail it if its pass was aborted; return gradients that came before it."""
        with self._lock:
            self._parts[pass_id] = part
            gradients = self._early.pop(pass_id, {})
            error = self._aborted.get(pass_id)
        if error is not None:
            part.fail(error)
        return gradients

    def remove(self, pass_id: int) -> None:
        """Remove a part that has ended; gradients that arrive later are dropped."""
        with self._lock:
            self._parts.pop(pass_id, None)
            self._aborted.pop(pass_id, None)
            self._ended.add(pass_id)

    def find(self, pass_id: int, gradients: Gradients) -> PassPart | None:
        """Return the part of a pass; if it has not begun, keep the gradients until it does."""
        with self._lock:
            part = self._parts.get(pass_id)
            if part is None and pass_id not in self._ended:
                self._early.setdefault(pass_id, {}).update(gradients)
            return part

    def abort(self, pass_id: int, error: RpcError) -> None:
        """Fail the part of a pass, now or when the part is added."""
        with self._lock:
            if pass_id not in self._ended:
                self._aborted[pass_id] = error
            part = self._parts.get(pass_id)
        if part is not None:
            part.fail(error)

    def under_way(self) -> list[PassPart]:
        """Return the parts under way."""
        with self._lock:
            result = list(self._parts.values())
        return result
