"""Put simulated primitives into modules of rayrpc, in place of the system's."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import pkgutil
import queue
import select
import selectors
import socket
import threading
import time
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from simulation import network, primitives
from simulation.scheduler import SIMULATED_FILES

__all__ = ["functions_of", "simulated"]

PACKAGES = (
    "rayrpc._concurrency",
    "rayrpc._protocol",
    "rayrpc._transports",
    "rayrpc._transports.direct",
    "rayrpc._runtime",
    "rayrpc._runtime.rrefs",
    "rayrpc._runtime.serialization",
)
_LOCKS = {type(threading.Lock()): primitives.Lock, type(threading.RLock()): primitives.RLock}


class _OrderedWeakSet:
    """A WeakSet in the order of insertion: that of addresses differs from run to run."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        self._items: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        for item in items:
            self.add(item)

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    def add(self, item: Any) -> None:
        self._items[id(item)] = item

    def discard(self, item: Any) -> None:
        self._items.pop(id(item), None)

    def clear(self) -> None:
        self._items.clear()

    def __contains__(self, item: Any) -> bool:
        return self._items.get(id(item)) is item

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._items.values()))

    def __len__(self) -> int:
        return len(self._items)


@contextlib.contextmanager
def simulated(
    packages: Iterable[str] = PACKAGES, more: Iterable[types.ModuleType] = ()
) -> Iterator[None]:
    """Have all modules of packages, and some more, use simulated primitives."""
    threads = _stand_in(threading, primitives.THREADING)
    clock = _stand_in(time, primitives.TIME)
    weak = _stand_in(weakref, {"WeakSet": _OrderedWeakSet})
    instead: dict[int, Any] = {
        id(threading): threads,
        id(time): clock,
        id(weakref): weak,
        id(queue): _stand_in(queue, primitives.QUEUE),
        id(fcntl): _stand_in(fcntl, network.FCNTL),
        id(select): _stand_in(select, network.SELECT),
        id(selectors): _stand_in(selectors, network.SELECTORS),
        id(socket): _stand_in(socket, network.SOCKET),
        id(time.monotonic): primitives.monotonic,
        id(time.perf_counter): primitives.monotonic,
        id(time.sleep): primitives.sleep,
        id(weakref.WeakSet): _OrderedWeakSet,
    }
    changed: list[tuple[Any, str, Any]] = []
    for module in [*_modules(packages), *more]:
        SIMULATED_FILES.add(str(module.__file__))
        for name, value in list(vars(module).items()):
            new = instead.get(id(value))
            if new is None and type(value) in _LOCKS:
                new = _LOCKS[type(value)]()
            if new is not None:
                changed.append((module, name, value))
                setattr(module, name, new)
        for function in functions_of(module):
            defaults = function.__defaults__ or ()
            if any(id(each) in instead for each in defaults):
                changed.append((function, "__defaults__", defaults))
                function.__defaults__ = tuple(instead.get(id(each), each) for each in defaults)
    gc.collect()
    gc.freeze()  # collections within a run need not look at all modules
    try:
        yield
    finally:
        gc.unfreeze()
        SIMULATED_FILES.clear()
        for holder, name, value in changed:
            setattr(holder, name, value)


def _modules(packages: Iterable[str]) -> Iterator[types.ModuleType]:
    for package in packages:
        root = importlib.import_module(package)
        yield root
        for info in pkgutil.iter_modules(root.__path__, package + "."):
            if not info.ispkg:
                yield importlib.import_module(info.name)


def functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    """Yield the functions that a module defines, those of its classes included."""
    for value in vars(module).values():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        for each in [value, *vars(value).values()] if isinstance(value, type) else [value]:
            if isinstance(each, property):
                each = each.fget
            elif isinstance(each, (staticmethod, classmethod)):
                each = each.__func__
            is_own = isinstance(each, types.FunctionType)  # and not what a decorator has made
            if is_own and each.__code__.co_filename == module.__file__:
                yield each


def _stand_in(module: types.ModuleType, names: dict[str, Any]) -> types.ModuleType:
    new = types.ModuleType(module.__name__)
    new.__dict__.update(vars(module))
    new.__dict__.update(names)
    return new
