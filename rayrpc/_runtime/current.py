"""The agents of this process: the default group's, and those of other groups."""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from rayrpc._runtime.agent import Agent
from rayrpc._runtime.rrefs.home import NO_AGENT, set_home
from rayrpc.errors import NotInitializedError

__all__ = [
    "NOT_INITIALIZED",
    "add",
    "agents",
    "any_agent",
    "default",
    "find",
    "get_agent",
    "has_left",
    "initialized_agent",
    "is_set",
    "leave",
    "names",
    "remove",
    "require_initialized",
    "set_agent",
]

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

NOT_INITIALIZED = "RPC has not been initialized. Call torch.distributed.rpc.init_rpc first."

_agent: Agent | None = None  # the default group's
_others: dict[str, Agent] = {}  # by the names of their groups


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
    """Return the agent, for a function that users call.

    Raises:
        NotInitializedError: there is none; in torch's words.
    """
    if _agent is None:
        raise NotInitializedError(NOT_INITIALIZED)
    return _agent


def require_initialized(func: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function that raises torch's error before ``init_rpc``."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        initialized_agent()
        return func(*args, **kwargs)

    return wrapper


def any_agent() -> Agent:
    """Return the agent of the default group, else that of another; see ``initialized_agent``."""
    return next(iter(_others.values())) if _agent is None and _others else initialized_agent()


def set_agent(agent: Agent | None) -> None:
    """Make an agent, or none, the default group's."""
    global _agent
    _agent = agent
    set_home(agent)
    _register()


def default() -> Agent | None:
    """Return the default group's agent, if there is one."""
    return _agent


def add(agent: Agent) -> None:
    """Add an agent of another group."""
    _others[agent.key] = agent
    _register()


def remove(agent: Agent) -> None:
    """Remove an agent of another group."""
    if _others.get(agent.key) is agent:
        del _others[agent.key]


def find(group: str) -> Agent | None:
    """Return the agent of a group that this process is in, if it is."""
    return next((agent for agent in agents() if agent.key == group), None)


def names() -> list[str]:
    """Return the names of the groups that this process is in."""
    return [agent.key for agent in agents()]


def leave(agent: Agent) -> None:
    """Stop an agent that the program did not shut down: its threads must end before Ray's."""
    try:
        agent.shutdown()
    except Exception:
        logger.warning("could not leave the group at the end of the process", exc_info=True)


def agents() -> list[Agent]:
    """Return the agents of all groups that this process is in, the default one's first."""
    return [*(agent for agent in (_agent,) if isinstance(agent, Agent)), *_others.values()]


@functools.cache
def _forget_after_fork() -> None:
    # a forked child has neither the agents' threads nor their connections
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    _others.clear()
    set_agent(None)


def _register() -> None:
    _forget_after_fork()
    atexit.unregister(_leave_all)
    if _agent is not None or _others:
        atexit.register(_leave_all)  # so it runs before what the transport's libraries registered


def _leave_all() -> None:
    for agent in (_agent, *_others.values()):
        if agent is not None:
            leave(agent)
