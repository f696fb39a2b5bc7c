"""The Python code of compiled methods is found while other threads compile modules."""

import io
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor
from torch.jit._recursive import concrete_type_store


class Echo(torch.nn.Module):
    def __init__(self, rref):
        super().__init__()
        self.rref = rref

    def forward(self) -> Tensor:
        return self.rref.to_here()


class CompiledMeanwhile:
    """A type in torch's store of compiled modules; as it is compared, one more gets there."""

    @property
    def jit_type(self):
        concrete_type_store.type_store[type("Other", (torch.nn.Module,), {})] = []


def test_a_loaded_module_runs_while_another_thread_compiles_one(worker_b, monkeypatch):
    module = torch.jit.script(Echo(rpc.remote("b", torch.ones, args=(2,))))
    file = io.BytesIO()
    rpc._enable_jit_rref_pickle()
    torch.jit.save(module, file)
    rpc._disable_jit_rref_pickle()
    file.seek(0)
    loaded = torch.jit.load(file)
    store: dict[Any, Any] = {torch.nn.Module: [CompiledMeanwhile()]}
    store.update(concrete_type_store.type_store)
    monkeypatch.setattr(concrete_type_store, "type_store", store)
    assert loaded().tolist() == [1, 1]
