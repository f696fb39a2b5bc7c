"""RemoteModules with an interface, called by compiled code."""

import pytest
import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.futures import Future

from rayrpc.nn import RemoteModule


class Scale(torch.nn.Module):
    def forward(self, x: Tensor, factor: int, word: str) -> tuple[str, Tensor]:
        return word, x * factor


@torch.jit.interface
class Forward:
    def forward(self, x: Tensor, factor: int, word: str) -> tuple[str, Tensor]:  # type: ignore[empty-body]
        pass


@torch.jit.interface
class ForwardAsync:
    def forward_async(self, x: Tensor, factor: int, word: str) -> Future[tuple[str, Tensor]]:  # type: ignore[empty-body]
        pass


@pytest.fixture
def module(worker_b):
    return torch.jit.script(RemoteModule("b", Scale, _module_interface_cls=Forward))


def test_it_is_called_by_its_interface(module):
    @torch.jit.script
    def run(module: Forward, x: Tensor) -> tuple[str, Tensor]:
        return module.forward(x, 3, "three")

    assert repr(run(module, torch.ones(1))) == "('three', tensor([3.]))"


def test_it_is_called_for_a_future(module):
    @torch.jit.script
    def run(module: ForwardAsync, x: Tensor) -> tuple[str, Tensor]:
        return module.forward_async(x, 3, "three").wait()

    assert repr(run(module, torch.ones(1))) == "('three', tensor([3.]))"


def test_python_calls_it_with_the_interfaces_checks(module):
    assert module(torch.ones(1), 2, "two")[1].item() == 2
    assert module.forward_async(torch.ones(1), 2, "two").wait()[0] == "two"
    with pytest.raises(RuntimeError, match=r"forward\(\) Expected a value of type 'int'"):
        module(torch.ones(1), "2", "two")


def test_it_is_not_pickled(module, tmp_path):
    with pytest.raises(torch.jit.Error, match="can only be pickled when using RPC"):
        torch.save(module, tmp_path / "module.pt")


def test_it_is_not_sent(module):
    with pytest.raises(RuntimeError, match="Passing a script RemoteModule over RPC is not suppo"):
        rpc.rpc_sync("b", type, args=(module,))


def test_without_an_interface_it_compiles_as_before(worker_b):
    module = torch.jit.script(RemoteModule("b", torch.nn.ReLU, _module_interface_cls=object))
    assert module.forward(torch.tensor([-1.0])).item() == 0
