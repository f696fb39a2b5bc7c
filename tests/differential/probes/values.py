"""What arguments and results are on the other side."""

from __future__ import annotations

from typing import Any

import torch
from probe import probe
from torch.distributed import rpc

PEER = "worker1"


def echo(value):
    return value


def share(tensors):
    """Return which of the tensors are on one storage, and what a write through one changes."""
    flat = list(tensors.values()) if isinstance(tensors, dict) else list(tensors)
    storages = [each.untyped_storage().data_ptr() for each in flat]
    flat[0].add_(1)
    return [storages.index(each) for each in storages], [each.clone() for each in flat]


def base() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3)


def halves():
    whole = torch.arange(8.0)
    return [whole[:4], whole[2:]]


def large(number):
    whole = torch.zeros(number, 50_000)
    return [whole[0], whole[0]]


def alias(kind):
    whole = base()
    made = {
        "same": [whole, whole],
        "view": [whole, whole.view(3, 2)],
        "transposed": [whole, whole.t()],
        "rows": [whole[0], whole[1]],
        "overlap": halves(),
        "detached": [whole, whole.detach()],
        "expanded": [whole[0], whole[0].expand(4, 3)],
        "bytes": [whole, whole.view(torch.int32)],
        "large": large(3),
        "parameter": [torch.nn.Parameter(whole), whole],
    }
    return made[kind]


ALIASES = {
    kind: kind
    for kind in (
        "same",
        "view",
        "transposed",
        "rows",
        "overlap",
        "detached",
        "expanded",
        "bytes",
        "large",
    )
}


@probe(cases=ALIASES)
def views_as_arguments(kind):
    return rpc.rpc_sync(PEER, share, (alias(kind),))


@probe(cases=ALIASES)
def views_as_results(kind):
    return share(rpc.rpc_sync(PEER, alias, (kind,)))


@probe(cases=ALIASES)
def views_by_rref(kind):
    return share(rpc.remote(PEER, alias, (kind,)).to_here())


def tied():
    model = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    return model


@probe()
def state_dict_of_tied_weights():
    with torch.no_grad():
        state = tied().state_dict()
        return rpc.rpc_sync(PEER, share, (state,))[0]


@probe()
def module_with_tied_weights():
    model = rpc.rpc_sync(PEER, tied)
    return model[0].weight is model[1].weight


@probe()
def state_dict():
    with torch.no_grad():
        sent = torch.nn.BatchNorm1d(3).state_dict()
        got = rpc.rpc_sync(PEER, echo, (sent,))
    return type(got), list(got), getattr(got, "_metadata", None) is not None


VALUES = {
    "none": None,
    "true": True,
    "size": torch.Size([1, 2]),
    "dtype": torch.float64,
    "device": torch.device("cpu"),
    "layout": torch.strided,
    "complex": 1 + 2j,
    "bytes": b"abc",
    "range": range(3),
    "slice": slice(1, 2),
    "ellipsis": ...,
    "set": {1, 2},
    "empty": torch.empty(0),
    "scalar": torch.tensor(3),
    "half": torch.ones(2, dtype=torch.half),
    "bfloat16": torch.ones(2, dtype=torch.bfloat16),
    "complex tensor": torch.ones(2, dtype=torch.complex64),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "negative": torch.tensor([1 + 2j]).conj().imag,
    "bool tensor": torch.tensor([True]),
    "sparse": torch.eye(2).to_sparse(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "buffer": torch.nn.Buffer(torch.ones(2)),
    "requires grad": torch.ones(2, requires_grad=True),
    "channels last": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
    "step": torch.arange(6)[::2],
    "expanded": torch.ones(1).expand(3),
    "memoryview": bytearray(b"ab"),
    "exception": ValueError("a value"),
    "class": torch.nn.Linear,
    "function": torch.add,
    "module": torch.nn.Linear(1, 1).requires_grad_(False),
}


def look(value):
    if not isinstance(value, torch.Tensor):
        return type(value), value if type(value) is not torch.nn.Linear else None
    if value.is_sparse:
        return type(value), value.to_dense()
    bits = value.is_conj(), value.is_neg(), value.is_leaf, value.stride(), value.is_contiguous()
    return type(value), value, bits


@probe(cases=VALUES)
def argument(value):
    return rpc.rpc_sync(PEER, look, (value,))


@probe(cases=VALUES)
def result(value):
    return look(rpc.rpc_sync(PEER, echo, (value,)))


@probe(cases=VALUES)
def to_here(value):
    return look(rpc.remote(PEER, echo, (value,)).to_here())


# none with several results: torch's own agent ends with an assertion
OPERATORS = {
    "split": (torch.split, (torch.arange(4), 2)),
    "chunk": (torch.chunk, (torch.arange(4), 2)),
    "unbind": (torch.unbind, (torch.ones(2, 2),)),
    "meshgrid": (torch.meshgrid, (torch.ones(2), torch.ones(2))),
    "where": (torch.where, (torch.tensor([True, False]),)),
    "nonzero": (torch.nonzero, (torch.eye(2),)),
    "stack": (torch.stack, ([torch.ones(1), torch.ones(1)],)),
    "numel": (torch.numel, (torch.ones(3),)),
    "equal": (torch.equal, (torch.ones(1), torch.ones(1))),
    "is_tensor": (torch.is_tensor, (5,)),
    "zeros": (torch.zeros, (2, 2)),
    "zeros of a list": (torch.zeros, ([2, 2],)),
    "ones": (torch.ones, (2,)),
    "tensor": (torch.tensor, ([1, 2],)),
    "relu": (torch.nn.functional.relu, (torch.tensor([-1.0, 1.0]),)),
    "softmax": (torch.softmax, (torch.zeros(2), 0)),
    "method": (torch.Tensor.add, (torch.ones(1), 1)),
    "add of ints": (torch.add, (1, 2)),
    "item": (torch.Tensor.item, (torch.ones(1),)),
    "einsum": (torch.einsum, ("ij->ji", torch.ones(1, 2))),
    "unique": (torch.unique, (torch.tensor([1, 1, 2]),)),
    "broadcast": (torch.broadcast_tensors, (torch.ones(1), torch.ones(2))),
}


@probe(cases=OPERATORS)
def operator(call):
    return rpc.rpc_sync(PEER, *call)


@probe(cases=OPERATORS)
def operator_by_rref(call):
    return rpc.remote(PEER, *call).to_here()


@probe()
def keywords_of_an_operator():
    return rpc.rpc_sync(PEER, torch.sum, (torch.ones(2, 2),), {"dim": 0, "keepdim": True})


@probe()
def wait_all_of_a_generator():
    futures: Any = (rpc.rpc_async(PEER, torch.add, (i, 1)) for i in range(3))
    return torch.futures.wait_all(futures)


@probe()
def wait_all_of_nothing():
    return torch.futures.wait_all([])


@probe()
def collect_all():
    futures = [rpc.rpc_async(PEER, torch.add, (i, 1)) for i in range(3)]
    return [each.value() for each in torch.futures.collect_all(futures).wait()]


@probe(cases={"true": True, "rank": 1, "name": "worker1", "info": None})
def destination(to):
    return rpc.rpc_sync(rpc.get_worker_info(PEER) if to is None else to, torch.add, (1, 1))


@probe("worker", cases={"wrong id": ("worker1", 0), "wrong name": ("worker9", 1)})
def handmade_info(given):
    return rpc.rpc_sync(rpc.WorkerInfo(*given), rpc.get_worker_info).name


@probe()
def remote_of_none():
    return rpc.remote(PEER, None)


@torch.jit.script
def scripted_sum(value: torch.Tensor, other: int = 2) -> torch.Tensor:
    return value + other


@torch.jit.script
def scripted_items(value: torch.Tensor) -> dict[str, list[int]]:
    return {"items": [1, 2, int(value.item())]}


@probe()
def scripted_function():
    return rpc.rpc_sync(PEER, scripted_sum, (torch.ones(1),)), rpc.rpc_sync(
        PEER, scripted_items, (torch.ones(1),)
    )


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((1,), 3.0), requires_grad=False)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * self.scale


@probe()
def scripted_module():
    got = rpc.rpc_sync(PEER, echo, (torch.jit.script(Scaled()),))
    return type(got), got(torch.ones(1))


@probe()
def scripted_module_in_a_container():
    got = rpc.rpc_sync(PEER, echo, ([torch.jit.script(Scaled())],))
    return type(got[0]), got[0](torch.ones(1))
