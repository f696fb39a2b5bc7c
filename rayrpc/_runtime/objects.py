"""Objects of the cluster's store: values of RRefs and Futures there, and objects as values here."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

from rayrpc._concurrency.outcome import Error, Outcome, Value
from rayrpc._concurrency.promise import Promise
from rayrpc._protocol.messages import Objects
from rayrpc.errors import RpcError

__all__ = ["NoStore", "ObjectStore", "receive", "ref_of"]


class ObjectStore(Protocol):
    """The object store of a Ray cluster."""

    def check(self, ref: Any) -> None:
        """Raise a TypeError unless ``ref`` is a reference to an object."""

    def at_hand(self, ref: Any) -> Value[Any] | None:
        """Return the value of a local object that is faster to send than to read from the store.

        Args:
            ref: the reference to the object.

        Returns:
            None if it is elsewhere, large, not there yet, or an error.
        """

    def when_ready(self, ref: Any, callback: Callable[[Outcome[Any]], object]) -> None:
        """Call ``callback`` with the value of an object, or with the error that it has.

        Args:
            ref: of the object.
            callback: called from any thread; it must not block, nor use the store.
        """

    def put(self, outcome: Outcome[Any]) -> Any:
        """Store a value, or an error that is raised where it is read; return the reference."""

    def promise(self) -> tuple[Any, Callable[[Outcome[Any]], object]]:
        """Return a reference to an object without a value, and the function that sets the value."""

    def close(self) -> None:
        """Fail the objects that have no value yet; idempotent."""


class NoStore:
    """An ``ObjectStore`` where there is no cluster."""

    def check(self, ref: Any) -> None:
        raise _no_store()

    def at_hand(self, ref: Any) -> Value[Any] | None:
        return None

    def when_ready(self, ref: Any, callback: Callable[[Outcome[Any]], object]) -> None:
        callback(Error(_no_store()))

    def put(self, outcome: Outcome[Any]) -> Any:
        raise _no_store()

    def promise(self) -> tuple[Any, Callable[[Outcome[Any]], object]]:
        raise _no_store()

    def close(self) -> None:
        pass


def _no_store() -> RpcError:
    return RpcError("this worker is in no Ray cluster, and has no object store")


def ref_of(store: ObjectStore, source: Promise[Outcome[Any]]) -> Any:
    """Return a reference to an object that gets the outcome of a promise."""
    outcome = source.value
    if outcome is not None:
        return store.put(outcome)
    ref, complete = store.promise()
    source.on_done(complete)
    return ref


def receive(
    store: ObjectStore, objects: Objects, done: Callable[[Outcome[list[Any]]], object]
) -> None:
    """Replace the references that are arguments by their objects' values.

    Args:
        store: the store that has the objects.
        objects: the references in a request.
        done: takes the references and values by position, or the first error, from any thread.
    """
    received = list(objects.refs)
    lock = threading.Lock()
    left = len(objects.arguments)

    def take(position: int, outcome: Outcome[Any]) -> None:
        nonlocal left
        with lock:
            is_late = left <= 0
            left = 0 if isinstance(outcome, Error) else left - 1
            is_last = left == 0
            if isinstance(outcome, Value):
                received[position] = outcome.value
        if is_last and not is_late:
            done(outcome if isinstance(outcome, Error) else Value(received))

    for position in objects.arguments:
        store.when_ready(objects.refs[position], functools.partial(take, position))
