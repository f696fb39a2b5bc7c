"""The functions of ``torch._C._distributed_rpc`` on the agent of this process."""

from __future__ import annotations

from typing import Any

from rayrpc._runtime import current
from rayrpc._runtime.agent import Agent

__all__ = [
    "_cleanup_python_rpc_handler",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_destroy_rref_context",
    "_get_debug_info",
    "_reset_current_rpc_agent",
    "_rref_context_get_debug_info",
    "_set_and_start_rpc_agent",
    "_set_rpc_timeout",
    "enable_gil_profiling",
    "get_rpc_timeout",
]

# -- the agent ----------------------------------------------------------------------------------


def _set_and_start_rpc_agent(agent: Any) -> None:
    # in this order: the first call may come at once, and use RPC itself
    current.set_agent(agent)
    if isinstance(agent, Agent):
        agent.start()


def _reset_current_rpc_agent() -> None:
    current.set_agent(None)


def _cleanup_python_rpc_handler() -> None:
    """Do nothing: rayrpc has no native handler."""


# -- timeouts -----------------------------------------------------------------------------------


def get_rpc_timeout() -> float:
    """Return the default timeout of calls.

    Returns:
        In seconds; 0: none.

    Raises:
        RuntimeError: RPC is not initialized.

    Source: ``torch.distributed.rpc.get_rpc_timeout``.
    """
    return current.get_agent().default_timeout or 0.0


def _set_rpc_timeout(rpcTimeoutSeconds: float) -> None:
    """Set the default timeout of calls in seconds; 0: none."""
    agent = current.initialized_agent()
    agent.default_timeout = agent.resolve_timeout(rpcTimeoutSeconds)


# -- RRefs --------------------------------------------------------------------------------------


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 10.0) -> None:
    current.get_agent().rrefs.delete_all(timeout)


def _destroy_rref_context(ignore_leak: bool) -> None:
    if not ignore_leak:
        current.get_agent().rrefs.check_leaks()


# -- counters -----------------------------------------------------------------------------------


def _rref_context_get_debug_info() -> dict[str, str]:
    """Return counters of RRefs."""
    return current.initialized_agent().rrefs.debug_info()


def _get_debug_info() -> dict[str, str]:
    """Return all counters: of RRefs, of the agent, of distributed autograd."""
    agent = current.initialized_agent()
    info = {**agent.rrefs.debug_info(), **agent.get_debug_info()}
    for hook in agent.hooks:
        info.update(hook.debug_info())
    return info


def enable_gil_profiling(flag: bool) -> None:
    """Measure how long the threads that serve calls wait for Python's lock, from now on, or not.

    The average is ``agent.gil_average_wait_time_us`` in the agent's ``get_debug_info()``.

    Args:
        flag (bool): whether to measure; the sums are reset.

    Raises:
        RuntimeError: RPC is not initialized.

    Source: ``torch.distributed.rpc.enable_gil_profiling``.
    """
    current.get_agent()._enable_gil_profiling(flag)
