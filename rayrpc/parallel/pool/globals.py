"""One set of global names in a worker for the functions of a program's ``__main__``.

Such functions are sent by value, each in a pickle of its own.  They share their globals in the
worker, as if it had run the program's script: a name that an initializer sets is seen by the
tasks.  A global is unpickled again only when its value has changed in the program.
"""

from __future__ import annotations

import io
import threading
import types
from typing import Any

from rayrpc.parallel.pickle import Pickler, loads

__all__ = ["dumps_sharing_globals"]

_MAIN = ("__main__", "__mp_main__")


class _PicklingNames(threading.local):
    """The globals whose values this thread is pickling, one inside of the other."""

    def __init__(self) -> None:
        self.names: set[str] = set()


_pickling = _PicklingNames()


def dumps_sharing_globals(obj: Any) -> bytes:
    """Pickle an object; functions in it share their globals with others in the worker."""
    file = io.BytesIO()
    _Pickler(file, copy_tensor=True).dump(obj)  # type: ignore[no-untyped-call]
    return file.getvalue()


class _Pickler(Pickler):
    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if (
            not isinstance(obj, types.FunctionType)
            or not isinstance(reduced, tuple)
            or len(reduced) != 6
            or obj.__globals__.get("__name__") not in _MAIN
        ):
            return reduced
        # cloudpickle's reduction of a function: its parts, and its state with the globals it uses
        make, (code, _, *others), (attributes, slots), _, _, set_state = reduced
        used = {
            name: _pickle_global(name, value)
            for name, value in slots["__globals__"].items()
            if name not in _pickling.names  # its function refers back to this one
        }
        state = (set_state, attributes, {**slots, "__globals__": {}}, used)
        return make, (code, _WorkerGlobals(), *others), state, None, None, _set_state


def _pickle_global(name: str, value: Any) -> bytes:
    _pickling.names.add(name)
    try:
        return dumps_sharing_globals(value)
    finally:
        _pickling.names.remove(name)


class _WorkerGlobals:
    """Placeholder that is unpickled as the globals of the worker."""

    def __reduce__(self) -> Any:
        return _worker_globals, ()


# -- in the worker --------------------------------------------------------------------------------

_globals: dict[str, Any] = {"__name__": "__main__"}
_pickles: dict[str, bytes] = {}  # of the values in _globals


def _worker_globals() -> dict[str, Any]:
    return _globals


def _set_state(func: Any, state: Any) -> None:
    set_state, attributes, slots, used = state
    for name, data in used.items():
        if _pickles.get(name) != data:
            _pickles[name] = data
            _globals[name] = loads(data)
    set_state(func, (attributes, slots))
