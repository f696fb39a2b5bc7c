"""The agent of this process."""

from __future__ import annotations

import atexit
import logging
import os

from rayrpc._runtime.agent import Agent
from rayrpc._runtime.rrefs.home import NO_AGENT, set_home
from rayrpc.errors import NotInitializedError

__all__ = [
    "NOT_INITIALIZED",
    "get_agent",
    "has_left",
    "initialized_agent",
    "is_set",
    "leave",
    "set_agent",
]

logger = logging.getLogger(__name__)

NOT_INITIALIZED = "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."

_agent: Agent | None = None
_forgets_after_fork = False


def is_set() -> bool:
    """Tell whether ``init_rpc`` was called, and ``shutdown`` not yet."""
    return _agent is not None


def has_left() -> bool:
    """Tell whether the agent has left its group by itself, as Ray was ending this process."""
    return isinstance(_agent, Agent) and _agent.has_left


def get_agent() -> Agent:
    """Return the agent.

    Raises:
        NotInitializedError: there is none.
    """
    if _agent is None:
        raise NotInitializedError(NO_AGENT)
    return _agent


def initialized_agent() -> Agent:
    """Return the agent, to a function that users call.

    Raises:
        NotInitializedError: there is none; in torch's words.
    """
    if _agent is None:
        raise NotInitializedError(NOT_INITIALIZED)
    return _agent


def set_agent(agent: Agent | None) -> None:
    """Make an agent, or none, the current one."""
    global _agent, _forgets_after_fork
    _agent = agent
    set_home(agent)
    if not _forgets_after_fork:
        # a forked child has neither the agent's threads nor its connections
        os.register_at_fork(after_in_child=lambda: set_agent(None))
        _forgets_after_fork = True
    atexit.unregister(leave)
    if agent is not None:
        atexit.register(leave)  # so it runs before what the transport's libraries registered


def leave() -> None:
    """Stop an agent that the program did not shut down: its threads must end before Ray's."""
    if _agent is not None:
        try:
            _agent.shutdown()
        except Exception:
            logger.warning("could not leave the group at the end of the process", exc_info=True)
