"""Script modules that are saved and loaded, and sent, with the RRefs in them."""

import io
from typing import Any

import pytest
import torch
import torch.distributed.rpc as rpc
from torch import Tensor


@torch.jit.interface
class Forward:
    def forward(self) -> Tensor:  # type: ignore[empty-body]
        pass


@pytest.fixture
def module(worker_b):
    class Inner(torch.nn.Module):
        def __init__(self, rref):
            super().__init__()
            self.rref = rref

        def forward(self) -> Tensor:
            return self.rref.to_here()

    class Outer(torch.nn.Module):
        def __init__(self, rrefs):
            super().__init__()
            self.rrefs = rrefs
            self.inner = Inner(rrefs[0])
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x: Tensor, times: int = 1) -> Tensor:
            for rref in self.rrefs:
                x = x + rref.to_here() * times
            return x + self.inner()

    return torch.jit.script(Outer([rpc.remote("b", torch.ones, args=(2,)) for _ in range(2)]))


def saved(module, **files):
    rpc._enable_jit_rref_pickle()
    try:
        file = io.BytesIO()
        torch.jit.save(module, file, **files)
    finally:
        rpc._disable_jit_rref_pickle()
    file.seek(0)
    return file


def run(module):
    return module(torch.zeros(2), times=2)


def test_a_loaded_module_calls_the_rrefs_that_were_saved(module):
    loaded = torch.jit.load(saved(module))
    assert loaded(torch.zeros(2)).tolist() == [3, 3]
    assert loaded(torch.zeros(2), times=2).tolist() == [5, 5]
    assert [rref.owner_name() for rref in loaded.rrefs] == ["b", "b"]


def test_its_arguments_are_checked(module):
    with pytest.raises(RuntimeError, match=r"forward\(\) Expected a value of type 'Tensor'"):
        torch.jit.load(saved(module))(3)


def test_the_programs_own_files_are_kept(module):
    file = saved(module, _extra_files={"mine": b"data"})
    files: dict[str, Any] = {"mine": ""}
    torch.jit.load(file, _extra_files=files)
    assert files == {"mine": b"data"}


def test_it_is_saved_to_and_loaded_from_a_path(module, tmp_path):
    path = tmp_path / "module.pt"
    path.write_bytes(saved(module).getvalue())
    assert torch.jit.load(path)(torch.zeros(2)).tolist() == [3, 3]


def test_without_leave_no_rref_is_saved(module, tmp_path):
    with pytest.raises(RuntimeError, match="RRef jit pickling is only allowed inside RPC calls"):
        torch.jit.save(module, io.BytesIO())
    with pytest.raises(RuntimeError, match="RRef jit pickling is only allowed inside RPC calls"):
        torch.jit.save(module, str(tmp_path / "module.pt"))


def test_a_module_without_rrefs_is_saved_as_ever(installed):
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), file)
    file.seek(0)
    assert torch.jit.load(file)(torch.tensor([-1.0])).item() == 0


def test_a_module_is_sent_with_its_rrefs(worker_a, worker_b, module):
    assert worker_a.sync("b", run, module).tolist() == [5, 5]


def test_code_that_was_loaded_calls_functions_of_its_archive(worker_b):
    def triple(x: Tensor) -> Tensor:
        return x * 3

    class Calls(torch.nn.Module):
        def forward(self, rref: rpc.RRef[Tensor]) -> Tensor:
            return triple(rref.to_here())

    file = io.BytesIO()
    torch.jit.save(torch.jit.script(Calls()), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert loaded(rpc.remote("b", torch.ones, args=(2,))).tolist() == [3, 3]


def test_a_module_that_compiled_code_made_stays_where_it_is(worker_a, worker_b):
    class One(torch.nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(1)

    made: Any = torch.jit.script(One())

    @torch.jit.ignore
    def make() -> Forward:
        return made

    @torch.jit.script
    def construct() -> Forward:
        return make()

    @torch.jit.script
    def call(rref: rpc.RRef[Forward]) -> Tensor:
        return rref.to_here().forward()

    rref = rpc.remote("a", construct)
    assert call(rref).item() == 1
    with pytest.raises(RuntimeError, match=r"is an RRef to a ScriptModule\. It can't be sent"):
        worker_a.sync("b", torch.jit.Attribute, construct(), None)
