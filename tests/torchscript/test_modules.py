"""Script modules that hold RRefs, and whose methods call RPC."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed.rpc as rpc
from torch import Tensor

from rayrpc._torchscript import modules


@pytest.fixture
def rrefs(worker_b):
    return [rpc.remote("b", torch.ones, args=(2,)) for _ in range(3)]


@pytest.fixture
def summing(worker_b):
    class Sum(torch.nn.Module):
        def __init__(self, rrefs):
            super().__init__()
            self.rrefs = rrefs
            self.log = [0]
            self.named = {"calls": 0}
            self.count = 0
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            for rref in self.rrefs:
                x = x + rref.to_here() * self.weight
                self.count += 1
                self.log.append(self.count)
            self.named["calls"] += 1
            self.note(100)
            self.log.append(self.last())
            return x

        @torch.jit.export
        def note(self, number: int):
            self.log.append(number)

        @torch.jit.export
        def last(self) -> int:
            return self.log[-1]

        @torch.jit.export
        def how_many(self) -> int:
            return len(self.rrefs)

    return Sum


def test_a_module_with_rrefs_runs(summing, rrefs):
    module = torch.jit.script(summing(rrefs))
    assert module(torch.zeros(2)).tolist() == [3, 3] and module.how_many() == 3
    assert module.rrefs == rrefs


def test_what_a_method_changes_is_changed_in_the_module(summing, rrefs):
    module = torch.jit.script(summing(rrefs))
    module(torch.zeros(2))
    assert module.log == [0, 1, 2, 3, 100, 100] and module.named == {"calls": 1}
    assert module.count == 3 and module.last() == 100
    module.log = [8]
    assert module.last() == 8


def test_a_change_is_kept_where_the_method_fails(worker_b, rrefs):
    class Fails(torch.nn.Module):
        def __init__(self, rref):
            super().__init__()
            self.rref = rref
            self.log = [0]

        def forward(self):
            self.log.append(self.rref.to_here().size(0))
            raise ValueError("as expected")

    module = torch.jit.script(Fails(rrefs[0]))
    with pytest.raises(torch.jit.Error, match="as expected"):
        module()
    assert module.log == [0, 2]


def test_gradients_reach_the_modules_parameters(summing, rrefs):
    module = torch.jit.script(summing(rrefs))
    module(torch.zeros(2)).sum().backward()
    assert module.weight.grad.tolist() == [3, 3]


def test_a_subclass_of_script_module_runs(worker_b, rrefs):
    class Sum(torch.jit.ScriptModule):
        def __init__(self, rrefs):
            super().__init__()
            self.rrefs = rrefs

        @torch.jit.script_method
        def forward(self) -> Tensor:
            result = torch.zeros(2)
            for rref in self.rrefs:
                result += rref.to_here()
            return result

    assert Sum(rrefs)().tolist() == [3, 3]
    assert Sum(rrefs[:1])().tolist() == [1, 1]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda rref: rref,
        lambda rref: (rref, 3),
        lambda rref: {"a": rref},
        lambda rref: [[rref], [rref]],
    ],
    ids=["rref", "tuple", "dict", "nested"],
)
def test_the_type_of_an_attribute_is_inferred(rrefs, wrap):
    inferred = modules.type_with_rrefs(wrap(rrefs[0]))
    assert inferred.success() and "RRef[Tensor]" in str(inferred.type())


@torch.jit.script
class Point:
    def __init__(self, x: int):
        self.x = x


def test_values_have_the_types_of_compiled_code(worker_b):
    types = {
        "RRef[int]": rpc.remote("b", int),
        "RRef[List[Tensor]]": rpc.remote("b", lambda: [torch.ones(1)]),
        "RRef[Dict[str, Tuple[int, float]]]": rpc.remote("b", lambda: {"a": (1, 2.0)}),
        "RRef[RRef[str]]": rpc.RRef(rpc.remote("b", str)),
        "RRef[PyObject]": rpc.remote("b", set),
        f"RRef[__torch__.{__name__}.Point]": rpc.remote("b", Point, args=(3,)),
        "int": 3,
    }
    for name, value in types.items():
        assert str(modules.type_with_rrefs(value).type()) == name


def test_what_has_no_type_has_none_with_an_rref_either(rrefs):
    assert not modules.type_with_rrefs(object()).success()
    with pytest.raises(RuntimeError, match="Only tensors"):
        modules.type_with_rrefs((rrefs[0], object()))


def test_submodules_hold_rrefs_too(summing, rrefs):
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = summing(rrefs)
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + self.linear(x) * 0

    module = torch.jit.script(Outer())
    assert module(torch.zeros(2)).tolist() == [3, 3]
    assert module.inner.rrefs == rrefs and module.inner.count == 3


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_has_the_rrefs(summing, rrefs, copied):
    module = copied(torch.jit.script(summing(rrefs)))
    assert module(torch.zeros(2)).tolist() == [3, 3] and module.rrefs == rrefs


def test_rrefs_may_be_set_and_replaced(worker_b, rrefs):
    class Holds(torch.nn.Module):
        rref: rpc.RRef[Tensor]

        def __init__(self, rref):
            super().__init__()
            self.rref = rref

        def forward(self) -> Tensor:
            return self.rref.to_here()

    module = torch.jit.script(Holds(rrefs[0]))
    module.rref = rpc.remote("b", torch.zeros, args=(2,))
    assert module().tolist() == [0, 0]


def test_rrefs_go_with_their_module(worker_b, summing):
    rref = rpc.remote("b", torch.ones, args=(2,))
    module = torch.jit.script(summing([rref]))
    module(torch.zeros(2))
    gone = weakref.ref(rref)
    del rref, module
    gc.collect()
    assert gone() is None


def test_a_method_that_was_defined_as_source_runs(worker_b, rrefs):
    class Holds(torch.nn.Module):
        def __init__(self, rref):
            super().__init__()
            self.rref = rref

    module = torch.jit.script(Holds(rrefs[0]))
    module.define("def forward(self, x: Tensor) -> Tensor:\n    return x + self.rref.to_here()\n")
    assert module.forward(torch.ones(2)).tolist() == [2, 2]


def test_submodules_share_lists_with_python_methods(worker_b, rrefs):
    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = [0]

        def forward(self, number: int):
            self.seen.append(number)

    class Middle(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.counter = Counter()

        def forward(self, number: int):
            self.counter(number)

    class Outer(torch.nn.Module):
        def __init__(self, rref):
            super().__init__()
            self.rref = rref
            self.middle = Middle()

        def forward(self) -> list[int]:
            seen = self.middle.counter.seen
            seen.append(self.rref.to_here().size(0))
            self.middle(7)
            seen.append(len(self.middle.counter.seen))
            return seen

    module = torch.jit.script(Outer(rrefs[0]))
    assert module() == [0, 2, 7, 3] == module.middle.counter.seen


def test_an_attribute_that_torch_refuses_is_refused(installed):
    module = torch.jit.script(torch.nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="Could not cast attribute"):
        module.training = "x"  # type: ignore[assignment]
