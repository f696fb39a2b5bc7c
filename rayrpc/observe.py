"""See what a group does: its workers, the calls that wait, and which call waits for which."""

from __future__ import annotations

import json

from rayrpc._observe.group_status import GroupStatus, Silent
from rayrpc._runtime import current
from rayrpc.errors import CallError, NotInitializedError

__all__ = ["status"]


def status(timeout: float = 5.0) -> GroupStatus:
    """Return what the workers of this process's group do now.

    Args:
        timeout (float): in seconds; a worker that does not answer until then is listed as such.

    Returns:
        GroupStatus: ``workers``, ``calls``, ``silent`` and ``deadlocks``; ``str()`` gives a table,
        ``stacks()`` where the code of each worker is, and a notebook shows it as HTML.

    Raises:
        RuntimeError: RPC is not initialized.

    Example:
        >>> print(rpc.status())
        >>> print(rpc.status().stacks("trainer1"))

    Source: rayrpc's own; ``rayrpc status`` and ``rayrpc stack`` tell the same from outside.
    """
    if not current.is_set():
        raise NotInitializedError(
            "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."
        )
    agent = current.get_agent()
    reports, silent = [], []
    for member, answer in agent.inspect(b"stacks", timeout):
        if isinstance(answer, bytes):
            reports.append(json.loads(answer))
        else:
            why = str(answer) if isinstance(answer, CallError) else "does not answer"
            silent.append(Silent(member.name, member.node, member.pid, why))
    return GroupStatus(agent.key, str(agent.member.origin), reports, silent)
