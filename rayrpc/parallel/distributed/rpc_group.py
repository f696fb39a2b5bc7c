"""Groups of processes that call one another, share values and offer services by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch.futures import Future

from rayrpc import api
from rayrpc._runtime import current
from rayrpc.options import UNSET_RPC_TIMEOUT
from rayrpc.parallel.distributed.barrier import wait_for_members
from rayrpc.parallel.distributed.registry import SERVICE, VALUE, call_service, get_value
from rayrpc.rref_proxy import RRef

__all__ = ["RpcGroup", "groups"]

P = ParamSpec("P")
T = TypeVar("T")

# The groups that this process has created, by name.
groups: dict[str, RpcGroup] = {}


def _for_members(
    method: Callable[Concatenate[RpcGroup, P], T],
) -> Callable[Concatenate[RpcGroup, P], T]:
    @functools.wraps(method)
    def checked(self: RpcGroup, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self.is_member():
            raise RuntimeError(
                f"RpcGroup.{method.__name__} is for members: process {self.get_cur_name()!r} is "
                f"not in group {self.group_name!r} of {self.group_members}"
            )
        return method(self, *args, **kwargs)

    return checked


class RpcGroup:
    """Call the members of a group of processes, and find their values and services by keys.

    Made by ``World.create_rpc_group``.  A group can be sent to other processes, also to ones that
    are no members.  The values and services of a process are lost when it dies.

    Args:
        group_name (str): unique in the world.
        group_members (list[str]): names of the processes.
        first_create (bool): accepted for machin's sake.

    Source: ``machin.parallel.distributed.RpcGroup``.
    """

    def __init__(
        self, group_name: str, group_members: list[str], first_create: bool = True
    ) -> None:
        self.group_name = group_name
        self.group_members = sorted(group_members)
        self.destroyed = False

    # -- calls --------------------------------------------------------------------------------

    def rpc_sync(
        self,
        to: str,
        func: Callable[..., T],
        timeout: float = UNSET_RPC_TIMEOUT,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> T:
        """Call a function on a member, and wait for its result.

        Args:
            to (str): name of the member.
            func (Callable): to call.
            timeout (float): in seconds; 0: without limit; default: the world's.
            args (tuple): its arguments.
            kwargs (dict, optional): its keyword arguments.

        Returns:
            What ``func`` returns.

        Raises:
            RuntimeError: ``to`` is no member, or the timeout is over.
            WorkerDiedError: the member died.
            Exception: what ``func`` raises.

        Source: ``machin.parallel.distributed.RpcGroup.rpc_sync``.
        """
        result: T = api.rpc_sync(self._member(to), func, args, kwargs, timeout)
        return result

    def rpc_async(
        self,
        to: str,
        func: Callable[..., T],
        timeout: float = UNSET_RPC_TIMEOUT,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Future[T]:
        """Call a function on a member, without waiting.

        Args:
            to, func, timeout, args, kwargs: as for ``rpc_sync``.

        Returns:
            Future: of what ``func`` returns; its ``wait`` raises what ``rpc_sync`` does.

        Raises:
            RuntimeError: ``to`` is no member.

        Source: ``machin.parallel.distributed.RpcGroup.rpc_async``.
        """
        future: Future[T] = api.rpc_async(self._member(to), func, args, kwargs, timeout)
        return future

    def remote(
        self,
        to: str,
        func: Callable[..., T],
        timeout: float = UNSET_RPC_TIMEOUT,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> RRef[T]:
        """Call a function on a member, and keep its result there.

        Args:
            to, func, timeout, args, kwargs: as for ``rpc_sync``.

        Returns:
            RRef: of what ``func`` returns, owned by ``to``; using it raises what ``rpc_sync``
            does.

        Raises:
            RuntimeError: ``to`` is no member.

        Source: ``machin.parallel.distributed.RpcGroup.remote``.
        """
        rref: RRef[T] = api.remote(self._member(to), func, args, kwargs, timeout)
        return rref

    def _member(self, to: str) -> str:
        if not self.is_member(to):
            raise RuntimeError(
                f"process {to!r} is not in group {self.group_name!r}: it has {self.group_members}"
            )
        return to

    # -- values -------------------------------------------------------------------------------

    @_for_members
    def pair(self, key: Hashable, value: Any) -> None:
        """Publish a value of this process in the group.

        Args:
            key (Hashable): unique among the group's values.
            value: stays here; other processes get RRefs of it.

        Raises:
            KeyError: the key is paired already.
            RuntimeError: this process is no member.

        Source: ``machin.parallel.distributed.RpcGroup.pair``.
        """
        VALUE.publish(self.group_name, key, value)

    @_for_members
    def unpair(self, key: Hashable) -> None:
        """Withdraw a value of this process.

        Args:
            key (Hashable): of the value.

        Raises:
            KeyError: this process has not paired the key.
            RuntimeError: this process is no member.

        Source: ``machin.parallel.distributed.RpcGroup.unpair``.
        """
        VALUE.withdraw(self.group_name, key)

    def is_paired(self, key: Hashable) -> bool:
        """Tell whether a value is published in the group.

        Args:
            key (Hashable): of the value.

        Returns:
            bool: True if a living process has paired the key.

        Source: ``machin.parallel.distributed.RpcGroup.is_paired``.
        """
        return VALUE.find(self.group_name, key) is not None

    def get_paired(self, key: Hashable) -> RRef[Any]:
        """Return an RRef of a published value.

        Args:
            key (Hashable): of the value.

        Returns:
            RRef: owned by the process that paired the key.

        Raises:
            KeyError: no living process has paired the key.

        Source: ``machin.parallel.distributed.RpcGroup.get_paired``.
        """
        holder = VALUE.holder(self.group_name, key)
        rref: RRef[Any] = api.remote(holder, get_value, args=(self.group_name, key))
        return rref

    # -- services -----------------------------------------------------------------------------

    @_for_members
    def register(self, key: Hashable, service: Callable[..., Any]) -> None:
        """Offer a function of this process to the group.

        Args:
            key (Hashable): unique among the group's services.
            service (Callable): runs here when it is called.

        Raises:
            KeyError: the key is registered already.
            RuntimeError: this process is no member.

        Source: ``machin.parallel.distributed.RpcGroup.register``.
        """
        SERVICE.publish(self.group_name, key, service)

    @_for_members
    def deregister(self, key: Hashable) -> None:
        """Withdraw a service of this process.

        Args:
            key (Hashable): of the service.

        Raises:
            KeyError: this process has not registered the key.
            RuntimeError: this process is no member.

        Source: ``machin.parallel.distributed.RpcGroup.deregister``.
        """
        SERVICE.withdraw(self.group_name, key)

    def is_registered(self, key: Hashable) -> bool:
        """Tell whether a service is offered in the group.

        Args:
            key (Hashable): of the service.

        Returns:
            bool: True if a living process has registered the key.

        Source: ``machin.parallel.distributed.RpcGroup.is_registered``.
        """
        return SERVICE.find(self.group_name, key) is not None

    def registered_sync(
        self, key: Hashable, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a service, and wait for its result.

        Args:
            key (Hashable): of the service.
            args (tuple): its arguments.
            kwargs (dict, optional): its keyword arguments.

        Returns:
            What the service returns.

        Raises:
            KeyError: no living process has registered the key.
            Exception: what the service raises.

        Source: ``machin.parallel.distributed.RpcGroup.registered_sync``.
        """
        return self._call(api.rpc_sync, key, args, kwargs)

    def registered_async(
        self, key: Hashable, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Future[Any]:
        """Call a service, without waiting.

        Args:
            key, args, kwargs: as for ``registered_sync``.

        Returns:
            Future: of what the service returns.

        Raises:
            KeyError: no living process has registered the key.

        Source: ``machin.parallel.distributed.RpcGroup.registered_async``.
        """
        future: Future[Any] = self._call(api.rpc_async, key, args, kwargs)
        return future

    def registered_remote(
        self, key: Hashable, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> RRef[Any]:
        """Call a service, and keep its result in the service's process.

        Args:
            key, args, kwargs: as for ``registered_sync``.

        Returns:
            RRef: of what the service returns.

        Raises:
            KeyError: no living process has registered the key.

        Source: ``machin.parallel.distributed.RpcGroup.registered_remote``.
        """
        rref: RRef[Any] = self._call(api.remote, key, args, kwargs)
        return rref

    def _call(self, rpc: Callable[..., Any], key: Hashable, args: Any, kwargs: Any) -> Any:
        holder = SERVICE.holder(self.group_name, key)
        return rpc(holder, call_service, args=(self.group_name, key, args, kwargs))

    # -- the group ----------------------------------------------------------------------------

    @_for_members
    def barrier(self) -> None:
        """Wait until all members have called this.

        Raises:
            WorkerDiedError: a member died.
            RuntimeError: this process is no member.

        Source: ``machin.parallel.distributed.RpcGroup.barrier``.
        """
        wait_for_members(self.group_name, self.group_members, "barrier")

    @_for_members
    def destroy(self) -> None:
        """Leave the group, and withdraw this process's values and services from it.

        Further calls do nothing.

        Raises:
            RuntimeError: this process is no member.

        Source: ``machin.parallel.distributed.RpcGroup.destroy``.
        """
        if self.destroyed:
            return
        self.destroyed = True
        VALUE.withdraw_all(self.group_name)
        SERVICE.withdraw_all(self.group_name)
        groups.pop(self.group_name, None)

    def size(self) -> int:
        """Return the number of members.

        Source: ``machin.parallel.distributed.RpcGroup.size``.
        """
        return len(self.group_members)

    def is_member(self, target: str | None = None) -> bool:
        """Tell whether a process is in the group.

        Args:
            target (str, optional): its name; default: this process's.

        Source: ``machin.parallel.distributed.RpcGroup.is_member``.
        """
        return (self.get_cur_name() if target is None else target) in self.group_members

    def get_group_name(self) -> str:
        """Return the name of the group.

        Source: ``machin.parallel.distributed.RpcGroup.get_group_name``.
        """
        return self.group_name

    def get_group_members(self) -> list[str]:
        """Return the names of the members, in ascending order.

        Source: ``machin.parallel.distributed.RpcGroup.get_group_members``.
        """
        return self.group_members

    @staticmethod
    def get_cur_name() -> str:
        """Return the name of this process.

        Source: ``machin.parallel.distributed.RpcGroup.get_cur_name``.
        """
        return current.get_agent().info.name

    def __reduce__(self) -> Any:
        return RpcGroup, (self.group_name, self.group_members, False)
