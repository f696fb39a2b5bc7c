"""Transports carry frames between workers; directories know who is in the group.

Both are the seams of ``_protocol.transport``; ``tests/transports/test_contract.py`` holds what all
implementations promise.  ``open_transport``, here, is the only place that chooses one, and the
only module that knows both ``direct`` and ``ray``.

- ``direct``: connections between the workers, with another transport as the fallback;
- ``ray``: actor calls on the workers' actor endpoints, the directory's actor, and the cluster that
  they run on;
- ``memory``: workers of one process, for tests of all layers above;
- ``expected_replies``: matches replies that come by another transport than their calls;
- ``serving``: counts the threads that serve calls;
- ``encryption``: tells whether what goes over the network has to be encrypted;
- ``process_origin``: tells who started this process.

Invariants:

- A transport knows frames, not what is in them; it imports nothing of the runtime.
- Every call ends once, with a reply or an error of ``errors``; foreign errors are translated here.
- The directory alone decides who is a member and who died; a transport is notified of it by
  ``on_peer_lost``.
- Only ``ray`` imports Ray; its actors and what they unpickle (addresses) never load torch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

from rayrpc._concurrency.outcome import Outcome
from rayrpc._protocol.messages import Payload
from rayrpc._protocol.metrics import Sink
from rayrpc._protocol.transport import Directory, Transport
from rayrpc.config import Settings
from rayrpc.errors import ClusterError

__all__ = ["has_workers", "open_metrics", "open_objects", "open_transport", "watch_actor"]

logger = logging.getLogger(__name__)

Encode = Callable[[Outcome[Any]], Payload]
Decode = Callable[[bytes, Sequence[Any], Sequence[Any]], Any]


def open_transport(
    settings: Settings, key: str, worker: str, token: str
) -> tuple[Transport, Directory]:
    """Connect to the cluster and open the transport and directory that the settings name.

    Args:
        settings (Settings): ``address``, ``namespace``, ``transport``, and those of listening.
        key (str): names the group.
        worker (str): name of the worker that will use them.
        token (str): of its membership.

    Returns:
        The transport, which has its address, and the directory, which is not joined yet.

    Raises:
        ClusterError: no Ray cluster can be reached or started.
        GroupError: the directory cannot be reached or started.
    """
    # imported here: Ray takes long to load, and what it loads depends on the cluster
    from rayrpc._transports.ray.cluster import connect, through_client

    connect(settings)
    from rayrpc._transports.ray.directory_client import RayDirectory
    from rayrpc._transports.ray.transport import RayTransport

    directory = RayDirectory(key, settings.namespace, settings.peer_timeout)
    directory.reach(settings.init_timeout)
    transport = RayTransport(worker, token, settings.namespace)
    if settings.transport == "ray":
        return transport, directory
    if through_client():
        if settings.transport == "direct":
            transport.close()
            raise ClusterError(
                f"worker {worker!r} is outside of the cluster (Ray Client), where no peer can be "
                "reached directly; set transport to auto or ray"
            )
        return transport, directory
    from rayrpc._transports.direct.listening import Listening
    from rayrpc._transports.direct.tls import tls_of_ray
    from rayrpc._transports.direct.transport import DirectTransport

    only = settings.transport == "direct"
    is_encrypted, tls = tls_of_ray(os.environ)
    near_only = is_encrypted and tls is None
    listening = Listening(settings.listen_host, settings.listen_ports, settings.announce_host)
    direct = DirectTransport(
        transport,
        token,
        only=only,
        tls=tls,
        near_only=near_only,
        listening=listening,
        worker=worker,
        peer_timeout=settings.peer_timeout,
    )
    return direct, directory


def open_objects(worker: str, encode: Encode, decode: Decode) -> Any:
    """Return Ray's object store; its ``type`` is that of references to objects.

    Args:
        worker (str): name of the worker that will use it.
        encode (Callable): pickles a value or an error for an object.
        decode (Callable): a function of a module, which readers of objects import.
    """
    from rayrpc._transports.ray.objects import Codec, RayObjects

    return RayObjects(worker, Codec(encode, decode.__module__, decode.__qualname__))


def has_workers(settings: Settings, key: str) -> bool:
    """Tell whether a group has members that are no guests; connect to the cluster first.

    Args:
        settings (Settings): ``address`` and ``namespace``.
        key (str): names the group.

    Raises:
        ClusterError: no Ray cluster can be reached or started.
    """
    from rayrpc._transports.ray.cluster import connect

    connect(settings, starts=False)
    from rayrpc._transports.ray.inspection import describe

    described = describe(key, settings.namespace)
    if described is None:
        return False
    return any(not each.is_guest for members in described.sessions for each in members)


def watch_actor(on_exit: Callable[[], None]) -> Callable[[], None]:
    """Call a function when Ray ends the actor in whose process this is, if it is a program's.

    Returns:
        Ends the watch.
    """
    from rayrpc._transports.ray.actor_exit import ActorExit

    return ActorExit(on_exit).close


def open_metrics(warns: bool = False) -> Sink | None:
    """Return what records metrics; None with Ray Client, which has none.

    Args:
        warns: log it if the metrics of some process cannot be read.
    """
    from rayrpc._transports.ray.cluster import through_client
    from rayrpc._transports.ray.ray_metrics import RayMetrics, nodes_without_port

    if through_client():
        logger.warning("the setting metrics has no effect here: Ray Client records none")
        return None
    if warns and (nodes := nodes_without_port()):
        logger.warning(
            "the setting metrics is on, but Ray has no port to read them at on %s: install the "
            "extra rayrpc[metrics] (which is ray[default]) there, and start Ray again",
            ", ".join(nodes),
        )
    return RayMetrics()
