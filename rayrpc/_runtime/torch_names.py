"""Private functions of ``torch.distributed.rpc.api`` that programs call, and rayrpc does not."""

from __future__ import annotations

from typing import Any

from torch.futures import Future

from rayrpc._protocol.ids import WorkerInfo
from rayrpc._runtime import current
from rayrpc._runtime.invocation import Args, Invocation, Kwargs, To
from rayrpc._runtime.rrefs.handle import RRef
from rayrpc._runtime.rrefs.value_type import _rref_typeof_on_owner
from rayrpc.options import UNSET_RPC_TIMEOUT

__all__ = [
    "_invoke_rpc",
    "_rref_typeof_on_owner",
    "_rref_typeof_on_user",
    "_to_worker_info",
]


def _to_worker_info(to: str | int | WorkerInfo) -> WorkerInfo:
    """Return the WorkerInfo that a destination names."""
    return to if isinstance(to, WorkerInfo) else current.get_agent().get_worker_info(to)


def _invoke_rpc(
    to: To,
    func: Any,
    rpc_type: Any,
    args: Args = None,
    kwargs: Kwargs = None,
    rpc_timeout: float = UNSET_RPC_TIMEOUT,
) -> Future[Any]:
    """Return the Future of a call, which ``_wait_all`` does not wait for."""
    agent = current.get_agent()
    invocation = Invocation(func, args or (), kwargs or {})
    future: Future[Any] = agent.caller.future(
        agent.lookup(to), invocation, agent.resolve_timeout(rpc_timeout)
    )
    return future


def _rref_typeof_on_user(
    rref: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True
) -> Any:
    """Return the type of a value at its owner, or a Future of it."""
    return rref._get_type(timeout, blocking)
