"""What RRefs need of the layers above the runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["UserApi"]


class UserApi(Protocol):
    """The functions that users call, as they are at the moment of the call.

    Programs replace ``torch.distributed.rpc.api.rpc_sync`` and its like, and expect that the
    methods of RRefs follow.
    """

    @property
    def rpc_sync(self) -> Callable[..., Any]:
        """The function ``rpc_sync``."""

    @property
    def rpc_async(self) -> Callable[..., Any]:
        """The function ``rpc_async``."""

    @property
    def remote(self) -> Callable[..., Any]:
        """The function ``remote``."""

    def lazy(self, rref: Any, timeout: float) -> Any:
        """Return an ``Await`` of the value of an RRef."""

    def backward(self, context_id: int, roots: Sequence[Any], retain_graph: bool) -> None:
        """Run a backward pass of distributed autograd."""
