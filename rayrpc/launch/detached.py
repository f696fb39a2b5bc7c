"""Workers that outlive the program that has started them, and their end."""

from __future__ import annotations

import contextlib
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup

from rayrpc import config
from rayrpc._protocol.rendezvous import owned_key
from rayrpc._transports.process_origin import this_origin
from rayrpc._transports.ray.cluster import connect
from rayrpc._transports.ray.inspection import describe
from rayrpc.errors import GroupError
from rayrpc.launch.starting import end_hosted

__all__ = ["reservation_name", "stop_group"]


def reservation_name(group: str) -> str:
    """Return how the names of the resources begin that are reserved for a group's workers."""
    return f"rayrpc-group:{group}:"


def stop_group(settings: config.Settings, group: str) -> str:
    """End the workers of a group that are actors, and release their resources.

    Args:
        settings: where the cluster is.
        group: its name, or its key as ``rayrpc status`` shows it.

    Returns:
        What was done, as a text.

    Raises:
        ClusterError: no cluster can be reached.
        GroupError: there is no such group.
    """
    connect(settings, starts=False)
    origin = this_origin()
    group = group.removeprefix(f"{origin.user}/")
    described = describe(owned_key(group, origin), settings.namespace)
    members = [] if described is None else [each for one in described.sessions for each in one]
    if not members:
        raise GroupError(f"no group {group!r} of yours is on the cluster: see `rayrpc status`")
    hosted: dict[str, Any] = {}
    left = []
    for member in members:
        with contextlib.suppress(ValueError):  # it has just ended
            actor = member.address.find()
            if hasattr(actor, "leave_group"):
                hosted[member.name] = actor
            else:  # a process of some program, with a relay
                left.append(f"{member.name} (process {member.pid} on {member.node})")
    end_hosted(hosted.values())
    _release(reservation_name(group))
    ended = f"ended {', '.join(sorted(hosted))}" if hosted else "no worker of it is an actor"
    others = f"; still in it: {', '.join(left)}" if left else ""
    return f"group {group!r}: {ended}{others}"


def _release(prefix: str) -> None:
    """Release what is reserved under names that begin so."""
    for text, entry in ray.util.placement_group_table().items():
        if entry["name"].startswith(prefix) and entry["state"] != "REMOVED":
            with contextlib.suppress(RayError):  # someone else has
                number = ray.PlacementGroupID(bytes.fromhex(text))
                ray.util.remove_placement_group(PlacementGroup(number))
