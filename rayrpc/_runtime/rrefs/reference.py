"""What proxies, lazy values and backward passes need of an RRef."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from rayrpc._protocol.ids import WorkerInfo
from rayrpc._runtime.user_api import UserApi
from rayrpc.options import UNSET_RPC_TIMEOUT

__all__ = ["Reference"]

T_co = TypeVar("T_co", covariant=True)


class Reference(Protocol[T_co]):
    """A reference to a value; ``RRef`` is the one implementation."""

    def is_owner(self) -> bool:
        """Tell whether this worker owns the value."""

    def owner(self) -> WorkerInfo:
        """Return the WorkerInfo of the owner."""

    def local_value(self) -> T_co:
        """Return the value; only on its owner."""

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T_co:
        """Return the value or a copy."""

    def _get_api(self) -> UserApi:
        """Return the functions that call workers of its group."""

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Return the type of the value, or a Future of it (torch's name)."""
