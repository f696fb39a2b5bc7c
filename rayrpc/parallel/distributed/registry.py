"""What this process publishes in its groups, and how to reach what others publish.

Each value and service is held here, by kind, group and key; the world's table (``lookup``) maps
keys to the processes that hold them.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable
from typing import Any

from rayrpc import api
from rayrpc._runtime import current
from rayrpc.parallel.distributed import lookup

__all__ = ["Kind", "SERVICE", "VALUE", "call_service", "clear", "get_value"]


class Kind:
    """Values or services: keys of one kind are unique in a group.

    Args:
        name (str): as in error messages.
        verb (str): of publishing one, likewise.
        preposition (str): likewise.
    """

    def __init__(self, name: str, verb: str, preposition: str) -> None:
        self._name = name
        self._verb = verb
        self._preposition = preposition
        self._held: dict[str, dict[Hashable, Any]] = collections.defaultdict(dict)

    def publish(self, group: str, key: Hashable, value: Any) -> None:
        """Hold a value for a group.

        Raises:
            KeyError: the key is taken.
        """
        held = self._held[group]
        if key not in held:
            held[key] = value  # first: once the table has the key, others call for it
            if self._ask(lookup.add, group, key, lookup.this_process()):
                return
            del held[key]
        raise KeyError(
            f"{self._name} with key {key!r} already {self._verb} {self._preposition} Group "
            f"[{group}]"
        )

    def withdraw(self, group: str, key: Hashable) -> None:
        """Hold a value no longer.

        Raises:
            KeyError: this process does not hold it.
        """
        held = self._held[group]
        if key not in held:
            raise KeyError(
                f"{self._name} with key {key!r} not {self._verb} {self._preposition} Group "
                f"[{group}] by Process [{current.get_agent().info.name}]"
            )
        self._ask(lookup.remove, group, key, lookup.this_process())
        del held[key]

    def withdraw_all(self, group: str) -> None:
        """Hold no value for a group any longer."""
        for key in self._held.pop(group, {}):
            self._ask(lookup.remove, group, key, lookup.this_process())

    def clear(self) -> None:
        """Forget all values; the table keeps its entries."""
        self._held.clear()

    def find(self, group: str, key: Hashable) -> str | None:
        """Return the name of the process that holds a value; None: no process does."""
        found: str | None = self._ask(lookup.find, group, key)
        return found

    def holder(self, group: str, key: Hashable) -> str:
        """Return the name of the process that holds a value, without a call if it is this one.

        Raises:
            KeyError: no process holds it.
        """
        if key in self._held[group]:
            return current.get_agent().info.name
        holder = self.find(group, key)
        if holder is None:
            raise KeyError(f"{self._name} with key {key!r} not found on Group [{group}]")
        return holder

    def get(self, group: str, key: Hashable) -> Any:
        """Return a value that this process holds.

        Raises:
            KeyError: it does not.
        """
        try:
            return self._held[group][key]
        except KeyError:
            raise KeyError(
                f"{self._name} with key {key!r} not found on Group [{group}], Process "
                f"[{current.get_agent().info.name}]"
            ) from None

    def _ask(self, func: Callable[..., Any], group: str, key: Hashable, *args: Any) -> Any:
        return api.rpc_sync(lookup.owner(), func, args=((self._name, group, key), *args))


VALUE = Kind("Value", "paired", "to")
SERVICE = Kind("Service", "registered", "in")


def get_value(group: str, key: Hashable) -> Any:
    """Return a value; called in the process that holds it."""
    return VALUE.get(group, key)


def call_service(
    group: str, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> Any:
    """Call a service; called in the process that holds it."""
    return SERVICE.get(group, key)(*args, **(kwargs or {}))


def clear() -> None:
    """Forget the values and services of this process."""
    VALUE.clear()
    SERVICE.clear()
