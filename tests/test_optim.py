"""Optimizers whose parameters live on several workers."""

import threading

import pytest
import targets
import torch
from torch.distributed.optim import functional_adam, functional_sgd

import rayrpc as rpc
from rayrpc import autograd, optim


class Owner:
    """A parameter on its worker."""

    def __init__(self, value):
        self.parameter = torch.nn.Parameter(torch.full((2,), value))

    def share(self):
        return rpc.RRef(self.parameter)

    def times(self, factor):
        return self.parameter * factor

    def state(self):
        return self.parameter.detach().clone(), self.parameter.grad


class Refuses(torch.optim.SGD):
    def __init__(self, params, where):
        super().__init__(params, lr=1.0)
        self.where = where

    def step(self, closure=None):
        raise ValueError(f"no step on {rpc.get_worker_info().name}")


class RefusesToBeMade(torch.optim.SGD):
    def __init__(self, params):
        raise KeyError(rpc.get_worker_info().name)


@pytest.fixture
def owners(workers):
    return [rpc.remote(name, Owner, args=(1.0,)) for name in workers]


def losses(owners, factors):
    return [o.rpc_sync().times(f).sum() for o, f in zip(owners, factors, strict=True)]


@pytest.mark.parametrize(
    ("cls", "reference"),
    [
        *[
            (cls, cls)
            for cls in (
                *[torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad],
                *[torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop],
                *[torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD],
            )
        ],
        (functional_sgd._FunctionalSGD, torch.optim.SGD),
        (functional_adam._FunctionalAdam, torch.optim.Adam),
    ],
)
def test_every_optimizer_updates_parameters_where_they_live(owners, cls, reference):
    rrefs = [owner.rpc_sync().share() for owner in owners]
    optimizer = optim.DistributedOptimizer(cls, rrefs, lr=0.1)
    local = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    expected = reference(local, lr=0.1)
    for number in range(1, 4):
        with autograd.context() as context_id:
            autograd.backward(context_id, losses(owners, (number, -2.0)))
            optimizer.step(context_id)
        expected.zero_grad()
        (local[0] * number - local[1] * 2).sum().backward()
        expected.step()
    for owner, parameter in zip(owners, local, strict=True):
        value, gradient = owner.rpc_sync().state()
        torch.testing.assert_close(value, parameter.detach())
        assert gradient is None


def test_parameters_without_a_gradient_stay(owners):
    rrefs = [owner.rpc_sync().share() for owner in owners]
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, rrefs, lr=1.0)
    with autograd.context() as context_id:
        autograd.backward(context_id, [owners[0].rpc_sync().times(3.0).sum()])
        optimizer.step(context_id)
    values = [owner.rpc_sync().state()[0].tolist() for owner in owners]
    assert values == [[-2.0, -2.0], [1.0, 1.0]]


def test_steps_of_several_trainers_all_count(owners):
    rref = owners[0].rpc_sync().share()

    def train():
        optimizer = optim.DistributedOptimizer(torch.optim.SGD, [rref], lr=0.5)
        for _ in range(10):
            with autograd.context() as context_id:
                autograd.backward(context_id, [owners[0].rpc_sync().times(1.0).sum()])
                optimizer.step(context_id)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert owners[0].rpc_sync().state()[0].tolist() == [1.0 - 20.0] * 2


def test_errors_of_all_workers_are_raised_together(owners):
    rrefs = [owner.rpc_sync().share() for owner in owners]
    optimizer = optim.DistributedOptimizer(Refuses, rrefs, "anywhere")
    with autograd.context() as context_id:
        autograd.backward(context_id, losses(owners, (1.0, 1.0)))
        with pytest.raises(RuntimeError, match=r"(?s)on 2 workers.*on alice.*on bob"):
            optimizer.step(context_id)
    one = optim.DistributedOptimizer(Refuses, rrefs[:1], "anywhere")
    with autograd.context() as context_id, pytest.raises(ValueError, match="no step on alice"):
        one.step(context_id)
    with pytest.raises(RuntimeError, match=r"(?s)be constructed on 2 workers.*alice.*bob"):
        optim.DistributedOptimizer(RefusesToBeMade, rrefs)


def test_a_step_needs_a_context(owners):
    optimizer = optim.DistributedOptimizer(torch.optim.SGD, [owners[0].rpc_sync().share()], lr=1.0)
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 7"):
        optimizer.step(7)
    assert targets.shared == {}


def test_a_step_has_no_timeout_where_calls_have_none(owners):
    before = rpc.get_rpc_timeout()
    rpc._set_rpc_timeout(0)
    try:
        optimizer = optim.DistributedOptimizer(
            torch.optim.SGD, [owner.rpc_sync().share() for owner in owners], lr=1.0
        )
        with autograd.context() as context_id:
            autograd.backward(context_id, losses(owners, [3.0, 5.0]))
            optimizer.step(context_id)
    finally:
        rpc._set_rpc_timeout(before)
    assert [owner.rpc_sync().state()[0].tolist() for owner in owners] == [[-2.0] * 2, [-4.0] * 2]
