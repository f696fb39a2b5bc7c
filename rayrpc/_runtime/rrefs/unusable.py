"""The errors of RRefs that cannot be used: deleted, lost, failed, or of another group."""

from __future__ import annotations

from rayrpc._concurrency.outcome import Error, Outcome, fresh
from rayrpc._protocol.ids import GloballyUniqueId, WorkerInfo
from rayrpc._runtime.rrefs.home import Home
from rayrpc.errors import CallTimeoutError, RpcError, WorkerDiedError

__all__ = ["deleted", "foreign", "raise_creation_timeout"]


def deleted(
    home: Home, owner: WorkerInfo, ids: tuple[GloballyUniqueId, GloballyUniqueId], action: str
) -> RpcError | WorkerDiedError:
    """Return the error of using a fork that this worker does not hold any more.

    Args:
        home: the handle's worker.
        owner: of the value.
        ids: of the RRef and of the fork.
        action: what the user wants to do with it.
    """
    lost = home.members.death_of_owner(owner)
    if lost is not None and not home.has_left:
        return lost
    return RpcError(
        f"User RRef with RRefId={ids[0]} and ForkId={ids[1]} has been deleted. Cannot call "
        f"{action} after deletion."
    )


def foreign(rref: object, home: Home, group: str) -> RpcError:
    """Return the error of sending an RRef in a call of another group.

    Args:
        rref: the handle.
        home: its worker.
        group: key of the other group.
    """
    if home.has_left:
        return RpcError(f"{rref} is of group {home.key!r}, which this worker has left")
    return RpcError(
        f"{rref} is of group {home.key!r}, and cannot be sent in group {group!r}: send its value, "
        "or an ObjectRef of it (rref.object_ref())"
    )


def raise_creation_timeout(outcome: Outcome[object] | None) -> None:
    """Raise if the call that was to create the value has timed out.

    Args:
        outcome: of that call; None: it has none yet.
    """
    if not isinstance(outcome, Error):
        return
    outcome.is_known = True
    if isinstance(outcome.error, CallTimeoutError):
        raise CallTimeoutError(
            "RRef creation via rpc.remote timed out, and it is possible that the RRef on the "
            f"owner node does not exist: {outcome.error}"
        ) from fresh(outcome.error)
