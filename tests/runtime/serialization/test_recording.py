"""The slot of the recorder that takes part in the pickling of a message."""

import threading
from typing import Any

import pytest
import torch

from rayrpc._runtime.serialization import recording
from rayrpc._runtime.serialization.codec import Codec


class Recorder:
    """Records tensors by their values."""

    def __init__(self, parameters=False):
        self.parameters = parameters
        self.restarts = 0
        self.recorded = []

    def restart(self):
        self.restarts += 1
        self.recorded.clear()

    def record(self, tensor, rebuild, args):
        self.recorded.append(tensor)
        return rebuild, args


@pytest.fixture
def recorder():
    recorder = Recorder()
    outer = recording.swap_recorder(recorder)
    assert outer is None
    yield recorder
    assert recording.swap_recorder(outer) is recorder


def encode(*objects):
    sharer: Any = None  # nothing here is shared
    codec = Codec(sharer)
    payload = codec.encode(objects, to=1, shares_main=True)
    return codec.decode(payload.data, payload.buffers, [])


def test_a_recorder_decides_on_tensors_that_require_grad(recorder):
    tensor = torch.rand(3, requires_grad=True)
    recorded, plain = encode(tensor, torch.ones(3))
    assert [each is tensor for each in recorder.recorded] == [True]
    assert not recorded.requires_grad and torch.equal(recorded, tensor) and plain.sum() == 3


def test_without_one_they_stay_leaves():
    (tensor,) = encode(torch.rand(3, requires_grad=True))
    assert tensor.requires_grad and tensor.is_leaf


def test_it_restarts_with_each_attempt_to_encode(recorder):
    encode(torch.rand(3, requires_grad=True), lambda: None)  # by reference, then by value
    assert recorder.restarts == 2 and len(recorder.recorded) == 1


@pytest.mark.parametrize("parameters", [True, False])
def test_it_records_parameters_if_it_wants_them(recorder, parameters):
    recorder.parameters = parameters
    encode(torch.nn.Parameter(torch.rand(3)))
    assert len(recorder.recorded) == parameters


def test_it_is_of_one_thread(recorder):
    thread = threading.Thread(target=encode, args=(torch.rand(3, requires_grad=True),))
    thread.start()
    thread.join()
    assert recorder.recorded == []
