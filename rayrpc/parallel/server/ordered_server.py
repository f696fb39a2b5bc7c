"""A server of values with versions: each is pushed on top of the one before it, or refused."""

from __future__ import annotations

import abc
import copy
import threading
from collections.abc import Hashable
from typing import Any

from rayrpc.parallel.distributed import RpcGroup

__all__ = [
    "OrderedServerBase",
    "OrderedServerSimple",
    "OrderedServerSimpleImpl",
    "make_default_server",
]


class OrderedServerBase(abc.ABC):
    """Push and pull values of an ordered server; what its clients have.

    Source: ``machin.parallel.server.OrderedServerBase``.
    """

    @abc.abstractmethod
    def push(self, key: Hashable, value: Any, version: Hashable, prev_version: Hashable) -> bool:
        """Push a new version of a value.

        Args:
            key (Hashable): of the value.
            value: to store.
            version (Hashable): of ``value``.
            prev_version (Hashable): that ``value`` was made from.  Ignored for a new key.

        Returns:
            bool: False if ``prev_version`` is not the newest version on the server, which then
            stores nothing.

        Source: ``machin.parallel.server.OrderedServerBase.push``.
        """

    @abc.abstractmethod
    def pull(self, key: Hashable, version: Hashable = None) -> tuple[Any, Any] | None:
        """Pull a value.

        Args:
            key (Hashable): of the value.
            version (Hashable, optional): to pull; default: the newest.

        Returns:
            tuple | None: the value and its version; None if the server does not have it, or no
            longer.

        Source: ``machin.parallel.server.OrderedServerBase.pull``.
        """


class OrderedServerSimple(OrderedServerBase):
    """Push and pull values of an ``OrderedServerSimpleImpl``; can be sent to other processes.

    Args:
        server_name (str): of the server.
        group (RpcGroup): of the server.

    Source: ``machin.parallel.server.OrderedServerSimple``.
    """

    def __init__(self, server_name: str, group: RpcGroup) -> None:
        self.server_name = server_name
        self.group = group

    def push(self, key: Hashable, value: Any, version: Hashable, prev_version: Hashable) -> bool:
        """Push a new version of a value.

        Args:
            key (Hashable): of the value.
            value: to store; pickled.
            version (Hashable): of ``value``.
            prev_version (Hashable): that ``value`` was made from.  Ignored for a new key.

        Returns:
            bool: False if ``prev_version`` is not the newest version on the server, which then
            stores nothing.

        Raises:
            KeyError: the group has no such server.
            WorkerDiedError: the server's process died.

        Source: ``machin.parallel.server.OrderedServerSimple.push``.
        """
        args = (key, value, version, prev_version)
        return bool(self.group.registered_sync(f"{self.server_name}/_push_service", args))

    def pull(self, key: Hashable, version: Hashable = None) -> tuple[Any, Any] | None:
        """Pull a value.

        Args:
            key (Hashable): of the value.
            version (Hashable, optional): to pull; default: the newest.

        Returns:
            tuple | None: a copy of the value, and its version; None if the server does not have
            it, or no longer.

        Raises:
            KeyError: the group has no such server.
            WorkerDiedError: the server's process died.

        Source: ``machin.parallel.server.OrderedServerSimple.pull``.
        """
        service = f"{self.server_name}/_pull_service"
        found: tuple[Any, Any] | None = self.group.registered_sync(service, (key, version))
        return found


class OrderedServerSimpleImpl:
    """Serve values with versions from this process.

    Clients get an ``OrderedServerSimple`` by ``group.get_paired(server_name)``.

    Args:
        server_name (str): unique in the group.
        group (RpcGroup): this process is a member.
        version_depth (int): number of versions to keep beside the newest, at least 1.

    Raises:
        ValueError: ``version_depth`` is no int of at least 1.
        KeyError: the group has a server of this name.

    Source: ``machin.parallel.server.OrderedServerSimpleImpl``.
    """

    def __init__(self, server_name: str, group: RpcGroup, version_depth: int = 1, **_: Any) -> None:
        if not isinstance(version_depth, int) or version_depth < 1:
            raise ValueError(f"version_depth must be an int of at least 1, not {version_depth!r}")
        self.server_name = server_name
        self.group = group
        self.version_depth = version_depth
        self.storage: dict[Hashable, dict[Hashable, Any]] = {}  # by key: versions, old to new
        self.lock = threading.Lock()
        group.register(f"{server_name}/_push_service", self._push_service)
        group.register(f"{server_name}/_pull_service", self._pull_service)
        group.pair(server_name, OrderedServerSimple(server_name, group))

    def _push_service(
        self, key: Hashable, value: Any, version: Hashable, prev_version: Hashable
    ) -> bool:
        with self.lock:
            versions = self.storage.setdefault(key, {})
            if versions and next(reversed(versions)) != prev_version:
                return False
            versions.pop(version, None)  # so that it becomes the last, which is the newest
            versions[version] = value
            while len(versions) > self.version_depth + 1:
                del versions[next(iter(versions))]
            return True

    def _pull_service(self, key: Hashable, version: Hashable = None) -> tuple[Any, Any] | None:
        with self.lock:
            versions = self.storage.get(key)
            if not versions:
                return None
            if version is None:
                version = next(reversed(versions))
            if version not in versions:
                return None
            value = versions[version]
        return copy.deepcopy(value), version


def make_default_server(server_name: str, group: RpcGroup, is_here: bool) -> OrderedServerSimple:
    """Return the ordered server of a model or gradient server that is given none.

    Args:
        server_name (str): of the model or gradient server.
        group (RpcGroup): of both.
        is_here (bool): make it in this process; else another process does.
    """
    name = f"{server_name}_o_server"
    if is_here:
        OrderedServerSimpleImpl(name, group)
    return OrderedServerSimple(name, group)
