"""A server of values with versions: each is pushed on top of the one before it, or refused."""

from __future__ import annotations

import abc
import copy
import threading
from typing import Any

from rayrpc.parallel.distributed import RpcGroup

__all__ = ["OrderedServerBase", "OrderedServerSimple", "OrderedServerSimpleImpl"]


class OrderedServerBase(abc.ABC):
    """What clients ask of an ordered server.

    Source: ``machin.parallel.server.OrderedServerBase``.
    """

    @abc.abstractmethod
    def push(self, key: Any, value: Any, version: Any, prev_version: Any) -> bool:
        """Push a new version of a value.

        Args:
            key: names the value; hashable.
            value: to keep.
            version: of it; hashable.
            prev_version: that it is made from; if the server has a newer one, it refuses. For
                a new key it may be anything.

        Returns:
            Whether the server took it.
        """

    @abc.abstractmethod
    def pull(self, key: Any, version: Any = None) -> tuple[Any, Any] | None:
        """Pull a value.

        Args:
            key: names it.
            version: of it; None: the newest.

        Returns:
            The value and its version; None: the server has it not, or not any more.
        """


class OrderedServerSimple(OrderedServerBase):
    """Reach an ordered server of a group; can be sent.

    Args:
        server_name (str): of the server.
        group (RpcGroup): where it is.

    Source: ``machin.parallel.server.OrderedServerSimple``.
    """

    def __init__(self, server_name: str, group: RpcGroup) -> None:
        self.server_name = server_name
        self.group = group

    def push(self, key: Any, value: Any, version: Any, prev_version: Any) -> bool:
        args = (key, value, version, prev_version)
        return bool(self.group.registered_sync(f"{self.server_name}/_push_service", args))

    def pull(self, key: Any, version: Any = None) -> tuple[Any, Any] | None:
        service = f"{self.server_name}/_pull_service"
        found: tuple[Any, Any] | None = self.group.registered_sync(service, (key, version))
        return found


class OrderedServerSimpleImpl:
    """An ordered server, in this process.

    Args:
        server_name (str): the group's key for its ``OrderedServerSimple``.
        group (RpcGroup): this process is a member.
        version_depth (int): how many versions are kept beside the newest.

    Source: ``machin.parallel.server.OrderedServerSimpleImpl``.
    """

    def __init__(self, server_name: str, group: RpcGroup, version_depth: int = 1, **_: Any) -> None:
        if not isinstance(version_depth, int) or version_depth < 1:
            raise ValueError(f"version_depth must be an int of at least 1, not {version_depth!r}")
        self.server_name = server_name
        self.group = group
        self.version_depth = version_depth
        self.storage: dict[Any, dict[Any, Any]] = {}  # versions from old to new, by key
        self.lock = threading.Lock()
        group.register(f"{server_name}/_push_service", self._push_service)
        group.register(f"{server_name}/_pull_service", self._pull_service)
        group.pair(server_name, OrderedServerSimple(server_name, group))

    def _push_service(self, key: Any, value: Any, version: Any, prev_version: Any) -> bool:
        with self.lock:
            versions = self.storage.setdefault(key, {})
            if versions and next(reversed(versions)) != prev_version:
                return False
            versions.pop(version, None)  # it becomes the newest
            versions[version] = value
            while len(versions) > self.version_depth + 1:
                del versions[next(iter(versions))]
            return True

    def _pull_service(self, key: Any, version: Any = None) -> tuple[Any, Any] | None:
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
