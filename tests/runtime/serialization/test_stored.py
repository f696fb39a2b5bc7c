"""Values and errors as objects that readers outside of the group unpickle."""

import threading
from typing import Any

import pytest
import torch

from rayrpc._concurrency.outcome import Error, Value
from rayrpc._runtime.serialization import stored
from rayrpc._runtime.serialization.remote_errors import RemoteException
from rayrpc._runtime.serialization.stored import decode_stored, encode_stored
from rayrpc._runtime.serialization.tensors import NoDeviceError
from rayrpc.errors import SerializationError, WorkerDiedError


def read(outcome):
    payload = encode_stored(outcome)
    refs = () if payload.objects is None else payload.objects.refs
    return decode_stored(payload.data, payload.buffers, refs)


def test_a_value_comes_back():
    value: Any = {"x": torch.arange(2000), "y": [1, "two"], "z": lambda x: x + 1}
    got = read(Value(value))
    assert torch.equal(got["x"], value["x"]) and got["y"] == [1, "two"] and got["z"](1) == 2
    assert read(Value(None)) is None


@pytest.mark.parametrize(
    "text", ["plain", "two\nlines", r"C:\new\table", "it's \"quoted\" \\' twice", r"\\n"]
)
def test_an_error_comes_back_of_its_own_type_and_text(text):
    outcome = Error(LookupError(text), None, "a call")
    with pytest.raises(LookupError) as caught:
        read(outcome)
    assert caught.value.args == (text,)
    assert outcome.is_known  # it is not logged as one that nobody has asked for


def test_errors_of_rayrpc_keep_what_they_know():
    with pytest.raises(WorkerDiedError) as caught:
        read(Error(WorkerDiedError("alice", "killed", "10.0.0.1")))
    assert (caught.value.worker, caught.value.node) == ("alice", "10.0.0.1")


def test_an_error_that_another_worker_has_described_is_passed_on():
    payload = encode_stored(Error(ValueError("here")))
    described = RemoteException(
        "On WorkerInfo(id=1, name=a):\nKeyError('x')\n", b"", "KeyError", {}
    )
    with pytest.raises(RuntimeError, match="KeyError cannot be sent"):
        read(Error(KeyError("x"), tuple(described)))
    with pytest.raises(ValueError, match="here"):
        decode_stored(payload.data, payload.buffers, ())


def test_what_cannot_be_sent_is_an_error():
    with pytest.raises(SerializationError, match="cannot be sent"):
        read(Value(threading.Lock()))

    class Local(Exception):
        def __init__(self, one, two):
            super().__init__(one)

    with pytest.raises(RuntimeError, match="one"):  # its type takes more than a text
        read(Error(Local("one", 2)))


class OnDevice:
    """Stands for a tensor on an accelerator."""

    def __init__(self, fails):
        self.fails = fails

    def __reduce__(self):
        if self.fails:
            self.fails -= 1
            raise NoDeviceError(torch.device("cuda:1"))
        return OnDevice, (0,)


def test_a_value_on_an_accelerator_is_encoded_with_its_device():
    assert read(Value(OnDevice(1))).fails == 0
    with pytest.raises(NoDeviceError, match="cuda:1"):
        read(Value(OnDevice(2)))
    devices = stored._SameDevices()
    assert devices.get(torch.device("cuda:1")) == torch.device("cuda:1")


def test_an_error_that_cannot_be_shown_is_an_error_all_the_same():
    class Worse(Exception):
        def __str__(self):
            raise ValueError("no text")

    with pytest.raises(Exception) as caught:
        read(Error(Worse(1, 2)))
    assert caught.value.args == (f"<{Worse.__qualname__} that cannot be shown>",)
