"""Groups of processes that call one another, share values and offer services by name."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, TypeVar

from rayrpc import api
from rayrpc._runtime import current
from rayrpc.options import UNSET_RPC_TIMEOUT
from rayrpc.parallel.distributed import lookup
from rayrpc.rref import RRef

__all__ = ["RpcGroup", "forget", "groups"]

VALUE, SERVICE = "value", "service"
F = TypeVar("F", bound=Callable[..., Any])

#: the groups that this process has created
groups: dict[str, RpcGroup] = {}
# The values and services of this process, by kind and group.
_own: dict[tuple[str, str], dict[Any, Any]] = collections.defaultdict(dict)


def _for_members(method: F) -> F:
    @functools.wraps(method)
    def checked(self: RpcGroup, *args: Any, **kwargs: Any) -> Any:
        if not self.is_member():
            raise RuntimeError(
                f"RpcGroup.{method.__name__} is for members: process {self.get_cur_name()!r} is "
                f"not in group {self.group_name!r} of {self.group_members}"
            )
        return method(self, *args, **kwargs)

    return checked  # type: ignore[return-value]


class RpcGroup:
    """Some processes of a world.

    Made by ``World.create_rpc_group``.  Values and services are found by keys, which are looked up
    in one place; those of a process are gone when it is.  A group can be sent to others.

    Args:
        group_name (str): unique in the world.
        group_members (list[str]): names of the processes.
        first_create (bool): not used.

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
        func: Callable[..., Any],
        timeout: float = UNSET_RPC_TIMEOUT,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function on a member, and return its result; see ``rayrpc.rpc_sync``."""
        return api.rpc_sync(self._member(to), func, args, kwargs, timeout)

    def rpc_async(
        self,
        to: str,
        func: Callable[..., Any],
        timeout: float = UNSET_RPC_TIMEOUT,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function on a member, and return a Future; see ``rayrpc.rpc_async``."""
        return api.rpc_async(self._member(to), func, args, kwargs, timeout)

    def remote(
        self,
        to: str,
        func: Callable[..., Any],
        timeout: float = UNSET_RPC_TIMEOUT,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> RRef[Any]:
        """Run a function on a member, and return an RRef of its result; see ``rayrpc.remote``."""
        rref: RRef[Any] = api.remote(self._member(to), func, args, kwargs, timeout)
        return rref

    def _member(self, to: str) -> str:
        if not self.is_member(to):
            raise RuntimeError(
                f"process {to!r} is not in group {self.group_name!r}: it has {self.group_members}"
            )
        return to

    # -- values -------------------------------------------------------------------------------

    @_for_members
    def pair(self, key: Any, value: Any) -> None:
        """Let others find a value of this process.

        Args:
            key: unique among the group's values; hashable.
            value: it stays here; others get RRefs of it.

        Raises:
            KeyError: the key is paired already.
        """
        self._put(VALUE, key, value, f"Value with key {key!r} already paired to Group")

    @_for_members
    def unpair(self, key: Any) -> None:
        """Take back a value of this process.

        Raises:
            KeyError: this process has not paired the key.
        """
        self._take(VALUE, key, f"Value with key {key!r} not paired to Group")

    def is_paired(self, key: Any) -> bool:
        """Tell whether a process of the group has paired a key."""
        return self._find(VALUE, key) is not None

    def get_paired(self, key: Any) -> RRef[Any]:
        """Return an RRef of a value.

        Raises:
            KeyError: no process has paired the key.
        """
        holder = self._holder(VALUE, key, f"Value with key {key!r} not found on Group")
        rref: RRef[Any] = api.remote(holder, _value_of, args=(self.group_name, key))
        return rref

    # -- services -----------------------------------------------------------------------------

    @_for_members
    def register(self, key: Any, service: Callable[..., Any]) -> None:
        """Let others call a function of this process.

        Args:
            key: unique among the group's services; hashable.
            service (Callable): runs here.

        Raises:
            KeyError: the key is registered already.
        """
        self._put(SERVICE, key, service, f"Service with key {key!r} already registered in Group")

    @_for_members
    def deregister(self, key: Any) -> None:
        """Take back a service of this process.

        Raises:
            KeyError: this process has not registered the key.
        """
        self._take(SERVICE, key, f"Service with key {key!r} not registered in Group")

    def is_registered(self, key: Any) -> bool:
        """Tell whether a process of the group has registered a key."""
        return self._find(SERVICE, key) is not None

    def registered_sync(
        self, key: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a service, and return its result.

        Raises:
            KeyError: no process has registered the key.
        """
        return self._call(api.rpc_sync, key, args, kwargs)

    def registered_async(
        self, key: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a service, and return a Future of its result.

        Raises:
            KeyError: no process has registered the key.
        """
        return self._call(api.rpc_async, key, args, kwargs)

    def registered_remote(
        self, key: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> RRef[Any]:
        """Call a service, and return an RRef of its result.

        Raises:
            KeyError: no process has registered the key.
        """
        rref: RRef[Any] = self._call(api.remote, key, args, kwargs)
        return rref

    def _call(self, rpc_api: Callable[..., Any], key: Any, args: Any, kwargs: Any) -> Any:
        holder = self._holder(SERVICE, key, f"Service with key {key!r} not found on Group")
        return rpc_api(holder, _serve, args=(self.group_name, key, args, kwargs or {}))

    # -- the table ----------------------------------------------------------------------------

    def _put(self, kind: str, key: Any, value: Any, taken: str) -> None:
        own = _own[kind, self.group_name]
        if key not in own:
            own[key] = value  # before others can find it
            if self._ask(lookup.put, kind, key, lookup.here()):
                return
            del own[key]
        raise KeyError(f"{taken} [{self.group_name}]")

    def _take(self, kind: str, key: Any, missing: str) -> None:
        own = _own[kind, self.group_name]
        if key not in own:
            raise KeyError(f"{missing} [{self.group_name}] by Process [{self.get_cur_name()}]")
        self._ask(lookup.take, kind, key, lookup.here())
        del own[key]

    def _find(self, kind: str, key: Any) -> str | None:
        found: str | None = self._ask(lookup.find, kind, key)
        return found

    def _holder(self, kind: str, key: Any, missing: str) -> str:
        if key in _own[kind, self.group_name]:
            return self.get_cur_name()
        holder = self._find(kind, key)
        if holder is None:
            raise KeyError(f"{missing} [{self.group_name}]")
        return holder

    def _ask(self, func: Callable[..., Any], kind: str, key: Any, *args: Any) -> Any:
        return api.rpc_sync(lookup.place(), func, args=((kind, self.group_name, key), *args))

    # -- the group ----------------------------------------------------------------------------

    @_for_members
    def barrier(self) -> None:
        """Wait until all members are at a barrier.

        Raises:
            WorkerDiedError: a member died.
        """
        self._meet("barrier")

    def _meet(self, what: str) -> None:
        meeting, place = (what, self.group_name), lookup.place()
        args = (meeting, lookup.here(), tuple(self.group_members))
        future = api.rpc_async(place, lookup.enter, args=args, timeout=0)
        agent = current.get_agent()
        future.add_done_callback(lambda _: agent.notify())
        for member in self.group_members:
            agent.lookup(member)

        def gone() -> list[str]:
            there = {member.name for member in agent.members()}
            return [name for name in self.group_members if name not in there]

        agent.wait_until(lambda: future.done() or gone(), None)
        if not future.done():
            api.rpc_sync(place, lookup.withdraw, args=(meeting, lookup.here()))
            api.rpc_sync(gone()[0], lookup.here)  # raises what became of it
        future.wait()

    @_for_members
    def destroy(self) -> None:
        """Leave the group; what this process paired and registered in it is gone."""
        if self.destroyed:
            return
        self.destroyed = True
        for kind in (VALUE, SERVICE):
            for key in _own.pop((kind, self.group_name), {}):
                self._ask(lookup.take, kind, key, lookup.here())
        groups.pop(self.group_name, None)

    def size(self) -> int:
        """Return the number of members."""
        return len(self.group_members)

    def is_member(self, target: str | None = None) -> bool:
        """Tell whether a process, or this one, is in the group.

        Args:
            target (str): its name.
        """
        return (self.get_cur_name() if target is None else target) in self.group_members

    def get_group_name(self) -> str:
        """Return the name of the group."""
        return self.group_name

    def get_group_members(self) -> list[str]:
        """Return the names of the members, in ascending order."""
        return self.group_members

    @staticmethod
    def get_cur_name() -> str:
        """Return the name of this process."""
        return current.get_agent().info.name

    def __reduce__(self) -> Any:
        return RpcGroup, (self.group_name, self.group_members, False)


def _value_of(group: str, key: Any) -> Any:
    """Run where a value was found."""
    try:
        return _own[VALUE, group][key]
    except KeyError:
        raise _gone("Value", group, key) from None


def _serve(group: str, key: Any, args: Any, kwargs: Any) -> Any:
    """Run where a service was found."""
    try:
        service = _own[SERVICE, group][key]
    except KeyError:
        raise _gone("Service", group, key) from None
    return service(*args, **kwargs)


def _gone(what: str, group: str, key: Any) -> KeyError:
    name = RpcGroup.get_cur_name()
    return KeyError(f"{what} with key {key!r} not found on Group [{group}], Process [{name}]")


def forget() -> None:
    """Forget all groups, and what this process paired and registered: its world is over."""
    groups.clear()
    _own.clear()
