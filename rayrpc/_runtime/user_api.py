"""What RRefs need of the layers above the runtime."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

__all__ = ["ModuleApi", "UserApi"]


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

    def backward(self, context_id: int, roots: Sequence[Any], retain_graph: bool) -> None:
        """Run a backward pass of distributed autograd."""


class ModuleApi:
    """A ``UserApi`` whose functions are looked up in a module at each use.

    Args:
        module (ModuleType): has ``rpc_sync``, ``rpc_async`` and ``remote``.
        backward (Callable): runs a backward pass; see ``UserApi``.
    """

    def __init__(
        self,
        module: ModuleType,
        backward: Callable[[int, Sequence[Any], bool], None],
    ) -> None:
        self._module = module
        self.backward = backward

    @property
    def rpc_sync(self) -> Callable[..., Any]:
        """The function ``rpc_sync``."""
        return self._module.rpc_sync  # type: ignore[no-any-return]

    @property
    def rpc_async(self) -> Callable[..., Any]:
        """The function ``rpc_async``."""
        return self._module.rpc_async  # type: ignore[no-any-return]

    @property
    def remote(self) -> Callable[..., Any]:
        """The function ``remote``."""
        return self._module.remote  # type: ignore[no-any-return]
