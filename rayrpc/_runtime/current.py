"""The agent of this process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rayrpc.errors import NotInitializedError

if TYPE_CHECKING:
    from rayrpc._runtime.agent import Agent

__all__ = ["get_agent", "is_set", "set_agent"]

_agent: Agent | None = None


def is_set() -> bool:
    """Tell whether ``init_rpc`` was called, and ``shutdown`` not yet."""
    return _agent is not None


def get_agent() -> Agent:
    """Return the agent.

    Raises:
        NotInitializedError: there is none.
    """
    if _agent is None:
        raise NotInitializedError(
            "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling "
            "`rpc.init_rpc`)?"
        )
    return _agent


def set_agent(agent: Agent | None) -> None:
    """Make an agent, or none, the current one."""
    global _agent
    _agent = agent


# A forked child has neither the agent's threads nor its connections.
os.register_at_fork(after_in_child=lambda: set_agent(None))
