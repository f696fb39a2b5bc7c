"""Every kind of tensor through the codec, in line and out of band: equal, writable, private."""

import copyreg
import gc
import io
import pickle
import warnings
from typing import Any

import pytest
import torch

from rayrpc._runtime.serialization.codec import Codec

INLINE, APART = 16, 150_000


def rand(n):
    return torch.rand(n * 6)


def square(n):
    side = int(n**0.5)
    return torch.rand(4 * side, 6 * side)


def images(n):
    return torch.rand(2, 3, n, 4).to(memory_format=torch.channels_last)


def eye(n):
    return torch.eye(2 * int(n**0.5))


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
DENSE = {str(dtype): lambda n, d=dtype: (rand(n) * 7).to(d) for dtype in DTYPES} | {
    "matrix": square,
    "transposed": lambda n: square(n).t(),
    "permuted": lambda n: torch.rand(2, 3, n).permute(2, 0, 1),
    "channels_last": images,
    "offset": lambda n: rand(n)[5:-5],
    "leaf": lambda n: rand(n).requires_grad_(),
    "transposed leaf": lambda n: square(n).t().requires_grad_(),
    "result of autograd": lambda n: rand(n).requires_grad_() * 2,
    "transposed result": lambda n: (square(n).requires_grad_() * 2).t(),
}
VIEWS = {
    "every third": lambda n: rand(n)[::3],
    "few columns": lambda n: torch.rand(n, 20)[:, 3:5],
    "few columns of a leaf": lambda n: torch.rand(n, 20)[:, 3:5].requires_grad_(),
}
OTHERS = {
    "conjugate": lambda n: torch.rand(n, dtype=torch.complex64).conj(),
    "negative": lambda n: torch.rand(n, dtype=torch.complex64).conj().imag,
    "sparse coo": lambda n: eye(n).to_sparse(),
    "sparse csr": lambda n: eye(n).to_sparse_csr(),
    "sparse csc": lambda n: eye(n).to_sparse_csc(),
    "sparse bsr": lambda n: eye(n).to_sparse_bsr((2, 2)),
    "sparse bsc": lambda n: eye(n).to_sparse_bsc((2, 2)),
    "quantized": lambda n: torch.quantize_per_tensor(rand(n), 0.1, 3, torch.quint8),
    "quantized per channel": lambda n: torch.quantize_per_channel(
        torch.rand(2, n), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    ),
}


NO_RREFS: Any = None  # none are sent here


def encode(obj):
    return Codec(NO_RREFS).encode(obj, 1, shares_main=True)


def receive(payload, readonly=False):
    kind = bytes if readonly else bytearray
    buffers = [kind(memoryview(b).cast("B")) for b in payload.buffers]
    return Codec(NO_RREFS).decode(payload.data, buffers, payload.forks)


def values(tensor):
    """Return a tensor of a kind that ``torch.equal`` takes, which shares nothing with this one."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        return tensor.int_repr()
    if tensor.layout is not torch.strided:
        return tensor.to_dense()
    tensor = tensor.resolve_conj().resolve_neg().clone()
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def overwrite(tensor):
    with torch.no_grad():
        if tensor.layout is torch.sparse_coo:
            tensor.coalesce()._values().zero_()
        elif tensor.layout is not torch.strided:
            tensor.values().zero_()
        else:
            tensor.copy_(torch.zeros(tensor.shape))


def check(sent, readonly):
    payload = encode(sent)
    before = values(sent)
    got, other = receive(payload, readonly), receive(payload, readonly)
    assert type(got) is type(sent)
    assert (got.dtype, got.shape, got.layout) == (sent.dtype, sent.shape, sent.layout)
    assert got.requires_grad == sent.requires_grad and got.is_leaf
    assert torch.equal(values(got), before)
    overwrite(got)
    assert not torch.equal(values(got), before)
    assert torch.equal(values(sent), before) and torch.equal(values(other), before)
    return payload, got


@pytest.mark.parametrize("readonly", [False, True], ids=["writable", "read-only"])
class TestRows:
    @pytest.mark.parametrize("size", [INLINE, APART], ids=["in line", "apart"])
    @pytest.mark.parametrize("kind", DENSE)
    def test_dense_tensors_keep_their_strides(self, kind, size, readonly):
        sent = DENSE[kind](size)
        payload, got = check(sent, readonly)
        assert got.stride() == sent.stride()
        assert len(payload.buffers) == (size == APART)

    @pytest.mark.parametrize("kind", VIEWS)
    def test_small_views_arrive(self, kind, readonly):
        payload, _ = check(VIEWS[kind](INLINE), readonly)
        assert payload.buffers == []

    @pytest.mark.parametrize("kind", VIEWS)
    def test_large_views_leave_their_gaps_behind(self, kind, readonly):
        sent = VIEWS[kind](APART)
        payload, got = check(sent, readonly)
        assert got.is_contiguous()
        (buffer,) = payload.buffers
        assert memoryview(buffer).nbytes == sent.nbytes

    @pytest.mark.filterwarnings("ignore")  # torch's own pickling of them uses what it deprecates
    @pytest.mark.parametrize("size", [INLINE, APART], ids=["in line", "apart"])
    @pytest.mark.parametrize("kind", OTHERS)
    def test_what_torch_reduces_arrives(self, kind, size, readonly):
        check(OTHERS[kind](size), readonly)


def test_a_sparse_leaf_stays_one_that_requires_grad():
    assert receive(encode(torch.eye(4).to_sparse().requires_grad_())).requires_grad


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0, 2)])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_empty_tensors_keep_shape_and_strides(shape, requires_grad):
    sent = torch.empty(shape).requires_grad_(requires_grad)
    payload = encode(sent)
    got = receive(payload)
    assert payload.buffers == []
    assert (got.shape, got.stride(), got.requires_grad) == (shape, sent.stride(), requires_grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_tensors_without_dimensions_are_writable(dtype):
    sent = torch.tensor(1).to(dtype)
    got = receive(encode(sent))
    assert got.shape == () and got.dtype == dtype and got == sent
    got.zero_()
    assert sent == 1


@pytest.mark.parametrize("readonly", [False, True], ids=["writable", "read-only"])
def test_an_expanded_tensor_is_sent_without_its_copies(readonly):
    sent = torch.rand(APART // 10, 1).expand(-1, 100)
    payload = encode(sent)
    assert torch.equal(receive(payload, readonly), sent)
    (buffer,) = payload.buffers
    assert memoryview(buffer).nbytes == sent.nbytes // 100


@pytest.mark.parametrize("size", [INLINE, APART], ids=["in line", "apart"])
def test_views_of_one_storage_arrive_on_one(size):
    base = rand(size)
    first, second = receive(encode([base, base[2:]]))
    assert torch.equal(second, base[2:])
    first.zero_()
    assert not second.any() and base.any()


@pytest.mark.parametrize("size", [INLINE, APART], ids=["in line", "apart"])
def test_a_parameter_with_a_gradient_leaves_it_behind(size):
    sent = torch.nn.Parameter(rand(size))
    sent.sum().backward()
    assert sent.grad is not None
    got = receive(encode(sent))
    assert type(got) is torch.nn.Parameter and got.grad is None
    (got * 2).sum().backward()
    assert got.grad is not None
    assert got.grad.sum() == 2 * len(sent) and sent.grad.sum() == len(sent)


@pytest.mark.parametrize("readonly", [False, True], ids=["writable", "read-only"])
def test_a_received_tensor_keeps_its_memory_alive(readonly):
    sent = rand(APART)
    part = receive(encode([sent]), readonly)[0][-7:]
    gc.collect()
    junk = [bytearray(APART * 24) for _ in range(3)]
    assert torch.equal(part, sent[-7:]) and len(junk) == 3


def test_other_picklers_are_left_alone():
    assert torch.Tensor not in copyreg.dispatch_table
    sent = torch.rand(10)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(sent, protocol)
        assert b"rayrpc" not in data and torch.equal(pickle.loads(data), sent)
    file = io.BytesIO()
    torch.save({"a": sent}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["a"], sent)


def test_nothing_warns_of_memory_that_is_read_only():
    sent = [rand(APART), square(APART).t(), rand(APART).to(torch.bfloat16)]
    payload = encode(sent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for got in receive(payload, readonly=True):
            got.add_(1)
