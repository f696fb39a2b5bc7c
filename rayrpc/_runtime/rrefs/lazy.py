"""Values of RRefs that are fetched when they are first used."""

from __future__ import annotations

from typing import Any, TypeVar

from rayrpc._runtime.awaitable import Await
from rayrpc._runtime.rrefs.reference import Reference
from rayrpc.options import UNSET_RPC_TIMEOUT

__all__ = ["LazyRemote"]

W = TypeVar("W")

_set = object.__setattr__  # setattr of an Await sets attributes of its value


class LazyRemote(Await[W]):
    """The value of an RRef, fetched when it is first used; it pickles as the RRef.

    Args:
        rref (RRef): references the value.
        timeout (float): of the fetch, in seconds; 0: none; not given: the default.
    """

    def __init__(self, rref: Reference[W], timeout: float = UNSET_RPC_TIMEOUT) -> None:
        super().__init__()
        _set(self, "_await_rref", rref)
        _set(self, "_await_timeout", timeout)

    def _wait_impl(self) -> W:
        rref: Reference[W] = self._await_rref
        if rref.is_owner():
            return rref.local_value()
        return rref.to_here(timeout=self._await_timeout)

    def _await_source(self) -> str:
        return f"{self._await_rref} on {self._await_rref.owner_name()}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return LazyRemote, (self._await_rref, self._await_timeout)
