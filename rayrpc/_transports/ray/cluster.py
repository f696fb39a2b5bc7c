"""Connect this process to its Ray cluster; start a local one if no cluster is named.

A cluster is named by the settings, ``RAY_ADDRESS`` or the hosting actor.  If none is, all
processes of this user share a local cluster, which ends with the last of them:

    process ──(lease)──> local cluster's process ──(starts, ends)──> Ray

A *lease* is a connection to that process (``local_lease.py``, ``local_cluster.py``).
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import socket
import sys
import time
from typing import Any

from rayrpc._concurrency.deadlines import Deadline
from rayrpc._concurrency.notices import noticed
from rayrpc._transports.encryption import ray_uses_tls
from rayrpc._transports.ray import auth_token, forked_children
from rayrpc._transports.ray.local_lease import join_local
from rayrpc.config import Settings
from rayrpc.errors import ClusterError

__all__ = [
    "connect",
    "control_service_answers",
    "shut_down_at_exit",
    "through_client",
]

logger = logging.getLogger(__name__)

# What asks Ray's control service would hang for a minute if that has ended.
CONTROL_SECONDS = 5.0
CONTROL_RETRY_SECONDS = 0.2
REACH_SECONDS = 8.0  # for a cluster that may be just starting
EXIT_SECONDS = 0.5  # for its answer when this process ends
# How a client of HTTP/2 begins, and its settings, of which there are none (RFC 9113, section 3.4);
# gRPC's servers send theirs.
HTTP2_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

_has_connected = False  # this process, by itself


def connect(settings: Settings, starts: bool = True) -> None:
    """Connect this process to its Ray cluster, unless it is connected.

    Args:
        settings (Settings): the address and namespace, or the options of a local cluster.
        starts (bool): a local cluster is started if none runs.

    Raises:
        ClusterError: the named cluster cannot be reached, or no local one can be started; or the
            head node of the cluster that this process is connected to has ended.
    """
    logging.getLogger("rayrpc").setLevel(settings.log_level)
    address = settings.address or os.environ.get("RAY_ADDRESS") or None
    forked_children.prepare()
    if "ray" in sys.modules and sys.modules["ray"].is_initialized():
        _register_exit()
        _check_control_service()
        return
    if address in (None, "local"):
        address = join_local(settings, starts)
        auth_token.enable()
    else:
        _check_reachable(address)
        auth_token.enable_if_needed(address)
    import ray

    _register_exit()
    options: dict[str, Any] = {
        "address": address,
        "namespace": settings.namespace,
        "log_to_driver": False,
        "logging_level": settings.log_level,
        "configure_logging": False,
    }
    if settings.runtime_env:
        options["runtime_env"] = dict(settings.runtime_env)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    global _has_connected
    try:
        with noticed(f"the Ray cluster at {address}"):
            ray.init(**options)
        _has_connected = True
        forked_children.set_sigterm(on_sigterm)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as exc:
        raise ClusterError(
            f"cannot connect to the Ray cluster at {address!r}: {exc}. Check --address, "
            "RAY_ADDRESS and the config file; name none to use a local cluster."
        ) from exc


def _check_reachable(address: str) -> None:
    """Raise a ClusterError where Ray would try for minutes; others than ``host:port`` pass."""
    host, _, port = address.rpartition(":")
    if port.isdigit() and "/" not in host and not _has_control_service(address, REACH_SECONDS):
        raise ClusterError(
            f"no Ray cluster answers at {address!r} in {REACH_SECONDS:g} s. Check --address, "
            "RAY_ADDRESS and the config file, and that the head node runs (`ray status` there); "
            "name none to use a local cluster."
        )


@functools.cache
def shut_down_at_exit() -> None:
    """Have Ray disconnect when this process ends, after what is registered later; idempotent.

    Ray's own handler waits first until its logs are printed, which are not printed here.
    """
    import ray  # noqa: F401 - it registers its own first

    atexit.register(_shut_down)


def _shut_down() -> None:
    import ray

    if _has_connected:
        ray.shutdown()


@functools.cache
def _register_exit() -> None:
    """Have ``_end_waits`` called before ``ray.shutdown()``, when this process ends; idempotent."""
    import ray  # noqa: F401 - it registers its own first

    atexit.register(_end_waits)


def _end_waits() -> None:
    """End the threads that wait for Ray, if it would not end them itself."""
    import ray

    if ray.is_initialized() and not control_service_answers(EXIT_SECONDS):
        from rayrpc._transports.ray import ray_api

        ray_api.end_waits()


def _check_control_service() -> None:
    if not control_service_answers(CONTROL_SECONDS):
        import ray

        raise ClusterError(
            f"the control service (GCS) of the Ray cluster does not answer at "
            f"{ray.get_runtime_context().gcs_address}: the cluster's head node has ended, or is "
            "cut off. Start the cluster again."
        )


def control_service_answers(seconds: float) -> bool:
    """Tell whether the control service of this process's cluster answers.

    Its port takes connections also while its process is being ended, or is stopped.  Where Ray uses
    TLS, that is taken for an answer.

    Args:
        seconds: how long it may take.
    """
    import ray

    if through_client():
        return True
    return _has_control_service(ray.get_runtime_context().gcs_address, seconds)


def _has_control_service(address: str, seconds: float) -> bool:
    """Tell whether a control service answers at ``host:port``."""
    answers = _accepts if ray_uses_tls(os.environ) else _answers
    host, _, port = address.rpartition(":")
    deadline = Deadline(seconds)
    while not answers((host.strip("[]"), int(port)), deadline.within(seconds)):
        if deadline.expired:
            return False
        time.sleep(deadline.within(CONTROL_RETRY_SECONDS))
    return True


def _accepts(address: tuple[str, int], seconds: float) -> bool:
    """Tell whether a server takes a connection in so many seconds."""
    try:
        socket.create_connection(address, seconds).close()
    except OSError:
        return False
    return True


def _answers(address: tuple[str, int], seconds: float) -> bool:
    """Tell whether a server of gRPC answers in so many seconds."""
    try:
        with socket.create_connection(address, seconds) as connection:
            connection.sendall(HTTP2_BEGIN)
            return bool(connection.recv(1))
    except OSError:
        return False


def through_client() -> bool:
    """Tell whether this process uses Ray Client, from outside of the cluster's nodes."""
    import ray

    return bool(ray.util.client.ray.is_connected())
