"""What the globals of functions that go by value contain: digests of their pickles.

Functions that go by value are pickled without the globals that they use, classes that go by value
as their ids, tensors as their values, RRefs and ObjectRefs as the identity of what they refer to.
"""

from __future__ import annotations

import hashlib
import itertools
import pickle
import types
import weakref
from collections import ChainMap, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, Protocol

import cloudpickle
import numpy as np
import torch
from cloudpickle.cloudpickle import _should_pickle_by_reference

from rayrpc._protocol.messages import PLAIN_TYPES
from rayrpc._runtime.serialization.function_parts import cells_of, names_of
from rayrpc._runtime.serialization.recording import swap_recorder
from rayrpc._runtime.serialization.reducers import REDUCERS
from rayrpc._runtime.serialization.sessions import session

__all__ = [
    "Content",
    "Found",
    "Home",
    "HomeOf",
    "Key",
    "Node",
    "Received",
    "class_id",
    "content_of",
]

#: of a set of globals: the process that sent it first, and the name of the module there
Key = tuple[str, str]
#: a global: the key of its set, and its name; or a class: its process, nothing, and its id
Node = tuple[str, str, str]

_PLAIN_SIZE = 64  # bytes that a content may have before it is hashed
_CONTAINERS = (list, dict, set, bytearray, deque, np.ndarray, torch.Tensor, torch.nn.Module)


class Found(NamedTuple):
    """Globals.

    Args:
        values (dict[str, Any]): by name.
        versions (dict[str, int]): the versions of received ones; empty if they are this process's.
        units (list[tuple[str, ...]]): names of those that belong together.
    """

    values: dict[str, Any]
    versions: dict[str, int]
    units: list[tuple[str, ...]]


class Home(Protocol):
    """A set of globals."""

    key: Key

    def find(self, names: Iterable[str]) -> Found:
        """Return those of the names that it has, with the values that its program has set."""


#: returns the set of globals of a function; None: one that has no versions
HomeOf = Callable[[types.FunctionType], Home | None]


class Received(NamedTuple):
    """A global of another process, identified by its version alone."""

    version: int


class Content(NamedTuple):
    """The content of a value.

    Args:
        digest (bytes): of its pickle.
        uses (dict[Node, Any]): the globals that functions in it use; a ``Received`` each for those
            of another process.
        objects (dict): the objects in it that can be changed, by their identities.
    """

    digest: bytes
    uses: dict[Node, Any]
    objects: dict[Hashable, Any]


_class_ids: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_counter = itertools.count()


def class_id(cls: type) -> str:
    """Return an id that no other class of this process has."""
    return _class_ids.setdefault(cls, str(next(_counter)))


def content_of(value: Any, home_of: HomeOf) -> Content:
    """Return the content of a value.

    Args:
        value: of a global; a ``Received`` for one of another process.
        home_of (HomeOf): finds the globals of functions.
    """
    if type(value) in PLAIN_TYPES:
        data = pickle.dumps(value, 5)
        if len(data) > _PLAIN_SIZE:
            data = hashlib.sha1(data, usedforsecurity=False).digest()
        return Content(data, {}, {})
    if type(value) is types.ModuleType:
        return Content(value.__name__.encode(), {}, {})
    if type(value) is Received:
        return Content(str(value.version).encode(), {}, {})
    if type(value) is types.FunctionType and _is_bare(value):
        home = home_of(value)
        if home is not None and not _should_pickle_by_reference(value):
            names = repr((value.__qualname__, home.key)).encode()
            return Content(_digest_of_code(value.__code__) + names, _used_by(value, home), {})
    return _pickled(value, home_of)


def _pickled(value: Any, home_of: HomeOf) -> Content:
    digest = _Digest()
    pickler: Any = _ContentPickler(digest, home_of)
    identities: Any = _Identities()
    outer_encoding, session.encoding = session.encoding, identities
    outer_recorder = swap_recorder(None)
    try:
        pickler.dump(value)
    except Exception:  # its own pickler may be able to send it, always as a new content
        return Content(str(next(_counter)).encode(), {}, {})
    finally:
        session.encoding = outer_encoding
        swap_recorder(outer_recorder)
    kinds: dict[type, bool] = {}
    objects = {}
    for _, obj in pickler.memo.copy().values():  # all that was pickled, but for atoms
        kind = type(obj)
        if kind not in kinds:
            kinds[kind] = _can_change(kind)
        if kinds[kind]:
            objects[_identity(obj)] = obj
    return Content(digest.end(), pickler.used, objects)


def _can_change(kind: type) -> bool:
    """Return whether a change of an instance through one global is visible through another."""
    if issubclass(kind, _CONTAINERS):
        return True
    if issubclass(kind, (type, types.FunctionType, types.ModuleType)):
        return False
    if kind.__module__ == "builtins":  # functions in C, and other types that have no name there
        return False
    return not _should_pickle_by_reference(kind)  # of a class of the program


def _identity(obj: Any) -> Hashable:
    if isinstance(obj, torch.Tensor) and obj.layout is torch.strided and not obj.is_nested:
        address = obj.untyped_storage().data_ptr()
        return ("storage", address) if address else id(obj)
    return id(obj)


class _Digest:
    """Compute a digest of what is written to it as a file, and of buffers."""

    def __init__(self) -> None:
        self._hash = hashlib.sha1(usedforsecurity=False)

    def write(self, data: Any) -> int:
        self._hash.update(data)
        return len(data)

    def take(self, buffer: pickle.PickleBuffer) -> None:
        self._hash.update(buffer.raw())

    def end(self) -> bytes:
        return self._hash.digest()


class _Identities:
    """Reduce RRefs and references to objects in contents; used in place of an ``Encoding``."""

    by_value = True
    devices = None

    def share(self, rref: Any) -> Any:
        return _Standing, (str(rref), rref._home.key)

    def refer(self, ref: Any, is_argument: bool) -> Any:
        return _Standing, (repr(ref),)


class _Standing:
    """Replace an object in a content, which is never unpickled."""


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    flat = tensor.detach()
    if flat.layout is not torch.strided or flat.is_quantized or flat.is_nested or flat.is_meta:
        return flat.__reduce_ex__(5)
    flat = flat.cpu().contiguous().resolve_conj().resolve_neg()
    # a contiguous tensor of one element may have any stride, with which no bytes are seen
    memory: Any = flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
    kind = str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad, str(tensor.device)
    return _Standing, (pickle.PickleBuffer(memory.numpy()), *kind)


def _reduce_code(code: types.CodeType) -> Any:
    return _Standing, (_digest_of_code(code),)


_code_digests: weakref.WeakKeyDictionary[types.CodeType, bytes] = weakref.WeakKeyDictionary()


def _digest_of_code(code: types.CodeType) -> bytes:
    digest = _code_digests.get(code)
    if digest is None:
        digest = hashlib.sha1(cloudpickle.dumps(code), usedforsecurity=False).digest()
        _code_digests[code] = digest
    return digest


def _is_bare(func: types.FunctionType) -> bool:
    """Tell whether a function has no parts but its code."""
    parts = func.__closure__, func.__defaults__, func.__kwdefaults__, func.__dict__
    return not any(parts)


def _used_by(func: types.FunctionType, home: Home) -> dict[Node, Any]:
    values, versions, _ = home.find(names_of(func.__code__).used)
    used = {**values, **{name: Received(version) for name, version in versions.items()}}
    return {(*home.key, name): value for name, value in used.items()}


_CONTENT_REDUCERS: Any = ChainMap(
    {
        torch.Tensor: _reduce_tensor,
        torch.nn.Parameter: _reduce_tensor,
        types.CodeType: _reduce_code,
    },
    REDUCERS,
    cloudpickle.Pickler.dispatch_table,
)


class _ContentPickler(cloudpickle.Pickler):
    """Pickle a value to its digest.

    Functions that go by value are pickled without the globals that they use, which are collected.

    Args:
        digest: takes the pickle.
        home_of: see ``content_of``.
    """

    dispatch_table: Any = _CONTENT_REDUCERS

    def __init__(self, digest: _Digest, home_of: HomeOf) -> None:
        cloud: Any = super()
        cloud.__init__(digest, protocol=5, buffer_callback=digest.take)
        self._home_of = home_of
        self.used: dict[Node, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and not _should_pickle_by_reference(obj):
            return _Standing, (class_id(obj),)
        if isinstance(obj, types.FunctionType) and not _should_pickle_by_reference(obj):
            return _Standing, (), self._parts(obj)
        return NotImplemented

    def _parts(self, func: types.FunctionType) -> Any:
        defaults = func.__defaults__, func.__kwdefaults__
        parts = func.__code__, func.__qualname__, *defaults, cells_of(func), dict(func.__dict__)
        home = self._home_of(func)
        if home is None:
            names, values = names_of(func.__code__).used, func.__globals__
            return parts, {name: values[name] for name in names if name in values}
        self.used.update(_used_by(func, home))
        return parts, home.key
