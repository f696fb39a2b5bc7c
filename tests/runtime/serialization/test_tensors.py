"""Tensors through the codec, one row a kind."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from rayrpc._runtime.serialization.codec import Codec

ROWS = {
    "contiguous": (torch.rand(20, 30), (30, 1)),
    "transposed": (torch.rand(20, 30).t(), (1, 30)),
    "channels_last": (torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last), None),
    "small view keeps its gaps": (torch.rand(5, 5).narrow(1, 2, 2), (5, 1)),
    "large sparse view is packed": (torch.rand(2000, 200)[:, :10], (10, 1)),
    "expanded": (torch.rand(3, 1).expand(3, 400), None),
    "0-dim": (torch.tensor(3), ()),
    "empty": (torch.empty(0, 3), (3, 1)),
    "bool": (torch.tensor([True, False]), None),
    "bfloat16": (torch.rand(300).to(torch.bfloat16), None),
    "float16": (torch.rand(300).to(torch.float16), None),
    "complex": (torch.rand(300, dtype=torch.complex64), None),
    "float8": (torch.rand(300).to(torch.float8_e4m3fn), None),
    "int8": (torch.arange(100, dtype=torch.int8), None),
    "conjugate": (torch.rand(30, dtype=torch.complex64).conj(), None),
    "leaf": (torch.rand(3, requires_grad=True), None),
    "result of autograd": (torch.rand(3, requires_grad=True) * 2, None),
    "offset": (torch.arange(10.0)[3:7], (1,)),
}


NO_RREFS: Any = None  # none are sent here


def through(obj, readonly=False):
    codec = Codec(NO_RREFS)
    payload = codec.encode(obj, 1, shares_main=True)
    kind = bytes if readonly else bytearray
    buffers = [kind(memoryview(b).cast("B")) for b in payload.buffers]
    return codec.decode(payload.data, buffers, payload.forks)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("readonly", [False, True], ids=["writable", "read-only"])
def test_values_dtype_shape_and_strides_arrive(row, readonly):
    sent, strides = ROWS[row]
    got = through(sent, readonly)
    assert got.dtype == sent.dtype and got.shape == sent.shape
    assert got.requires_grad == sent.requires_grad and got.is_leaf
    assert got.stride() == (sent.stride() if strides is None else strides) or row == "expanded"
    compare = torch.float32 if sent.dtype == torch.float8_e4m3fn else sent.dtype
    assert torch.equal(got.detach().to(compare), sent.detach().to(compare))


@pytest.mark.parametrize("size", [3, 50_000])
@pytest.mark.parametrize("readonly", [False, True])
def test_received_tensors_are_writable_and_private(size, readonly):
    sent = torch.zeros(size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = through(sent, readonly)
        got.add_(1)
    assert sent.sum() == 0 and got.sum() == size


def test_a_parameter_stays_a_parameter():
    got = through(torch.nn.Parameter(torch.rand(3, 3)))
    assert type(got) is torch.nn.Parameter and got.requires_grad


class Marked(torch.Tensor):
    """A subclass of a user's."""


def test_a_subclass_stays_itself():
    sent = torch.rand(2000).as_subclass(Marked)
    got = through(sent, readonly=True)
    assert type(got) is Marked and torch.equal(got, sent)


@pytest.mark.filterwarnings("ignore")  # torch's own pickling of them uses what it deprecates
def test_quantized_tensors_arrive():
    sent = torch.quantize_per_tensor(torch.rand(2000), 0.1, 3, torch.quint8)
    got = through(sent)
    assert (got.q_scale(), got.q_zero_point()) == (0.1, 3)
    assert torch.equal(got.int_repr(), sent.int_repr())


def test_every_part_of_a_module_arrives_as_what_it_was():
    sent = torch.nn.BatchNorm1d(2000)
    got = through(sent, readonly=True)
    assert all(type(p) is torch.nn.Parameter and p.requires_grad for p in got.parameters())
    assert all(torch.equal(a, b) for a, b in zip(got.buffers(), sent.buffers(), strict=True))
    got(torch.rand(4, 2000)).sum().backward()
    torch.optim.SGD(got.parameters(), 0.1).step()


@pytest.mark.parametrize(
    ("size", "readonly"),
    [
        (3, True),
        (50_000, False),
        (50_000, True),
    ],
)
def test_received_arrays_are_writable(size, readonly):
    got = through(np.zeros(size), readonly)
    got += 1
    assert got.sum() == size


@pytest.mark.parametrize(
    "make",
    [lambda: torch.zeros(5000), lambda: torch.zeros(50, 60).t(), lambda: np.zeros(5000)],
    ids=["contiguous", "strided", "array"],
)
def test_what_lies_in_an_object_store_is_copied(make):
    """The store uses the memory again, whatever a forked child reads there."""
    codec = Codec(NO_RREFS)
    payload = codec.encode(make(), 1, shares_main=True)
    store = bytearray(memoryview(payload.buffers[0]).cast("B"))
    got = codec.decode(payload.data, [memoryview(store).toreadonly()], payload.forks)
    store[:] = b"\1" * len(store)
    assert not got.any()


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr"])
def test_sparse_layouts_arrive(layout):
    dense = torch.eye(40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR is "in beta state"
        sent = dense.to_sparse() if layout == "sparse_coo" else dense.to_sparse_csr()
        assert torch.equal(through(sent).to_dense(), dense)


def test_meta_tensors_arrive():
    got = through(torch.empty(3, 4, device="meta"))
    assert got.device.type == "meta" and got.shape == (3, 4)


def test_one_object_sent_twice_stays_one():
    tensor = torch.rand(5000)
    first, second = through([tensor, tensor])
    assert first is second


def test_large_tensors_leave_the_pickle_and_small_ones_stay():
    codec = Codec(NO_RREFS)
    state = {str(i): torch.rand(10) for i in range(60)}
    assert codec.encode(state, 1, True).buffers == []
    payload = codec.encode(torch.rand(100_000), 1, True)
    assert len(payload.buffers) == 1 and len(payload.data) < 300


# -- tensors on one storage -------------------------------------------------------------------

WHOLE = torch.arange(6.0).reshape(2, 3)
LARGE = torch.zeros(3, 5000)
SHARING = {
    "itself twice": [WHOLE, WHOLE],
    "a view": [WHOLE, WHOLE.view(3, 2)],
    "the transposed one first": [WHOLE.t(), WHOLE],
    "parts beside each other": [WHOLE[0], WHOLE[1]],
    "parts that overlap": [WHOLE.view(-1)[:4], WHOLE.view(-1)[2:]],
    "the detached one": [WHOLE, WHOLE.detach()],
    "expanded": [WHOLE[0], WHOLE[0].expand(4, 3)],
    "of another dtype": [WHOLE, WHOLE.view(torch.int32)],
    "of a dtype of one byte first": [WHOLE.view(torch.uint8)[:, 4:], WHOLE[1]],
    "large ones": [LARGE[:2], LARGE[1:]],
    "a parameter": [torch.nn.Parameter(WHOLE), WHOLE],
}


@pytest.mark.parametrize("sent", SHARING.values(), ids=SHARING)
@pytest.mark.parametrize("readonly", [False, True], ids=["writable", "read-only"])
def test_tensors_of_one_storage_share_one_there(sent, readonly):
    first, second = through(sent, readonly)
    for got, before in zip((first, second), sent, strict=True):
        assert torch.equal(got, before) and got.dtype == before.dtype
        assert got.stride() == before.stride() and got.requires_grad == before.requires_grad
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def test_a_storage_is_sent_once_and_not_for_a_small_part_of_it():
    codec = Codec(NO_RREFS)

    def size(obj):
        payload = codec.encode(obj, 1, shares_main=True)
        return len(payload.data) + sum(buffer.raw().nbytes for buffer in payload.buffers)

    assert size([LARGE, LARGE.view(-1), LARGE[:2]]) < 1.1 * LARGE.nbytes
    assert size([LARGE[0], LARGE[0]]) < 2.1 * LARGE[0].nbytes  # torch sends two copies, too
    assert size(LARGE[:2]) < 1.1 * LARGE[:2].nbytes


def test_a_state_dict_of_tied_weights_stays_tied():
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    sent = model.state_dict()
    got = through(sent)
    got["0.weight"].fill_(7)
    assert bool((got["1.weight"] == 7).all()) and not bool((sent["0.weight"] == 7).any())
