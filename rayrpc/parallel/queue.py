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
    """Send objects between any processes of the cluster, first in, first out.

    The queue can be sent as an argument to ranks, pools, Ray's tasks, and spawned processes of
    ``multiprocessing``.  It lives as long as the program that made it.

    Args:
        ctx: accepted for machin's sake: no context of ``multiprocessing`` is needed.
        copy_tensor (bool): send tensors by value.  Else ``get`` returns tensors in the memory that
            ``put`` was given, which is moved to shared memory; both are on the same node.

    Raises:
        ClusterError: no Ray cluster can be reached or started.

    Source: ``machin.parallel.queue.SimpleQueue``, on ``ray.util.queue.Queue``.
    """

    def __init__(self, *, ctx: Any = None, copy_tensor: bool = False) -> None:
        connect(config.settings())
        self._open(ray.util.queue.Queue(actor_options={"num_cpus": 0}), copy_tensor)

    def _open(self, queue: Any, copy_tensor: bool) -> None:
        self._copy_tensor = copy_tensor
        self._queue: Any = queue
        self._pid = os.getpid()

    @classmethod
    def _load(cls, address: str, copy_tensor: bool, data: bytes) -> SimpleQueue:
        """Unpickle a queue, in a process that may have to connect to the cluster first."""
        settings = config.settings()
        if settings.address is None:
            settings = dataclasses.replace(settings, address=address)
        connect(settings)
        queue = cls.__new__(cls)
        queue._open(ray.cloudpickle.loads(data), copy_tensor)
        return queue

    def __reduce__(self) -> Any:
        address = ray.get_runtime_context().gcs_address
        return self._load, (address, self._copy_tensor, ray.cloudpickle.dumps(self._queue))

    def put(self, obj: Any) -> None:
        """Put an object into the queue.

        Args:
            obj: to send; local functions and lambdas can be pickled, too.

        Raises:
            TypeError, pickle.PicklingError: ``obj`` cannot be pickled.
            ClusterError: the queue was closed, or this process was forked.

        Source: ``machin.parallel.queue.SimpleQueue.put``.
        """
        data = dumps(obj, copy_tensor=self._copy_tensor)
        self._check_open().put((_node(), data))

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the next object, and remove it from the queue.

        Args:
            timeout (float, optional): in seconds; None: without limit.

        Returns:
            The object.

        Raises:
            TimeoutError: the queue was empty until the timeout.
            SerializationError: the object refers to memory of another node.
            ClusterError: the queue was closed, or this process was forked.

        Source: ``machin.parallel.queue.SimpleQueue.get``.
        """
        queue = self._check_open()
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

    # machin's names of put and get for a process that is the only one to call them
    quick_put = put
    quick_get = get

    def empty(self) -> bool:
        """Tell whether the queue is empty at the moment.

        Returns:
            bool: False if ``get`` would return at once, unless another process is faster.

        Raises:
            ClusterError: the queue was closed, or this process was forked.

        Source: ``machin.parallel.queue.SimpleQueue.empty``.
        """
        return bool(self._check_open().empty())

    def close(self) -> None:
        """End the queue, for all processes.

        Raises:
            ClusterError: the queue was closed already, or this process was forked.

        Source: ``machin.parallel.queue.SimpleQueue.close``.
        """
        self._check_open().shutdown()
        self._queue = None

    def _check_open(self) -> Any:
        if self._queue is None:
            raise ClusterError("the queue was closed in this process: make another one")
        if self._pid != os.getpid():
            raise ClusterError(
                "this process was forked from one that is connected to Ray, and cannot use its "
                "queue. Start it with multiprocessing.get_context('spawn')."
            )
        return self._queue


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())
