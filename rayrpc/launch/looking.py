"""``rayrpc status`` and ``rayrpc stack``: look at the groups of a cluster from another terminal."""

from __future__ import annotations

import os

from rayrpc._observe.group_status import GroupStatus
from rayrpc._transports.ray.cluster import connect
from rayrpc._transports.ray.inspection import GroupAnswers, ask_groups
from rayrpc._transports.ray.local_lease import other_local_clusters
from rayrpc.config import Settings

__all__ = ["elsewhere", "look"]


def look(settings: Settings, with_stacks: bool, seconds: float = 5.0) -> list[GroupStatus]:
    """Return the state of all groups on a cluster.

    Args:
        settings (Settings): name the cluster; none: the one that rayrpc has started for this user.
        with_stacks (bool): with where the users' code is.
        seconds (float): how long a worker may take to answer.

    Raises:
        ClusterError: no cluster can be reached.
    """
    connect(settings, starts=False)
    what = b"stacks" if with_stacks else b""
    return [_status(group) for group in ask_groups(what, seconds)]


def elsewhere(settings: Settings) -> str:
    """Return a line that names this user's other local clusters; empty: there is none, or ``look``
    was given a cluster.

    Args:
        settings (Settings): as for ``look``.
    """
    if settings.address or os.environ.get("RAY_ADDRESS"):
        return ""
    others = other_local_clusters()
    return f"other local clusters, for --address: {', '.join(others)}" if others else ""


def _status(group: GroupAnswers) -> GroupStatus:
    members = [member for member, _ in [*group.answers, *group.joining]]
    owner = str(members[0].origin) if members else ""
    return GroupStatus.of(group.key, owner, group.answers, group.joining)
