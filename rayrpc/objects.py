"""One world with Ray: ObjectRefs of Futures, RRefs and Futures of ObjectRefs.

    a Future or RRef ── object_ref ──> ObjectRef        any Ray task or actor can take it
    ObjectRef ── rref ──> RRef, on any worker           as_future ──> torch.futures.Future

An ObjectRef that is an argument of a call itself arrives as the object's value, once that is there;
one within an argument, or in a result, stays an ObjectRef, as in Ray.

Tensors in an object are copied when it is read, so that programs may write to them: Ray's memory is
shared by all readers on a node.
"""

from __future__ import annotations

from typing import Any

from torch.futures import Future

from rayrpc._concurrency.outcome import Outcome, attempt, complete
from rayrpc._concurrency.promise import Promise
from rayrpc._protocol.ids import WorkerInfo
from rayrpc._runtime import current
from rayrpc._runtime.objects import ref_of
from rayrpc.api import remote
from rayrpc.errors import ArgumentTypeError
from rayrpc.futures import AnyFuture
from rayrpc.rref_proxy import RRef

__all__ = ["as_future", "object_ref", "rref"]


def object_ref(future: Future[Any]) -> Any:
    """Return a Ray ObjectRef of the value of a Future, at once.

    The value is copied into Ray's object store when the Future is done; whatever reads the object
    needs rayrpc.  An error of the Future is raised by ``ray.get``, of its own type.

    Args:
        future (torch.futures.Future): of ``rpc_async``, or any other.

    Returns:
        ``ray.ObjectRef``: it lives as long as this process at most.

    Raises:
        TypeError: ``future`` is none.
        RuntimeError: RPC is not initialized.

    Example:
        >>> ref = rpc.object_ref(rpc.rpc_async("worker1", torch.ones, args=(2,)))
        >>> double = ray.remote(lambda x: 2 * x)
        >>> ray.get(double.remote(ref))
        tensor([2., 2.])

    Source: rayrpc's own; ``ray.ObjectRef``.
    """
    if not isinstance(future, AnyFuture):
        raise ArgumentTypeError(f"object_ref takes a torch.futures.Future, got {future!r}")
    done: Promise[Outcome[Any]] = Promise()
    agent = current.any_agent()
    if future.done():
        done.set(attempt(future.wait))
    else:
        future.add_done_callback(lambda ended: done.set(attempt(ended.wait)))
    return ref_of(agent.objects, done)


def rref(object_ref: Any, to: str | WorkerInfo | int | None = None) -> RRef[Any]:
    """Return an RRef to the value of a Ray object, at once.

    Args:
        object_ref (ray.ObjectRef): of the object.
        to (str or WorkerInfo or int, optional): the worker that owns the RRef, and takes the value
            out of the store when it is there; not given: this one.

    Returns:
        ``RRef``: an error of the object is raised where it is used.

    Raises:
        TypeError: ``object_ref`` is none.
        RuntimeError: RPC is not initialized, or there is no such worker.

    Example:
        >>> rref = rpc.rref(ray.put(torch.ones(2)), to="worker1")
        >>> rref.rpc_sync().sum()
        tensor(2.)

    Source: rayrpc's own.
    """
    agent = current.initialized_agent()
    agent.objects.check(object_ref)
    made: RRef[Any] = remote(agent.info if to is None else to, _itself, (object_ref,), timeout=0)
    return made


def as_future(object_ref: Any) -> Future[Any]:
    """Return a Future of the value of a Ray object, at once.

    Args:
        object_ref (ray.ObjectRef): of the object; no thread waits for it.

    Returns:
        ``torch.futures.Future``: its callbacks run in a thread of rayrpc. An error of the object is
        raised by ``wait`` and ``value``, of its own type.

    Raises:
        TypeError: ``object_ref`` is none.
        RuntimeError: RPC is not initialized.

    Example:
        >>> double = ray.remote(lambda x: 2 * x)
        >>> rpc.as_future(double.remote(4)).then(lambda done: done.value() + 1).wait()
        9

    Source: rayrpc's own; ``ray.ObjectRef.future``.
    """
    agent = current.any_agent()
    agent.objects.check(object_ref)
    future: Future[Any] = Future()
    agent.objects.when_ready(object_ref, lambda outcome: complete(future, outcome))
    return future


def _itself(value: Any) -> Any:
    return value
