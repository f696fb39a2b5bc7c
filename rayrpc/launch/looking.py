"""``rayrpc status`` and ``rayrpc stack``: look at the groups of a cluster from another terminal."""

from __future__ import annotations

import os

import ray

from rayrpc._observe.group_status import GroupStatus
from rayrpc._transports.ray.cluster import connect
from rayrpc._transports.ray.inspection import GroupAnswers, ask_groups
from rayrpc._transports.ray.local_lease import other_local_clusters
from rayrpc.config import Settings

__all__ = ["elsewhere", "look", "rays_commands"]


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


def rays_commands() -> str:
    """Return a line that says how Ray's own commands find the cluster that ``look`` has found.

    Those of Ray's state API, such as ``ray list actors``, need the setting ``dashboard``, too.
    """
    address = f"RAY_ADDRESS={ray.get_runtime_context().gcs_address}"
    mode = os.environ.get("RAY_AUTH_MODE")
    return f"Ray's own status: {address}{f' RAY_AUTH_MODE={mode}' if mode else ''} ray status"


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
