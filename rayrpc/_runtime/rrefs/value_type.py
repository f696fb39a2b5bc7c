"""The type of an RRef's value, as its owner tells it."""

from __future__ import annotations

from typing import Any

from torch.futures import Future

from rayrpc._runtime.rrefs.reference import Reference

__all__ = ["_rref_typeof_on_owner", "completed"]


def _rref_typeof_on_owner(rref: Reference[Any], blocking: bool = True) -> Any:
    """Return the type of a value at its owner, or a Future of it (torch's name)."""
    kind = type(rref.local_value())
    return kind if blocking else completed(kind)


def completed(value: Any) -> Future[Any]:
    """Return a Future that has a value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future
