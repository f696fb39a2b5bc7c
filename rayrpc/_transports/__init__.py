"""How frames travel: ``open_transport`` is the only place that chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rayrpc.errors import ClusterError

if TYPE_CHECKING:
    from rayrpc._protocol.transport import Directory, Transport
    from rayrpc.config import Settings

__all__ = ["open_transport"]


def open_transport(
    settings: Settings, key: str, worker: str, token: str
) -> tuple[Transport, Directory]:
    """Connect to the cluster and open the transport and directory that the settings name.

    Args:
        settings (Settings): ``address``, ``namespace`` and ``transport`` count here.
        key (str): names the group.
        worker (str): name of the worker that will use them.
        token (str): of its membership.

    Returns:
        The transport, its address known, and the directory, not joined yet.

    Raises:
        ClusterError: no Ray cluster can be reached or started.
        GroupError: the directory cannot be reached or started.
    """
    from rayrpc._transports.ray.cluster import connect, through_client

    connect(settings)
    from rayrpc._transports.ray.directory import RayDirectory
    from rayrpc._transports.ray.transport import RayTransport

    directory = RayDirectory(key, settings.namespace)
    # Each actor's process costs Ray nearly a second of CPU. Joining needs the directory alone, so
    # that starts first, and the relays when the group is complete.
    directory.reach(settings.init_timeout)
    transport = RayTransport(worker, token, settings.namespace, lambda: directory.decided(token))
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
    from rayrpc._transports.direct.transport import DirectTransport

    return DirectTransport(transport, token, only=settings.transport == "direct"), directory
