"""``torch.jit.save`` and ``load`` of script modules whose attributes hold RRefs.

The RRefs go into an extra file of the archive, as forks: each is received once, by the process
that loads the archive.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rayrpc._runtime.rrefs.handle import RRef
from rayrpc._torchscript import modules
from rayrpc._torchscript.remote_modules import SCRIPTED_CLASS

__all__ = [
    "allow_rrefs",
    "loading",
    "reduce_native_module",
    "reducing",
    "refuse_rrefs",
    "saving",
]

_FILE = "rayrpc_rrefs"


class _Allowed(threading.local):
    value = False


_allowed = _Allowed()


def allow_rrefs() -> None:
    """Let this thread save modules with RRefs (``torch.distributed.rpc``)."""
    _allowed.value = True


def refuse_rrefs() -> None:
    """Let this thread save no modules with RRefs any more (``torch.distributed.rpc``)."""
    _allowed.value = False


def saving(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of ``torch._C.ScriptModule`` that saves RRefs, too."""

    def save_with_rrefs(self: Any, *args: Any, _extra_files: Any = None, **kwargs: Any) -> Any:
        files = dict(_extra_files or {})
        held = {
            path: found for path, part in modules.paths_of(self) if (found := modules.held_by(part))
        }
        if held:
            if not _allowed.value:
                raise RuntimeError(
                    "RRef jit pickling is only allowed inside RPC calls: the module has RRefs in "
                    "it; send it as an argument of a call"
                )
            files[_FILE] = _dump(held)
        return save(self, *args, _extra_files=files, **kwargs)

    return save_with_rrefs


def loading(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that loads an archive as ``load`` does, and RRefs in it, too."""

    def load_with_rrefs(unit: Any, source: Any, location: Any, files: Any, *args: Any) -> Any:
        wanted = {**files, _FILE: ""}
        module = load(unit, source, location, wanted, *args)
        data = wanted.pop(_FILE)
        files.update(wanted)
        held = pickle.loads(data) if data else {}
        for path, part in modules.paths_of(module):
            modules.expect_wrapper(part, unit, held.get(path, {}))
        return module

    return load_with_rrefs


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, RRef):
            return RRef._deserialize, (obj._serialize(),)
        return NotImplemented


def _dump(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


# -- modules as arguments of calls ------------------------------------------------------------


def reducing(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a reducer of script modules, to archives, in which RRefs are allowed."""

    def reduce_with_rrefs(module: Any) -> Any:
        if module.original_name == SCRIPTED_CLASS:
            raise RuntimeError(  # torch's text
                "Passing a script RemoteModule over RPC is not supported. Please create a "
                "RemoteModule in the sender, send the `module_rref` to the receiver, and create a "
                "new instance on the receiver end by passing this `module_rref`."
            )
        with _rrefs_allowed():
            return reduce(module)

    return reduce_with_rrefs


def reduce_native_module(module: Any) -> Any:
    """Refuse a module that compiled code has made."""
    raise RuntimeError(
        f"{module.qualified_name}: this is an RRef to a ScriptModule. It can't be sent through "
        "RPC from owner, since compiled code made the module. Call its methods there."
    )


@contextlib.contextmanager
def _rrefs_allowed() -> Iterator[None]:
    before, _allowed.value = _allowed.value, True
    try:
        yield
    finally:
        _allowed.value = before
