"""Tensors as protocol-5 buffers.

A dense CPU tensor is sent as bytes, dtype, sizes and strides.  The bytes are a ``PickleBuffer`` of
the tensor's own memory, so that encoding copies nothing.  The receiver's tensor uses the buffer of
the received frame, or a copy if that lies in an object store.  Torch's reduction takes four to ten
times as long, and copies.

Tensors of one message that share a storage share one at the receiver, too, as in torch: the first
one's bytes are sent, and others are views of it.  Where another has bytes that the first one lacks,
the codec encodes the message again, and the whole storage is sent.

Sparse, quantized and other layouts and subclasses keep torch's reduction; the dense tensors in them
are reduced here.  For tensors on other devices see ``devices``.
"""

from __future__ import annotations

import pickle
import threading
from typing import Any, NamedTuple

import numpy as np
import torch

from rayrpc._runtime.serialization.recording import reduce_recorded

__all__ = [
    "INLINE_BYTES",
    "NoDeviceError",
    "SentInPartError",
    "Storages",
    "reduce_array",
    "reduce_tensor",
    "swap_storages",
]

# Below this size a view is sent with the gaps between its elements, as torch does; from it on, a
# view whose gaps take at least as many bytes as its elements is made contiguous first.
RECOPY_BYTES = 8 * 1024

# Buffers below this many bytes are copied into the pickle: that costs less than a buffer apart.
INLINE_BYTES = 4096


# The dtypes that numpy shares with torch, as numbers: a dtype costs 40 bytes and a look-up.
_DTYPES = (
    torch.float32,
    torch.int64,
    torch.float64,
    torch.bool,
    torch.uint8,
    torch.int32,
    torch.float16,
    torch.int16,
    torch.int8,
    torch.complex64,
    torch.complex128,
)
_NUMPY = {dtype: number for number, dtype in enumerate(_DTYPES)}
_NUMPY_DTYPES = tuple(torch.empty(0, dtype=dtype).numpy().dtype for dtype in _DTYPES)


class NoDeviceError(Exception):
    """A tensor is on a device that the device map does not map to one of the receiver.

    Args:
        device (torch.device): the device that the tensor is on.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(str(device))
        self.device = device


class SentInPartError(Exception):
    """A tensor has bytes of a storage that another tensor of its message was sent without.

    Args:
        address (int): the address of the storage.
    """

    def __init__(self, address: int) -> None:
        super().__init__(address)
        self.address = address


class _Sent(NamedTuple):
    """The tensor that is sent for a storage, and which bytes of the storage it has."""

    tensor: torch.Tensor
    start: int
    end: int


class Storages:
    """The storages of one message's tensors.

    Args:
        whole: addresses of those that are sent as a whole.
    """

    __slots__ = ("_sent", "_whole")

    def __init__(self, whole: frozenset[int] = frozenset()) -> None:
        self._sent: dict[int, _Sent] = {}
        self._whole = whole

    def find(self, tensor: torch.Tensor) -> tuple[Any, ...] | None:
        """Return the reduction of a tensor as a view of one that was sent; None: send it.

        Raises:
            SentInPartError: the message must be encoded again.
        """
        storage = tensor.untyped_storage()
        nbytes, itemsize = storage.nbytes(), tensor.element_size()
        useful = tensor.numel() * itemsize
        if not useful or (nbytes >= RECOPY_BYTES and nbytes >= 2 * useful):
            return None  # torch sends a copy of so small a part
        address = storage.data_ptr()
        offset = int(tensor.storage_offset()) * itemsize
        sent = self._sent.get(address)
        if sent is None:
            if address not in self._whole:
                self._sent[address] = _Sent(tensor, offset, offset + _span(tensor) * itemsize)
                return None
            everything = torch.empty(0, dtype=torch.uint8).set_(storage)
            sent = self._sent[address] = _Sent(everything, 0, nbytes)
        elif sent.tensor is tensor:
            return None  # the whole storage
        start = offset - sent.start
        if start < 0 or offset + _span(tensor) * itemsize > sent.end or start % itemsize:
            raise SentInPartError(address)
        view = start // itemsize, tuple(tensor.shape), tensor.stride(), tensor.requires_grad
        return rebuild_view, (sent.tensor, tensor.dtype, *view)


def _span(tensor: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first to its last, in its storage."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


class _ThreadState(threading.local):
    storages: Storages | None = None


_thread = _ThreadState()


def swap_storages(storages: Storages | None) -> Storages | None:
    """Set the storages of the message that this thread encodes; return those it had before.

    Args:
        storages: None: each tensor is sent by itself.
    """
    outer = _thread.storages
    _thread.storages = storages
    return outer


def _reduce_alone(tensor: torch.Tensor) -> Any:
    """Return the reduction of a tensor that stands for another, and is never in the pickle."""
    outer = swap_storages(None)
    try:
        return reduce_tensor(tensor)
    finally:
        swap_storages(outer)


def reduce_tensor(tensor: torch.Tensor) -> Any:
    """Return the pickle reduction of a tensor of exactly the class ``torch.Tensor``."""
    number = _NUMPY.get(tensor.dtype)
    if (
        number is not None
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and tensor.is_contiguous()
    ):
        try:
            array: Any = tensor.numpy()
        except (RuntimeError, TypeError):
            pass  # another device, conjugate, negative or nested: below
        else:
            storages = _thread.storages
            if storages is not None and (view := storages.find(tensor)) is not None:
                return view
            size = array.nbytes
            if size >= INLINE_BYTES:
                return rebuild_contiguous, (pickle.PickleBuffer(array), number, array.shape)
            if size:
                return rebuild_contiguous, (bytearray(array.tobytes()), number, array.shape)
    return _reduce_strided(tensor)


def _reduce_strided(tensor: torch.Tensor) -> Any:
    if tensor.requires_grad and (recorded := reduce_recorded(tensor, _reduce_alone)) is not None:
        return recorded
    if (
        tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_nested
        or tensor._backward_hooks
    ):
        return _reduce_by_torch(tensor)
    requires_grad = tensor.requires_grad
    flat = tensor.detach() if requires_grad else tensor
    size = tuple(flat.shape)
    stride = flat.stride()
    itemsize = flat.element_size()
    if 0 in size:
        return rebuild_empty, (flat.dtype, size, stride, requires_grad)
    storages = _thread.storages
    if storages is not None and (view := storages.find(tensor)) is not None:
        return view
    span = _span(flat)
    useful = flat.numel()
    if span * itemsize >= RECOPY_BYTES and span >= 2 * useful:
        flat = flat.contiguous()
        stride = flat.stride()
        span = useful
    raw = torch.empty(0, dtype=torch.uint8)
    raw.set_(flat.untyped_storage(), flat.storage_offset() * itemsize, (span * itemsize,), (1,))
    buffer = _buffer(raw)
    return rebuild_tensor, (buffer, flat.dtype, size, stride, requires_grad)


def _buffer(tensor: torch.Tensor) -> Any:
    memory: Any = tensor.numpy()
    return _inline_if_small(memory)


def _inline_if_small(memory: np.ndarray[Any, Any]) -> Any:
    if memory.nbytes < INLINE_BYTES:
        return bytearray(memory.tobytes())
    whole: Any = memory
    return pickle.PickleBuffer(whole)


def _reduce_by_torch(tensor: torch.Tensor) -> Any:
    if tensor.device.type not in ("cpu", "meta") and tensor.layout is torch.strided:
        raise NoDeviceError(tensor.device)
    # a result of autograd is sent as the leaf that it becomes there
    leaf = tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)
    reduction: Any = leaf.__reduce_ex__(5)
    if leaf.requires_grad and leaf.layout is not torch.strided:  # torch's own reduction drops it
        return rebuild_leaf, reduction[:2]
    return reduction


def rebuild_leaf(rebuild: Any, args: tuple[Any, ...]) -> torch.Tensor:
    """Return a tensor that requires grad."""
    tensor: torch.Tensor = rebuild(*args)
    return tensor.requires_grad_()


def _copied(buffer: Any) -> Any:
    """Return a writable copy of a read-only buffer.

    It lies in an object store, which uses its memory again when this process has deleted the
    buffer, though a forked child may still read it.
    """
    return np.frombuffer(buffer, np.uint8).copy()


def rebuild_contiguous(buffer: Any, dtype: int, size: tuple[int, ...]) -> torch.Tensor:
    """Return a contiguous tensor that lies on ``buffer``; see ``rebuild_tensor``."""
    if (buffer if type(buffer) is memoryview else memoryview(buffer)).readonly:
        buffer = _copied(buffer)
    return torch.from_numpy(np.ndarray(size, _NUMPY_DTYPES[dtype], buffer))


def rebuild_tensor(
    buffer: Any,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """Return a tensor that lies on ``buffer``, or on a copy of it if that is read-only."""
    if memoryview(buffer).readonly:
        buffer = _copied(buffer)
    flat = torch.frombuffer(buffer, dtype=dtype)
    tensor = flat.as_strided(size, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def rebuild_view(
    sent: torch.Tensor,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """Return a tensor on the storage of another, ``offset`` elements from its begin."""
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(sent.untyped_storage(), offset, size, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def rebuild_empty(
    dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    """Return a tensor without elements."""
    tensor = torch.empty_strided(size, stride, dtype=dtype)
    return tensor.requires_grad_() if requires_grad else tensor


def reduce_array(array: np.ndarray[Any, Any]) -> Any:
    """Return the pickle reduction of a numpy array; like tensors, received ones are writable."""
    if array.dtype.hasobject or not array.nbytes or not array.flags.c_contiguous:
        return array.__reduce_ex__(5)
    return rebuild_array, (_inline_if_small(array), array.dtype, array.shape)


def rebuild_array(buffer: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    """Return an array that lies on ``buffer``; see ``rebuild_tensor``."""
    if memoryview(buffer).readonly:
        buffer = _copied(buffer)
    return np.ndarray(shape, dtype, buffer)
