"""Objects to bytes and buffers, and back.

    plain pickle        functions and classes by reference: 1 µs and 30 bytes a function
    ... else cloudpickle    by value: lambdas, closures, and what lives in a ``__main__`` that the
                            other side does not share (a notebook cell)

Tensors leave the pickle as protocol-5 buffers (``tensors``); RRefs, and references to objects of
the cluster's store, as ``sessions`` says.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
import types
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import torch
from cloudpickle.cloudpickle import _PICKLE_BY_VALUE_MODULES

from rayrpc._concurrency.outcome import Value, text_of
from rayrpc._protocol.messages import PLAIN_TYPES, Buffer, Fork, Payload, SharedForks
from rayrpc._runtime.current_call import is_interrupt
from rayrpc._runtime.invocation import Invocation
from rayrpc._runtime.serialization.devices import DeviceMap, reduce_mapped
from rayrpc._runtime.serialization.global_versions import UnitFoundError
from rayrpc._runtime.serialization.recording import begin_message, reduce_recorded
from rayrpc._runtime.serialization.reducers import REDUCERS, Reducer
from rayrpc._runtime.serialization.sessions import (
    ArgumentObject,
    Encoding,
    Sharer,
    object_types,
    session,
)
from rayrpc._runtime.serialization.shared_globals import SharesGlobals
from rayrpc._runtime.serialization.tensors import (
    NoDeviceError,
    SentInPartError,
    Storages,
    reduce_tensor,
    swap_storages,
)
from rayrpc.errors import FunctionNotFoundError, SerializationError

__all__ = ["Codec", "dump_tables", "load_tables"]

NOT_ON_CALLEE = (
    " Default RPC pickler does not serialize function code. Ensure that UDFs are defined on both "
    "caller and callee modules."
)

# Bytes of a pickle beside its buffers: with its header, less than 4 GiB.
MAX_PICKLE = (1 << 32) - (1 << 24)
# Modules that go by value wherever the receiver has another one.
_MAINS = frozenset({"__main__", "__mp_main__"})


class _ByReference(pickle.Pickler):
    dispatch_table: Any = REDUCERS


class _ByValue(SharesGlobals, cloudpickle.Pickler):
    dispatch_table: Any = ChainMap(REDUCERS, cloudpickle.Pickler.dispatch_table)  # noqa: RUF012


def _reduce_mapped(tensor: torch.Tensor) -> Any:
    encoding = session.encoding
    assert encoding is not None and encoding.devices is not None
    if tensor.requires_grad and (recorded := reduce_recorded(tensor, _reduce_mapped)) is not None:
        return recorded
    return reduce_mapped(tensor, encoding.devices, reduce_tensor)


class _MappedByReference(pickle.Pickler):
    dispatch_table: Any = ChainMap({torch.Tensor: _reduce_mapped}, REDUCERS)  # noqa: RUF012


class _MappedByValue(SharesGlobals, cloudpickle.Pickler):
    dispatch_table: Any = ChainMap({torch.Tensor: _reduce_mapped}, _ByValue.dispatch_table)  # noqa: RUF012


#: by whether functions go by value, and whether a device map applies
_PICKLERS: dict[tuple[bool, bool], Any] = {
    (False, False): _ByReference,
    (True, False): _ByValue,
    (False, True): _MappedByReference,
    (True, True): _MappedByValue,
}


def _has_to_go_by_value(data: bytes, shares_main: bool) -> bool:
    """Tell whether a pickle by reference may name what the receiver does not have, or not so.

    Args:
        data: the pickle.
        shares_main: the receiver's ``__main__`` is the same program as ours.
    """
    if not shares_main and (b"__main__" in data or b"__mp_main__" in data):
        return True
    # of ``cloudpickle.register_pickle_by_value``; mostly empty
    names = _PICKLE_BY_VALUE_MODULES - _MAINS
    return bool(names) and any(name.encode() in data for name in names)


def _is_plain(invocation: Invocation) -> bool:
    """Tell whether any pickler takes a call: of a Python function, with plain arguments."""
    func, args, kwargs = invocation
    if type(func) is not types.FunctionType or type(args) is not tuple or type(kwargs) is not dict:
        return False
    are_plain = PLAIN_TYPES.issuperset
    return are_plain(map(type, args)) and (not kwargs or are_plain(map(type, kwargs.values())))


def _dump_plain(obj: Any) -> Payload:
    """Pickle an object in which no reducer takes part."""
    data = pickle.dumps(obj, 5)
    if len(data) > MAX_PICKLE:
        raise _too_large(len(data))
    return Payload(data, [])


class Codec:
    """Encode and decode for one worker.

    Args:
        sharer (Sharer): forks and receives RRefs.
    """

    def __init__(self, sharer: Sharer) -> None:
        self._sharer = sharer

    def encode(
        self,
        obj: Any,
        to: int | None,
        shares_main: bool,
        devices: DeviceMap | None = None,
        lends: bool = False,
        is_plain: bool = False,
    ) -> Payload:
        """Pickle ``obj`` for worker ``to``.

        Args:
            obj: the object.
            to (int | None): the receiving worker's id; None if not known.
            shares_main (bool): the receiver's ``__main__`` is the same program as ours.
            devices (DeviceMap | None): where tensors go there.
            lends (bool): lend the receiver its own RRefs instead of forking them: for requests,
                whose caller keeps its forks until the reply.
            is_plain (bool): by reference, it is pickled without reducers.

        Raises:
            SerializationError: it cannot be pickled, by reference or by value, or is too large.
            NoDeviceError: a tensor in it is on a device that ``devices`` does not map.
        """
        if type(obj) in PLAIN_TYPES:
            return _dump_plain(obj)
        try:
            if is_plain:
                payload = _dump_plain(obj)
            else:
                payload = self._dump(obj, to, devices, lends, by_value=False)
        except (pickle.PicklingError, AttributeError, TypeError) as exc:
            return self._by_value(obj, to, exc, devices, lends)
        if _has_to_go_by_value(payload.data, shares_main):
            for fork in payload.forks:
                self._sharer.unshare(fork)
            return self._by_value(obj, to, None, devices, lends)
        return payload

    def encode_call(
        self,
        invocation: Invocation,
        to: int,
        shares_main: bool,
        devices: DeviceMap | None,
        at_hand: Callable[[Any], Value[Any] | None],
    ) -> Payload:
        """Pickle a call; see ``encode``.

        A reference to an object that is itself an argument arrives as the object's value.

        Args:
            invocation: the call.
            to, shares_main, devices: as for ``encode``.
            at_hand: returns the value of an object if that is to be sent instead of the reference.
        """

        def change(argument: Any) -> Any:
            found = at_hand(argument) if type(argument) in object_types else None
            return _by_reference(argument) if found is None else found.value

        is_plain = _is_plain(invocation)
        payload = self.encode(tuple(invocation), to, shares_main, devices, True, is_plain)
        if payload.objects is None:
            return payload
        changed = tuple(invocation.map(change))
        try:
            return self.encode(changed, to, shares_main, devices, lends=True)
        except NoDeviceError:  # of a value at hand; an object needs no device map
            changed = tuple(invocation.map(_by_reference))
            return self.encode(changed, to, shares_main, devices, lends=True)

    def _by_value(
        self,
        obj: Any,
        to: int | None,
        first: BaseException | None,
        devices: DeviceMap | None,
        lends: bool,
    ) -> Payload:
        main = sys.modules.get("__mp_main__")
        if main is not None:  # the main of a spawned process is one, too
            cloudpickle.register_pickle_by_value(main)
        try:
            return self._dump(obj, to, devices, lends, by_value=True)
        except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as exc:
            raise SerializationError(
                f"cannot be sent to another worker: {text_of(exc)}. Send only what pickle or "
                "cloudpickle can take: keep locks, sockets, threads and generators where they "
                "are, and share such objects through an RRef."
            ) from (first or exc)

    def _dump(
        self, obj: Any, to: int | None, devices: DeviceMap | None, lends: bool, by_value: bool
    ) -> Payload:
        whole: frozenset[int] = frozenset()
        while True:
            outer = swap_storages(Storages(whole))
            try:
                return self._dump_once(obj, to, devices, lends, by_value)
            except SentInPartError as exc:
                whole |= {exc.address}
            except UnitFoundError:
                pass  # the unit is noted now: pickle again
            finally:
                swap_storages(outer)

    def _dump_once(
        self, obj: Any, to: int | None, devices: DeviceMap | None, lends: bool, by_value: bool
    ) -> Payload:
        encoding = Encoding(self._sharer, to, lends, by_value, devices)
        pickler = _PICKLERS[by_value, devices is not None]
        file = io.BytesIO()
        begin_message()
        outer = session.encoding
        session.encoding = encoding
        try:
            pickler(file, protocol=5, buffer_callback=encoding.buffers.append).dump(obj)
            if file.tell() > MAX_PICKLE:
                raise _too_large(file.tell())
            forks = tuple(encoding.forks)
            if forks and lends:  # a request
                forks = SharedForks.of(forks, self._sharer.release_later)
        except BaseException:
            for fork in encoding.forks:
                self._sharer.unshare(fork)
            raise
        finally:
            session.encoding = outer
        lent, objects = tuple(encoding.lent), encoding.objects
        return Payload(file.getvalue(), encoding.buffers, forks, lent, objects)

    def decode(
        self,
        data: bytes,
        buffers: Sequence[Buffer],
        forks: Sequence[Fork],
        taken: set[int] | None = None,
        objects: Sequence[Any] = (),
    ) -> Any:
        """Unpickle a payload.

        Args:
            data, buffers: the pickle.
            forks: of the RRefs in it.
            taken: takes the positions of the forks that were received.
            objects: what its references to objects are to become, by position.

        Raises:
            FunctionNotFoundError: it names a function, class or module that is not here.
            SerializationError: it cannot be unpickled.
            RuntimeError: it raised an error that would end this thread, as SystemExit does.
        """
        if objects:
            outer_objects, session.objects = session.objects, objects
            try:
                return self.decode(data, buffers, forks, taken)
            finally:
                session.objects = outer_objects
        if not forks:
            return self._load(data, buffers)
        if taken is None:
            taken = set()

        def receive(position: int) -> Any:
            received = self._sharer.receive(forks[position])
            taken.add(position)
            return received

        outer = session.receive
        session.receive = receive
        try:
            return self._load(data, buffers)
        finally:
            session.receive = outer
            self.discard(forks, taken)

    def discard(self, forks: Sequence[Fork], taken: set[int]) -> None:
        """Receive and release the forks that were not received; see ``decode``."""
        for position, fork in enumerate(forks):
            if position not in taken:
                self._sharer.discard(fork)
                taken.add(position)

    def _load(self, data: bytes, buffers: Sequence[Buffer]) -> Any:
        outer = session.sharer
        session.sharer = self._sharer
        try:
            return pickle.loads(data, buffers=buffers) if buffers else pickle.loads(data)
        except (AttributeError, ImportError) as exc:
            raise FunctionNotFoundError(f"{text_of(exc)}.{NOT_ON_CALLEE}") from exc
        except (pickle.UnpicklingError, EOFError, IndexError) as exc:
            raise SerializationError(f"cannot be unpickled: {text_of(exc)}") from exc
        except BaseException as exc:
            if isinstance(exc, Exception) or is_interrupt(exc):
                raise
            raise RuntimeError(f"{type(exc).__name__}: {text_of(exc)}") from exc
        finally:
            session.sharer = outer


def _by_reference(argument: Any) -> Any:
    return ArgumentObject(argument) if type(argument) in object_types else argument


def _too_large(size: int) -> SerializationError:
    return SerializationError(
        f"cannot be sent to another worker: its pickle has {size} bytes beside its tensors, and "
        f"{MAX_PICKLE} are possible. Send it in parts, or as tensors or arrays, which may be "
        "larger."
    )


# -- picklers of users --------------------------------------------------------------------------


def dump_tables(obj: Any, rref_reducer: Reducer) -> tuple[bytes, list[torch.Tensor]]:
    """Pickle an object for a user's pickler.

    Returns:
        The bytes, and the tensors that left the pickle; RRefs are reduced by ``rref_reducer``.
    """
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> Any:
        tensors.append(tensor)
        return _tensor_receiver, (len(tensors) - 1,)

    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5)
    pickler.dispatch_table = ChainMap({torch.Tensor: take}, REDUCERS)
    outer = session.reduce
    session.reduce = rref_reducer
    try:
        pickler.dump(obj)
    finally:
        session.reduce = outer
    return file.getvalue(), tensors


def load_tables(data: bytes, tensors: Sequence[torch.Tensor]) -> Any:
    """Unpickle what ``dump_tables`` returned."""
    outer = _tables.tensors
    _tables.tensors = tensors
    try:
        return pickle.loads(data)
    except AttributeError as exc:
        raise FunctionNotFoundError(f"{exc}.{NOT_ON_CALLEE}") from exc
    finally:
        _tables.tensors = outer


class _Tables(threading.local):
    tensors: Sequence[torch.Tensor] = ()


_tables = _Tables()


def _tensor_receiver(index: int) -> torch.Tensor:
    return _tables.tensors[index]
