"""A queue between processes: ``machin.parallel.queue``."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import ray
import ray.util.queue

from rayrpc import config
from rayrpc._transports.ray.cluster import connect
from rayrpc.errors import ClusterError, SerializationError
from rayrpc.parallel.pickle import dumps, loads

__all__ = ["SimpleQueue"]


class SimpleQueue:
    """A queue that any process of the cluster can put objects into, and take them out of.

    Pass it on as an argument: to ranks, pools, Ray's tasks, or processes of ``multiprocessing``
    that were spawned.  It lives as long as the program that made it.

    Args:
        ctx: accepted for machin's sake: all processes can have it.
        copy_tensor (bool): send the values of tensors; else readers, who must be on the node of
            the writer, see the same memory, and only once: an object is for one reader.

    Raises:
        ClusterError: no Ray cluster can be reached or started.

    Source: ``machin.parallel.queue.SimpleQueue``, on ``ray.util.queue.Queue``.
    """

    def __init__(self, *, ctx: Any = None, copy_tensor: bool = False) -> None:
        connect(config.settings())
        self._copy_tensor = copy_tensor
        self._queue: Any = ray.util.queue.Queue(actor_options={"num_cpus": 0})
        self._pid = os.getpid()

    def __reduce__(self) -> Any:
        address = ray.get_runtime_context().gcs_address
        return _load, (address, self._copy_tensor, ray.cloudpickle.dumps(self._queue))

    def put(self, obj: Any) -> None:
        """Put an object in.

        Args:
            obj: what can be pickled; local functions and lambdas too.

        Raises:
            TypeError, pickle.PicklingError: it cannot.
        """
        data = dumps(obj, copy_tensor=self._copy_tensor)
        self._here().put((_node(), data))

    def get(self, timeout: float | None = None) -> Any:
        """Wait for an object, and take it out.

        Args:
            timeout (float, optional): in seconds; None: as long as it takes.

        Raises:
            TimeoutError: there was none in time.
            SerializationError: it cannot be read here.
        """
        queue = self._here()
        try:
            node, data = queue.get(timeout=timeout) if timeout != 0 else queue.get_nowait()
        except ray.util.queue.Empty:
            raise TimeoutError(f"nothing was put into the queue in {timeout} s") from None
        try:
            return loads(data)
        except RuntimeError as exc:
            if self._copy_tensor or node == _node():
                raise
            raise SerializationError(
                "the memory of a tensor cannot be seen here: it was put into the queue on another "
                "node. Make the queue with copy_tensor=True."
            ) from exc

    # machin's names for one reader, or writer, that needs no lock
    quick_put = put
    quick_get = get

    def empty(self) -> bool:
        """Tell whether there is nothing in it at the moment."""
        return bool(self._here().empty())

    def close(self) -> None:
        """End the queue, for all who have it."""
        self._here().shutdown()
        self._queue = None

    def _here(self) -> Any:
        if self._queue is None:
            raise ClusterError("the queue was closed in this process")
        if self._pid != os.getpid():
            raise ClusterError(
                "this process was forked from one that is connected to Ray, and cannot use its "
                "queue. Start it with multiprocessing.get_context('spawn')."
            )
        return self._queue


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _load(address: str, copy_tensor: bool, data: bytes) -> SimpleQueue:
    settings = config.settings()
    if settings.address is None:
        settings = dataclasses.replace(settings, address=address)
    connect(settings)
    queue = SimpleQueue.__new__(SimpleQueue)
    queue._copy_tensor = copy_tensor
    queue._queue = ray.cloudpickle.loads(data)
    queue._pid = os.getpid()
    return queue
