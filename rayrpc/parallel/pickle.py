"""Objects to bytes and back, tensors by value or by reference: ``machin.parallel.pickle``."""

from __future__ import annotations

import importlib
import io
import pickle
import types
from collections import ChainMap
from multiprocessing.reduction import ForkingPickler
from typing import Any

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

_static: set[str] = set()


def mark_static_module(module: types.ModuleType) -> None:
    """Pickle a module by its name alone.

    That is so for every module that can be imported; mark one that was made in another way, and is
    the same in each process.

    Args:
        module: whose state is not to be pickled.

    Source: ``machin.parallel.pickle.mark_static_module``.
    """
    _static.add(module.__name__)


def _by_value(tensor: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    return _load, (file.getvalue(),)


def _load(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _by_reference() -> dict[Any, Any]:
    """Return the reductions that ``torch.multiprocessing`` has, without a lasting change."""
    init_reductions()
    reducers = dict(ForkingPickler._extra_reducers)  # type: ignore[attr-defined]
    reducers[torch.UntypedStorage] = _share
    return reducers


def _share(storage: Any) -> Any:
    """Reduce a storage to the name of its memory, whatever torch's sharing strategy is.

    A file descriptor, which is the other way, can only be handed to children of the same parent.
    """
    if storage.device.type != "cpu" or storage.size() == 0:
        return reduce_storage(storage)
    place = storage._share_filename_cpu_()
    shared_cache[place[1]] = StorageWeakRef(storage)
    storage._shared_incref()  # until it is loaded
    return rebuild_storage_filename, (type(storage), *place)


class Pickler(cloudpickle.Pickler):
    """Pickle objects, local functions and lambdas too.

    Args:
        file: with a ``write`` method that takes bytes.
        recurse (bool): accepted for machin's sake: local functions are pickled in any case.
        copy_tensor (bool): put the values of tensors into the pickle; else a reference, to be
            loaded once, by a process on the same node. Tensors on a GPU stay where they are;
            others are moved to shared memory, if they are not there.

    Source: ``machin.parallel.pickle.Pickler``, which is a pickler of dill.
    """

    def __init__(self, file: Any, recurse: bool = False, copy_tensor: bool = False) -> None:
        if copy_tensor:
            tensors: dict[Any, Any] = {
                torch.Tensor: _by_value,
                torch.nn.Parameter: _by_value,
            }
        else:
            tensors = _by_reference()
        self.dispatch_table = ChainMap(tensors, cloudpickle.Pickler.dispatch_table)
        super().__init__(file)  # type: ignore[no-untyped-call]

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a marked module to its name."""
        if isinstance(obj, types.ModuleType) and obj.__name__ in _static:
            return _find_module, (obj.__name__,)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


def _find_module(name: str) -> Any:
    return importlib.import_module(name)


def dumps(obj: Any, recurse: bool = False, copy_tensor: bool = True) -> bytes:
    """Return an object as bytes.

    Args:
        obj: to pickle.
        recurse, copy_tensor: as for ``Pickler``.

    Source: ``machin.parallel.pickle.dumps``.
    """
    file = io.BytesIO()
    Pickler(file, recurse, copy_tensor).dump(obj)  # type: ignore[no-untyped-call]
    return file.getvalue()


def loads(data: bytes) -> Any:
    """Return the object that ``dumps`` took.

    Args:
        data: of whom you trust.
    """
    return pickle.loads(data)
