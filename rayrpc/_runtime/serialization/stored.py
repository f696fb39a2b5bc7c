"""Values and errors as objects of the cluster's store, for readers that may be in no group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rayrpc._concurrency.outcome import Error, Outcome, text_of
from rayrpc._protocol.messages import Payload
from rayrpc._runtime.serialization.codec import Codec
from rayrpc._runtime.serialization.remote_errors import RemoteException, described_as, rebuild
from rayrpc._runtime.serialization.sessions import NoRRefs
from rayrpc._runtime.serialization.tensors import NoDeviceError

__all__ = ["decode_stored", "encode_stored"]


_codec = Codec(
    NoRRefs("cannot be an object of Ray's store: it has an RRef, which only calls can send")
)


class _SameDevices(dict[torch.device, torch.device]):
    """The device map of objects: a tensor arrives on the reader's device of the same name."""

    def get(self, device: torch.device, otherwise: Any = None) -> Any:
        return device


def encode_stored(outcome: Outcome[Any]) -> Payload:
    """Pickle a value, or an error, for readers that do not share this process's main module.

    A value that cannot be pickled becomes the error that says so.
    """
    if not isinstance(outcome, Error):
        try:
            return _encode_value(outcome.value)
        except Exception as exc:
            outcome = Error(exc)
    outcome.is_known = True
    return _codec.encode((_described(outcome), None), None, shares_main=False)


def _encode_value(value: Any) -> Payload:
    try:
        return _codec.encode((None, value), None, shares_main=False)
    except NoDeviceError:
        return _codec.encode((None, value), None, shares_main=False, devices=_SameDevices())


def _described(outcome: Error) -> RemoteException:
    if outcome.remote is not None:
        return RemoteException(*outcome.remote)
    args = outcome.error.args
    text = args[0] if len(args) == 1 and type(args[0]) is str else text_of(outcome.error)
    # ``rebuild`` takes it for a part of a repr
    return described_as(text.replace("\\", r"\\"), outcome.error, _encode_type)


def _encode_type(kind: Any) -> bytes:
    return _codec.encode(kind, None, shares_main=False).data


def decode_stored(data: bytes, buffers: Sequence[Any], refs: Sequence[Any]) -> Any:
    """Return the value that ``encode_stored`` was given, or raise the error."""
    error, value = _codec.decode(data, buffers, (), objects=refs)
    if error is not None:
        raise rebuild(error, keeps_type=True)
    return value
