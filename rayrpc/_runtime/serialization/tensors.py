"""Tensors as protocol-5 buffers.

A dense CPU tensor is its bytes, dtype, sizes and strides.  The bytes are a ``PickleBuffer`` over
the tensor's own memory, so that encoding copies nothing.  The receiver's tensor uses the buffer of
the received frame, which belongs to it alone.  Torch's reduction takes four to ten times as long,
and copies.

Sparse, quantized and other layouts and subclasses keep torch's reduction; the dense tensors in them
are reduced here.  For tensors on other devices see ``devices``.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch

from rayrpc._runtime.serialization.recording import reduce_recorded

__all__ = ["INLINE_BYTES", "NoDeviceError", "reduce_array", "reduce_tensor"]

# Below this size a view is sent with the gaps between its elements, as torch does; above it,
# when the gaps weigh more than the elements, it is made contiguous first.
RECOPY_BYTES = 8 * 1024

# Buffers below this many bytes stay in the pickle: a small one costs more apart than copied.
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
    """A tensor is on a device that has no place at the receiver.

    Args:
        device (torch.device): which.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(str(device))
        self.device = device


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
            size = array.nbytes
            if size >= INLINE_BYTES:
                return rebuild_contiguous, (pickle.PickleBuffer(array), number, array.shape)
            if size:
                return rebuild_contiguous, (bytearray(array.tobytes()), number, array.shape)
    return _reduce_strided(tensor)


def _reduce_strided(tensor: torch.Tensor) -> Any:
    if tensor.requires_grad and (recorded := reduce_recorded(tensor, reduce_tensor)) is not None:
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
    span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
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


class _Memory:
    """Present a read-only buffer as memory that numpy may hand out for writing."""

    def __init__(self, buffer: Any, view: np.ndarray[Any, Any]) -> None:
        self._buffer = buffer  # keeps the memory alive
        self.__array_interface__ = {
            "data": (view.__array_interface__["data"][0], False),
            "shape": (view.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def rebuild_contiguous(buffer: Any, dtype: int, size: tuple[int, ...]) -> torch.Tensor:
    """Return a contiguous tensor that lies on ``buffer``; see ``rebuild_tensor``."""
    if not (buffer if type(buffer) is memoryview else memoryview(buffer)).readonly:
        return torch.from_numpy(np.ndarray(size, _NUMPY_DTYPES[dtype], buffer))
    return _flat(buffer, _DTYPES[dtype]).view(size)


def _flat(buffer: Any, dtype: torch.dtype) -> torch.Tensor:
    view = memoryview(buffer)
    if view.readonly:
        array = np.asarray(_Memory(buffer, np.frombuffer(view, dtype=np.uint8)))
        return torch.from_numpy(array).view(dtype)
    return torch.frombuffer(buffer, dtype=dtype)


def rebuild_tensor(
    buffer: Any,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """Return a tensor that lies on ``buffer``, writable and owned by the caller.

    The buffer was made for this one receiver, whatever its flags say: object stores mark what
    they hand out as read-only because others may read it too.
    """
    flat = _flat(buffer, dtype)
    tensor = flat.as_strided(size, stride)
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
        buffer = np.asarray(_Memory(buffer, np.frombuffer(buffer, dtype=np.uint8)))
    return np.ndarray(shape, dtype, buffer)
