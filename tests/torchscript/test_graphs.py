"""What the graph of compiled code does."""

import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.distributed.rpc import RRef

from rayrpc._torchscript.graphs import calls_interface, calls_rpc


@torch.jit.interface
class Forward:
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[empty-body]
        pass


@torch.jit.script
def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


@torch.jit.script
def call(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_sync(to, add, (x, x))


@torch.jit.script
def start(to: str, x: Tensor) -> torch.futures.Future[Tensor]:
    return rpc.rpc_async(to, add, (x, x))


@torch.jit.script
def make(to: str, x: Tensor) -> Tensor:
    return rpc.remote(to, add, (x, x)).to_here()


@torch.jit.script
def call_by_another(to: str, x: Tensor) -> Tensor:
    return call(to, x) + 1


@torch.jit.script
def call_if(to: str, x: Tensor) -> Tensor:
    if x.sum() > 0:
        for _ in range(2):
            x = call(to, x)
    return x


@torch.jit.script
def call_in_a_fork(to: str, x: Tensor) -> Tensor:
    return torch.jit.wait(torch.jit.fork(call, to, x))


@torch.jit.script
def return_rref(rref: RRef[Tensor]) -> RRef[Tensor]:
    return rref


@torch.jit.script
def count(rrefs: dict[str, list[RRef[Tensor]]]) -> int:
    return len(rrefs)


@torch.jit.script
def gradients(context_id: int) -> dict[Tensor, Tensor]:
    return dist_autograd.get_gradients(context_id)


@torch.jit.script
def backward(context_id: int, loss: Tensor):
    dist_autograd.backward(context_id, [loss])


@torch.jit.script
def wait(future: torch.futures.Future[Tensor]) -> Tensor:
    return future.wait()


@torch.jit.script
def name_it() -> str:
    return "prim::rpc_async(RRef[Tensor])"


@torch.jit.script
def fork(x: Tensor) -> Tensor:
    return torch.jit.wait(torch.jit.fork(add, x, x))


@torch.jit.script
def call_interface(module: Forward, x: Tensor) -> Tensor:
    return module.forward(x)


@torch.jit.script
def call_interface_if(module: Forward, x: Tensor) -> Tensor:
    return call_interface(module, x) if x.sum() > 0 else x


@pytest.mark.parametrize(
    "function",
    [
        *[call, start, make, call_by_another, call_if, call_in_a_fork],
        *[return_rref, count, gradients, backward],
    ],
    ids=lambda function: function.name,
)
def test_operators_of_rpc_are_found_wherever_they_are(function):
    assert calls_rpc(function.inlined_graph)


@pytest.mark.parametrize(
    "function", [add, wait, name_it, fork, call_interface], ids=lambda function: function.name
)
def test_all_else_calls_no_rpc(function):
    assert not calls_rpc(function.inlined_graph)


def test_reading_a_graph_leaves_it_as_it_is():
    before = str(call_in_a_fork.graph)
    calls_rpc(call_in_a_fork.graph)
    assert str(call_in_a_fork.graph) == before and "rpc_sync" not in before


@pytest.mark.parametrize(
    ("function", "expected"), [(call_interface, True), (call_interface_if, True), (add, False)]
)
def test_calls_of_interfaces_are_found(function, expected):
    assert calls_interface(function.inlined_graph) is expected
