"""Whether the globals of functions that go by value have changed since they were last sent.

A global gets a new version when its content has changed, or that of a global that a function in
it uses.  So does a class, with its methods.  The content of others only names a class, since each
process has one copy of it, which is changed in place.

    lr = 0.1                                        0.1
    def scale(x): return lr * x                     its code, and lr
    def step(x): return scale(x) + 1                its code, scale and lr
    class Agent: def act(self): return step(1)      act's code, step, scale and lr
    agent = Agent()                                 which class, and its attributes

Globals that refer to the same object, as a model and its optimizer, are a *unit*: they are sent
together, and get new versions together, so that they share it at the receiver, too.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import threading
import uuid
from collections.abc import Callable, Hashable
from typing import Any

from rayrpc._runtime.serialization.contents import (
    Content,
    Found,
    HomeOf,
    Key,
    Node,
    class_id,
    content_of,
)

__all__ = ["SentGlobals", "UnitFoundError", "is_this_process", "this_process"]

logger = logging.getLogger(__name__)

# -- this process --------------------------------------------------------------------------------

_ids: dict[int, str] = {}  # of this process and of those that it was forked from, by their pids


def this_process() -> str:
    """Return an id that no other process has, not even a forked child."""
    pid = os.getpid()
    found = _ids.get(pid)
    return _ids.setdefault(pid, uuid.uuid4().hex) if found is None else found


def is_this_process(process: str) -> bool:
    """Tell whether an id is this process's, or that of one that it was forked from."""
    return process in _ids.values()


# -- versions ------------------------------------------------------------------------------------


class UnitFoundError(Exception):
    """Globals of which some are in the pickle have been found to be one unit: pickle all again."""


class _Versions:
    """Counts the contents that globals and classes of this process have been sent with."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may come between, and send a function
        self._next = itertools.count(1).__next__
        self._last: dict[Node, tuple[bytes, int]] = {}
        #: the others of the unit that a global was in
        self.units: dict[Node, frozenset[Node]] = {}

    def note_unit(self, node: Node, unit: set[Node]) -> None:
        """Store which unit a global is in."""
        others = frozenset(unit - {node})
        known = self.units.get(node, frozenset())
        if others != known:
            self.units[node] = others
            if not others <= known and node in self._last:
                logger.warning(_NEW_UNIT, node[2], node[1], ", ".join(sorted(n[2] for n in others)))

    def of(self, node: Node, digest: bytes) -> int:
        """Return the version of a content: a new one if it is not the last one's."""
        with self._lock:
            known, version = self._last.get(node, (b"", 0))
            if not version or known != digest:
                version = self._next()
                self._last[node] = digest, version
        return version


_versions = _Versions()

_NEW_UNIT = (
    "the global %r of %s refers to an object that others refer to, too: %s. They are sent together"
    " from now on, as they are here; what functions have changed of it on workers before is not "
    "used any more. Call a function that uses all of them first."
)


class SentGlobals:
    """The globals and classes that one pickle sends, each seen once.

    Args:
        home_of (HomeOf): finds the globals of functions.
        value_of (Callable): returns a tuple of the value of a global of this process; empty if
            there is none any more.
    """

    def __init__(self, home_of: HomeOf, value_of: Callable[[Node], tuple[Any, ...]]) -> None:
        self._home_of = home_of
        self._value_of = value_of
        self._contents: dict[Node, Content] = {}
        self._values: dict[Node, Any] = {}  # with these contents: other threads may change them
        self._units: dict[Node, set[Node]] = {}
        self._holders: dict[Hashable, Node] = {}  # of objects
        self._settled: set[Node] = set()  # what versions in the pickle depend on

    def take(self, key: Key, values: dict[str, Any]) -> Found:
        """Take globals of this process into the pickle.

        Args:
            key: of their set.
            values: by name.

        Returns:
            These, and others that are in units with them.

        Raises:
            UnitFoundError: the pickle must be made again.
        """
        self._see({(*key, name): value for name, value in values.items()})
        taken = dict.fromkeys(values)
        units: dict[tuple[str, ...], None] = {}
        for name in values:
            unit = self._unit((*key, name))
            if len(unit) > 1:
                names = tuple(sorted(node[2] for node in unit if node[:2] == key))
                units[names] = None
                taken.update(dict.fromkeys(names))
        nodes = {name: (*key, name) for name in taken}
        return Found(
            {name: self._values[node] for name, node in nodes.items()},
            {name: self._version(node) for name, node in nodes.items()},
            list(units),
        )

    def version_of_class(self, cls: type, state: Any) -> int:
        """Return the version of a class that was made in this process.

        Args:
            cls: the class.
            state: what it is set to where it is received.

        Raises:
            UnitFoundError: the pickle must be made again.
        """
        node = this_process(), "", class_id(cls)
        self._see({node: state})
        return self._version(node)

    # -- contents -----------------------------------------------------------------------------

    def _see(self, unseen: dict[Node, Any]) -> None:
        """Visit globals, and all that these use, and group them in units.

        Raises:
            UnitFoundError: one of these has been sent in part.
        """
        joined: set[Node] = set()
        while unseen:
            node, value = unseen.popitem()
            if node in self._contents:
                continue
            content = self._contents[node] = content_of(value, self._home_of)
            self._values[node] = value
            unseen.update(content.uses)
            for other in _versions.units.get(node, ()):
                if other not in self._contents and (found := self._value_of(other)):
                    (unseen[other],) = found
            if node[1]:  # no class
                joined |= self._join(node, content)
        for node in joined:
            _versions.note_unit(node, self._units[node])
        if not self._settled.isdisjoint(joined):
            raise UnitFoundError

    def _join(self, node: Node, content: Content) -> set[Node]:
        """Make globals that refer to the same objects as this one a unit; return that."""
        unit = {node}
        for identity in content.objects:
            holder = self._holders.setdefault(identity, node)
            if holder not in unit:
                unit |= self._unit(holder)
        for each in unit:
            self._units[each] = unit
        return unit

    def _unit(self, node: Node) -> set[Node]:
        return self._units.get(node, {node})

    def _version(self, node: Node) -> int:
        """Return the version of a content with all that it uses, cycles included."""
        reached = {node}
        pending = [node]
        while pending:
            each = pending.pop()
            new = (self._contents[each].uses.keys() | self._unit(each)) - reached
            reached |= new
            pending.extend(new)
        self._settled |= reached
        if len(reached) == 1:
            return _versions.of(node, self._contents[node].digest)
        digest = hashlib.sha1(usedforsecurity=False)
        for each in sorted(reached):
            digest.update(repr((each, self._contents[each].digest)).encode())
        return _versions.of(node, digest.digest())
