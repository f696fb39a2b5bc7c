"""Distributed autograd: not part of this release.

A context of torch's own would be entered without an error and then miss every gradient that
crosses a call, so ``install()`` replaces it by one that says so.
"""

from __future__ import annotations

from typing import Any, NoReturn

from rayrpc.errors import RpcError

__all__ = ["backward", "context", "get_gradients"]

_MISSING = (
    "Distributed autograd is not part of this release of rayrpc: send gradients by hand, as "
    "tensors, or keep each backward pass on one worker."
)


class context:
    """Refuse to open a distributed autograd context.

    Raises:
        RuntimeError: always.

    Source: ``torch.distributed.autograd.context``.
    """

    def __enter__(self) -> NoReturn:
        raise RpcError(_MISSING)

    def __exit__(self, *error: Any) -> None:
        return None


def backward(context_id: int, roots: Any, retain_graph: bool = False) -> NoReturn:
    """Refuse to run a distributed backward pass.

    Raises:
        RuntimeError: always.
    """
    raise RpcError(_MISSING)


def get_gradients(context_id: int) -> NoReturn:
    """Refuse to return the gradients of a context.

    Raises:
        RuntimeError: always.
    """
    raise RpcError(_MISSING)


def _get_debug_info() -> dict[str, str]:
    """Return torch's counters; there are no contexts."""
    return {"num_current_backward_passes": "0", "num_autograd_contexts": "0"}
