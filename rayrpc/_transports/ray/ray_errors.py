"""Ray's errors as errors of rayrpc."""

from __future__ import annotations

import re

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from rayrpc._protocol.membership import Member
from rayrpc.errors import CallError, CallLostError, WorkerDiedError

__all__ = ["cause_of", "translate"]


def cause_of(error: BaseException) -> str:
    """Return why Ray lost an actor or a reply, in one line."""
    text = " ".join(_plain(error).split())
    if "Ray has not been started" in text:
        return "Ray was shut down in this process; call rpc.shutdown() before ray.shutdown()"
    if "owner has died" in text or "owner has exited" in text:
        return "its process died, or exited without shutdown()"
    if "ray.kill" in text:
        return "it was ended by ray.kill or by the process that started it"
    if "node has died" in text or "node was dead" in text:
        return "its node died"
    detail = re.search(r"exit detail: (.*?\.)(?: |$)", text)
    if detail:
        return f"its process died: {detail.group(1)}"
    found = re.search(r"because (.*)", text)
    return (found.group(1) if found else text)[:300].strip()


def _plain(error: BaseException) -> str:
    return re.sub(r"\x1b\[\d+m", "", str(error))


def translate(peer: Member, error: BaseException) -> CallError:
    """Return the rayrpc error for an error of Ray on a call to ``peer``."""
    if isinstance(error, RayTaskError):
        return CallError(f"RPC worker {peer.name!r} could not handle a call: {_plain(error)}")
    if isinstance(error, ActorUnavailableError):
        return CallLostError(
            f"The connection to RPC worker {peer.name!r} on node {peer.node} was cut during a "
            f"call: whether the function ran is not known ({cause_of(error)}). Call again if it "
            "may run twice."
        )
    if isinstance(error, RayActorError):
        return WorkerDiedError(peer.name, cause_of(error), peer.node)
    return CallLostError(f"The reply of RPC worker {peer.name!r} was lost: {cause_of(error)}")
