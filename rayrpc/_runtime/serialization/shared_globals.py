"""Functions that go by value share the globals of their program, on each worker.

The functions of a module that are sent from one process share their globals at the receiver: what
one binds or changes, those that are called later use.  A global that the program has changed since
arrives with the next call, for that call and later ones:

    program                         worker
    i, seen = 0, []                 the set of globals    {i: 0, seen: [], f}
    def f(): seen.append(i)
    rpc_async(w, f)     ────>       f uses the set                                 seen: [0]
    i = 1
    rpc_async(w, f)     ────>       f uses {i: 1} and what of the set has not      seen: [0, 1]
                                    changed, as the first call may still run

A name that any function binds (``global i``) is in the set only, also if the program changes it.

Each process is the *origin* of the functions that it defines.  Workers that send them on keep that
origin, and the values that it has sent; back at the origin, they use the globals of the module.
"""

from __future__ import annotations

import builtins
import io
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from cloudpickle.cloudpickle import _should_pickle_by_reference

from rayrpc._runtime.serialization.contents import Found, Home, Key, Node
from rayrpc._runtime.serialization.function_parts import (
    make_function,
    names_of,
    parts_of,
    set_parts,
)
from rayrpc._runtime.serialization.global_versions import (
    SentGlobals,
    UnitFoundError,
    is_this_process,
    this_process,
)

__all__ = ["SharesGlobals", "dumps_by_value", "forget"]

#: what functions may use without naming it
_BASE = ("__file__", "__name__", "__package__", "__path__")
_HOME = "__rayrpc_globals__"  # where received globals have their ``_View``


# -- sending -------------------------------------------------------------------------------------


class SharesGlobals:
    """Mixin for picklers of cloudpickle: functions share their globals where they are received."""

    _globals: SentGlobals | None = None

    def reducer_override(self, obj: Any) -> Any:
        """Reduce functions and classes that go by value; called by ``pickle``.

        Source: ``pickle.Pickler.reducer_override``.
        """
        if isinstance(obj, types.FunctionType):
            if obj in _MAKERS or _should_pickle_by_reference(obj):
                return NotImplemented
            home = _home_of(obj)
            if home is not None:
                return _reduce_function(obj, home, self._sent())
        cloud: Any = super()
        reduced = cloud.reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) == 6:
            # it is made, and its state set
            return _reduce_class(obj, reduced, self._sent())
        return reduced

    def _sent(self) -> SentGlobals:
        if self._globals is None:
            self._globals = SentGlobals(_home_of, _own_value)
        return self._globals


def dumps_by_value(make: Callable[[io.BytesIO], Any], obj: Any) -> bytes:
    """Pickle an object whose functions share their globals where they are received.

    Args:
        make: returns a pickler, with ``SharesGlobals``, that writes to a file.
        obj: the object.
    """
    while True:
        file = io.BytesIO()
        try:
            make(file).dump(obj)
        except UnitFoundError:
            continue
        return file.getvalue()


def _home_of(func: types.FunctionType) -> Home | None:
    found = func.__globals__
    if _HOME in found:
        home: Home = found[_HOME]
        return home
    name = found.get("__name__", "")
    module = sys.modules.get(name)
    return _OwnGlobals(name, found) if module is not None and module.__dict__ is found else None


_MISSING = object()


class _OwnGlobals:
    """The globals of a module of this process; a ``Home``."""

    def __init__(self, module: str, values: dict[str, Any]) -> None:
        self.key = this_process(), module
        self._values = values

    def find(self, names: Iterable[str]) -> Found:
        found = {name: self._values.get(name, _MISSING) for name in names}
        values = {name: value for name, value in found.items() if value is not _MISSING}
        return Found(values, {}, [])


def _own_value(node: Node) -> tuple[Any, ...]:
    own = _own_values(node[:2])
    return (own[node[2]],) if own is not None and node[2] in own else ()


class _Use(NamedTuple):
    """How a function uses the globals of its module.

    Args:
        key (Key): of the globals.
        versions (dict[str, int]): of those that its origin has.
        unknown (tuple[str, ...]): names that its origin does not have.
        stored (tuple[str, ...]): names that it binds or deletes.
        is_dynamic (bool): it may bind others.
    """

    key: Key
    versions: dict[str, int]
    unknown: tuple[str, ...]
    stored: tuple[str, ...]
    is_dynamic: bool


def _reduce_function(func: types.FunctionType, home: Home, sent: SentGlobals) -> Any:
    names = names_of(func.__code__)
    found = home.find(names.used)
    if not found.versions:
        found = sent.take(home.key, found.values)
    builtin = found.values.keys() | names.builtin
    unknown = tuple(name for name in names.used if name not in builtin)
    # a ``_Use``
    use = home.key, found.versions, unknown, names.stored, names.is_dynamic
    base = {name: func.__globals__[name] for name in _BASE if name in func.__globals__}
    state = tuple(found), parts_of(func, found.values.values())
    return _make_function, (use, base, func.__code__), state, None, None, _set_function


def _reduce_class(cls: type, reduced: Any, sent: SentGlobals) -> Any:
    make, args, state, _, _, set_state = reduced
    known = _classes.get(cls)
    if known is None or is_this_process(known.origin):
        version = sent.version_of_class(cls, state)
        known = _classes[cls] = _ClassVersion(this_process(), version)
    return make, args, (tuple(known), state, set_state), None, None, _set_class


class _ClassVersion(NamedTuple):
    """Which state a class has.

    Args:
        origin (str): the process that defined it.
        version (int): of its state there.
    """

    origin: str
    version: int


_classes: weakref.WeakKeyDictionary[type, _ClassVersion] = weakref.WeakKeyDictionary()
_setting_classes = threading.RLock()


# -- receiving -----------------------------------------------------------------------------------


def _make_function(use: Any, base: dict[str, Any], code: types.CodeType) -> Any:
    use = _Use(*use)
    found = _own_values(use.key)
    if found is None:
        found = _received(use.key, base).choose(use, base, code)
    return make_function(code, found)


def _set_function(func: types.FunctionType, state: Any) -> None:
    found, parts = state
    if _HOME in func.__globals__:
        func.__globals__[_HOME].fill(func.__globals__, Found(*found))
    set_parts(func, parts)


#: the functions in the reductions above
_MAKERS: frozenset[Any] = frozenset({_make_function, _set_function})


def _own_values(key: Key) -> dict[str, Any] | None:
    process, name = key
    module = sys.modules.get(name) if process == this_process() else None
    return None if module is None else module.__dict__


def _set_class(cls: Any, state: Any) -> None:
    sent, state, set_state = state
    sent = _ClassVersion(*sent)
    with _setting_classes:
        known = _classes.get(cls)
        if known is None or known.origin != sent.origin or known.version < sent.version:
            set_state(cls, state)
            _classes[cls] = sent


class _ReceivedGlobals:
    """The globals of a module of another process.

    Args:
        key (Key): identifies them.
        base (dict): their first names, as ``__name__``.
    """

    def __init__(self, key: Key, base: Mapping[str, Any]) -> None:
        self.key = key
        self._lock = threading.RLock()  # a finalizer may come between, and decode a function
        self._set = _with_builtins(base)
        #: of the names in the set, from when a function that has them is decoded
        self._versions: dict[str, int] = {}
        #: names that functions bind
        self._stored: set[str] = set()
        #: what their origin has sent last: versions and values
        self._newest: dict[str, tuple[int, Any]] = {}
        self._view = self._set[_HOME] = _View(self)

    def choose(self, use: _Use, base: Mapping[str, Any], code: Any) -> dict[str, Any]:
        """Return the globals for a function: the set, or what differs from it.

        Args:
            use: how the function uses them.
            base: their first names.
            code: of the function.
        """
        binds = bool(use.stored) or use.is_dynamic
        differs = False
        with self._lock:
            self._stored.update(use.stored)
            for name, version in use.versions.items():
                current = self._versions.setdefault(name, version)
                if binds or name in self._stored:
                    self._versions[name] = max(current, version)
                elif current != version:
                    differs = True
            lives = bool(use.unknown) or not self._stored.isdisjoint(use.versions)
        if binds or not differs:
            return self._set
        chosen = _Overlay(self._set, code) if lives else {}
        chosen.update(_with_builtins(base))
        chosen[_HOME] = _View(self)
        return chosen

    def fill(self, into: dict[str, Any], found: Found) -> None:
        """Set the globals of a function that are not there yet.

        Args:
            into: what ``choose`` returned for it.
            found: what was sent with it.
        """
        dropped: list[Any] = []  # not under the lock: their finalizers may run users' code
        with self._lock:
            for name, value in found.values.items():
                self._fill(into, name, found.versions[name], value, dropped)
            for unit in found.units:
                into[_HOME].units.update(dict.fromkeys(unit, unit))

    def _fill(
        self, into: dict[str, Any], name: str, version: int, value: Any, dropped: list[Any]
    ) -> None:
        newest = self._newest.get(name)
        if newest is None or newest[0] < version:
            dropped.append(newest)
            self._newest[name] = version, value
        elif newest[0] == version:
            value = newest[1]
        if self._versions[name] == version:
            there = self._view.sent.get(name)
            if there is not None and there[0] == version:
                value = there[1]
            else:
                dropped += there, self._set.get(name)
                self._set[name] = value
                self._view.sent[name] = version, value
        if into is not self._set:
            into[_HOME].sent[name] = version, value
            if name not in self._stored or type(into) is dict:
                into[name] = value


def _with_builtins(base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first names of globals, with that by which C code finds the builtins.

    Python's own code does without it; what C code imports, as ``time.strptime`` does, is looked up
    there.
    """
    return {"__builtins__": builtins, **base}


class _View:
    """The globals of some functions of a module; a ``Home``.

    Args:
        received: all of the module.
    """

    def __init__(self, received: _ReceivedGlobals) -> None:
        self.key = received.key
        #: as their origin has sent them: versions and values
        self.sent: dict[str, tuple[int, Any]] = {}
        #: the units of those that are in one
        self.units: dict[str, tuple[str, ...]] = {}
        self.fill = received.fill

    def find(self, names: Iterable[str]) -> Found:
        units = {self.units[name]: None for name in names if name in self.units}
        wanted = dict.fromkeys([*names, *(name for unit in units for name in unit)])
        found = {name: self.sent[name] for name in wanted if name in self.sent}
        versions = {name: version for name, (version, _) in found.items()}
        return Found({name: value for name, (_, value) in found.items()}, versions, list(units))


class _Overlay(dict[str, Any]):
    """Globals of a function; those that it lacks are looked up in a set at each use.

    Such a look-up is slower; so the builtins that the code uses are copied into it.

    Args:
        below: the set.
        code: of the function.
    """

    def __init__(self, below: dict[str, Any], code: types.CodeType) -> None:
        super().__init__()
        self._below = below
        for name in names_of(code).builtin:
            if name not in below:
                self[name] = getattr(builtins, name)

    def __missing__(self, name: str) -> Any:
        return self._below[name]


_all: dict[Key, _ReceivedGlobals] = {}


def _received(key: Key, base: Mapping[str, Any]) -> _ReceivedGlobals:
    found = _all.get(key)
    return _all.setdefault(key, _ReceivedGlobals(key, base)) if found is None else found


def forget(process: str) -> None:
    """Drop the globals that were received from a process, which sends no more.

    Functions that are still here keep theirs.
    """
    for key in list(_all):
        if key[0] == process:
            _all.pop(key, None)
