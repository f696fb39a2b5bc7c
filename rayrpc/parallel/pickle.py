"""Objects to bytes and back, tensors by value or by reference: ``machin.parallel.pickle``."""

from __future__ import annotations

import importlib
import io
import pickle
import types
from collections import ChainMap
from multiprocessing.reduction import ForkingPickler
from typing import Any, Protocol

import cloudpickle
import torch
from torch.multiprocessing.reductions import (
    StorageWeakRef,
    init_reductions,
    rebuild_storage_filename,
    reduce_storage,
    shared_cache,
)

__all__ = ["Pickler", "dumps", "loads", "mark_static_module"]

_static_modules: set[str] = set()


def mark_static_module(module: types.ModuleType) -> None:
    """Pickle a module by its name from now on, not by its contents.

    Importable modules are pickled so in any case.  Mark a module that was made in another way, and
    is the same in each process.

    Args:
        module (ModuleType): to mark.

    Source: ``machin.parallel.pickle.mark_static_module``.
    """
    _static_modules.add(module.__name__)


def _reduce_by_value(tensor: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    return _load_tensor, (file.getvalue(),)


def _load_tensor(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _reducers_by_reference() -> dict[Any, Any]:
    """Return a copy of the reducers of ``torch.multiprocessing``, which share memory."""
    init_reductions()
    reducers = dict(ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
    reducers[torch.UntypedStorage] = _reduce_storage
    return reducers


def _reduce_storage(storage: Any) -> Any:
    """Reduce a storage to the name of its memory, whatever torch's sharing strategy is.

    The other strategy, a file descriptor, works between children of the same parent only.
    """
    if storage.device.type != "cpu" or storage.size() == 0:
        return reduce_storage(storage)
    place = storage._share_filename_cpu_()
    shared_cache[place[1]] = StorageWeakRef(storage)
    storage._shared_incref()  # released by the process that unpickles it
    return rebuild_storage_filename, (type(storage), *place)


class _Writer(Protocol):
    def write(self, data: bytes, /) -> object:
        """Write bytes."""


class Pickler(cloudpickle.Pickler):
    """Pickle objects, local functions and lambdas too.

    Args:
        file (BinaryIO): has a ``write`` method that takes bytes.
        recurse (bool): accepted for machin's sake: local functions are pickled in any case.
        copy_tensor (bool): pickle tensors by value.  Else by reference, to be unpickled once, by a
            process on the same node: tensors on a GPU stay there, others are moved to shared
            memory.

    Source: ``machin.parallel.pickle.Pickler``, which is a pickler of dill.
    """

    def __init__(self, file: _Writer, recurse: bool = False, copy_tensor: bool = False) -> None:
        if copy_tensor:
            tensors: dict[Any, Any] = {
                torch.Tensor: _reduce_by_value,
                torch.nn.Parameter: _reduce_by_value,
            }
        else:
            tensors = _reducers_by_reference()
        self.dispatch_table = ChainMap(tensors, cloudpickle.Pickler.dispatch_table)
        super().__init__(file)  # type: ignore[no-untyped-call]

    def reducer_override(self, obj: Any) -> Any:
        """Reduce marked modules to their names; called by ``pickle`` for each object.

        Args:
            obj: that is being pickled.

        Returns:
            What ``object.__reduce__`` would, or NotImplemented.

        Source: ``pickle.Pickler.reducer_override``.
        """
        if isinstance(obj, types.ModuleType) and obj.__name__ in _static_modules:
            return _find_module, (obj.__name__,)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


def _find_module(name: str) -> Any:
    return importlib.import_module(name)


def dumps(obj: Any, recurse: bool = False, copy_tensor: bool = True) -> bytes:
    """Pickle an object.

    Args:
        obj: to pickle.
        recurse (bool): accepted for machin's sake.
        copy_tensor (bool): pickle tensors by value; see ``Pickler``.

    Returns:
        bytes: for ``loads``.

    Raises:
        TypeError, pickle.PicklingError: ``obj`` cannot be pickled.

    Source: ``machin.parallel.pickle.dumps``.
    """
    file = io.BytesIO()
    Pickler(file, recurse, copy_tensor).dump(obj)  # type: ignore[no-untyped-call]
    return file.getvalue()


def loads(data: bytes) -> Any:
    """Unpickle an object.

    Args:
        data (bytes): from ``dumps``, and from a process that you trust: it can run any code.

    Returns:
        The object.

    Raises:
        RuntimeError: it refers to memory that is not on this node.

    Source: ``machin.parallel.pickle.loads``.
    """
    return pickle.loads(data)
