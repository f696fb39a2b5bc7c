"""One set of global names for the functions of a program's ``__main__``, in a worker.

Such functions go by value, each in a pickle of its own; what one sets, an initializer say, others
have to find, as if the worker had run the program's script.  A name comes again only when what it
stands for was changed in the program.
"""

from __future__ import annotations

import io
import threading
import types
from typing import Any

from rayrpc.parallel.pickle import Pickler, loads

__all__ = ["dumps_sharing_globals"]

_MAIN = ("__main__", "__mp_main__")


class _UnderWay(threading.local):
    """The names whose values are being pickled, one inside of the other."""

    def __init__(self) -> None:
        self.names: set[str] = set()


_under_way = _UnderWay()


def dumps_sharing_globals(obj: Any) -> bytes:
    """Return an object as bytes; functions in it will share their globals with others."""
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
        # what cloudpickle makes of a function: its parts, and its state with the globals it uses
        make, (code, _, *others), (attributes, slots), _, _, set_state = reduced
        used = {
            name: _named(name, value)
            for name, value in slots["__globals__"].items()
            if name not in _under_way.names  # its function refers back to this one
        }
        state = (set_state, attributes, {**slots, "__globals__": {}}, used)
        return make, (code, _Main(), *others), state, None, None, _set_state


def _named(name: str, value: Any) -> bytes:
    _under_way.names.add(name)
    try:
        return dumps_sharing_globals(value)
    finally:
        _under_way.names.remove(name)


class _Main:
    """Stands for the globals of a worker."""

    def __reduce__(self) -> Any:
        return _main_globals, ()


# -- the worker -----------------------------------------------------------------------------------

_globals: dict[str, Any] = {"__name__": "__main__"}
_came: dict[str, bytes] = {}


def _main_globals() -> dict[str, Any]:
    return _globals


def _set_state(func: Any, state: Any) -> None:
    set_state, attributes, slots, used = state
    for name, data in used.items():
        if _came.get(name) != data:
            _came[name] = data
            _globals[name] = loads(data)
    set_state(func, (attributes, slots))
