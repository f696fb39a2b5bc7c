"""Modules that live on another worker."""

import pickle

import pytest
import torch

import rayrpc as rpc
from rayrpc import autograd, nn, optim


class Scale(torch.nn.Module):
    def __init__(self, factor, offset=0.0):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(factor))
        self.inner = torch.nn.Linear(1, 1)
        self.offset = offset

    def forward(self, x, twice=False):
        return x * self.factor * (2 if twice else 1) + self.offset


@pytest.fixture
def module(workers):
    return nn.RemoteModule("alice/cpu", Scale, args=(3.0,), kwargs={"offset": 1.0})


def call(module, *args):
    return module(*args)


def training_of(rref):
    return rref.local_value().training


def test_without_rpc_it_cannot_be_made():
    with pytest.raises(AssertionError, match="only works in RPC"):
        nn.RemoteModule("alice", dict)  # type: ignore[arg-type]


def test_forward_runs_where_the_module_lives(module):
    x = torch.ones(2)
    assert module(x).tolist() == [4.0, 4.0]
    assert module.forward(x, twice=True).tolist() == [7.0, 7.0]
    assert module.forward_async(x).wait().tolist() == [4.0, 4.0]
    assert module.get_module_rref().owner_name() == "alice"


@pytest.mark.parametrize("place", ["alice", "alice/cpu", "rank:1", "rank:1/cpu"])
def test_places_have_several_forms(workers, place):
    place = place.replace("rank:1", f"rank:{rpc.get_worker_info('alice').id}")
    module = nn.RemoteModule(place, Scale, args=(2.0,))
    assert module.get_module_rref().owner_name() == "alice" and module.device == "cpu"


def test_gradients_flow_through_it_and_its_parameters_can_be_optimized(module):
    x = torch.ones(2, requires_grad=True)
    parameters = module.remote_parameters()
    assert len(parameters) == 3 and len(module.remote_parameters(recurse=False)) == 1
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.5)
    with autograd.context() as context_id:
        autograd.backward(context_id, [module(x).sum()])
        assert autograd.get_gradients(context_id)[x].tolist() == [3.0, 3.0]
        optimizer.step(context_id)
    assert parameters[0].to_here().item() == 2.0


def test_it_can_be_sent_and_made_again_of_its_rref(module):
    x = torch.ones(1)
    assert rpc.rpc_sync("bob", call, args=(module, x)).item() == 4.0
    again = rpc.rpc_sync(
        "bob", nn.RemoteModule.init_from_module_rref, args=("alice", module.get_module_rref())
    )
    assert again(x).item() == 4.0
    with pytest.raises(RuntimeError, match="can only be pickled when using RPC"):
        pickle.dumps(module)


def attributes_before_and_after_a_call(module, x):
    before = list(vars(module))
    return before, module(x), set(vars(module)) > set(before)


def test_one_that_was_sent_has_torchs_attributes_and_can_be_called(module):
    before, value, has_more = rpc.rpc_sync(
        "bob", attributes_before_and_after_a_call, args=(module, torch.ones(1))
    )
    assert before == [*nn._REMOTE_MODULE_PICKLED_ATTRIBUTES, "forward_async", "forward"]
    assert value.item() == 4.0 and has_more


def test_train_and_eval_reach_the_module(module):
    for mode, call_it in ((False, module.eval), (True, module.train)):
        assert call_it() is module
        assert rpc.rpc_sync("alice", training_of, args=(module.get_module_rref(),)) is mode


def test_other_methods_of_modules_say_that_they_are_not_supported(module):
    for name in ("state_dict", "to", "zero_grad", "add_module", "register_forward_hook"):
        with pytest.raises(ValueError, match=f"``{name}`` not supported for RemoteModule"):
            getattr(module, name)()
    with pytest.raises(ValueError, match="Please use ``remote_parameters`` instead"):
        module.parameters()


def test_an_object_that_is_no_module_is_refused_when_it_is_used(workers):
    module = nn.RemoteModule("alice", dict)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"returns an instance of <class nn\.Module>"):
        module(1)


def test_a_scripted_one_calls_it_too(workers):
    module = nn.RemoteModule("alice", Linear, _module_interface_cls=object)
    scripted = torch.jit.script(module)
    assert module.is_scriptable and scripted.forward(torch.ones(1)).item() == 2.0
    assert scripted.forward_async(torch.ones(1)).wait().item() == 2.0


class Linear(torch.nn.Module):
    def forward(self, x):
        return x * 2
