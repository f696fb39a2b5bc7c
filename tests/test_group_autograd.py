"""Distributed autograd in groups beside the default one: contexts, passes, optimizers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import targets
import torch
from conftest import eventually, run_in_threads

import rayrpc as rpc
from rayrpc import autograd, errors
from rayrpc._autograd.hook import contexts_of
from rayrpc.optim import DistributedOptimizer

WAIT = 60.0
GROUP = f"learners-{os.getpid()}"


@pytest.fixture(scope="module")
def group(workers):
    """A group with two workers of its own; the default one has alice and bob."""
    group = rpc.init_group(GROUP, "me")
    group.start_workers(["learner0", "learner1"])
    yield group
    group.shutdown()


@pytest.fixture(autouse=True)
def ended(group):
    """Check that no context is left, at any worker of either group."""
    yield
    assert eventually(lambda: all(count == 0 for count in _counts(group)))


def _counts(group):
    learners = [group.rpc_sync(f"learner{n}", _count, args=()) for n in range(2)]
    others = [rpc.rpc_sync(name, _count, args=()) for name in ("alice", "bob")]
    return [*learners, *others, _count(), len(contexts_of(group._agent)._contexts)]


def _targets() -> Any:
    """Return functions that go by value, as local ones: workers cannot import this module."""

    def count():
        return int(rpc.autograd._get_debug_info()["num_autograd_contexts"])

    def along(group, path, x):
        """Double a tensor at each worker of a path."""
        doubled = x * 2
        if not path:
            return doubled
        return rpc.get_group(group).rpc_sync(path[0], along, args=(group, path[1:], doubled))

    def as_guest(group):
        guest = rpc.connect(group)
        try:
            x = torch.ones(2, requires_grad=True)
            with guest.autograd.context() as context:
                loss = guest.rpc_sync("learner0", torch.mul, args=(x, 3)).sum()
                guest.autograd.backward(context, [loss])
                return guest.autograd.get_gradients(context)[x].tolist()
        finally:
            guest.shutdown()

    class Die(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            os._exit(1)

    def dies_in_backward(x):
        return Die.apply(x)

    def parameter():
        return torch.nn.Parameter(torch.ones(2))

    return count, along, as_guest, dies_in_backward, parameter


_count, along, as_guest, dies_in_backward, parameter = _targets()


def test_gradients_go_back_along_the_calls_of_a_group(group):
    x = torch.ones(2, requires_grad=True)
    with group.autograd.context() as context:
        # this worker serves a call of its group, too
        path = ["learner1", "me", "learner0"]
        loss = group.rpc_sync("learner0", along, args=(GROUP, path, x)).sum()
        group.autograd.backward(context, [loss])
        assert group.autograd.get_gradients(context)[x].tolist() == [16.0, 16.0]
        assert x.grad is None


def test_contexts_of_two_groups_are_apart(group):
    x = torch.ones(2, requires_grad=True)
    with group.autograd.context() as context:
        loss = group.rpc_sync("learner0", torch.mul, args=(x, 3)).sum()
        group.autograd.backward(context, [loss])
        for function in (autograd.get_gradients, autograd._retrieve_context):
            with pytest.raises(RuntimeError, match="Could not find autograd context"):
                function(context)
        with pytest.raises(RuntimeError, match="Already have an autograd context id"):
            with autograd.context():
                pass
        assert group.autograd.get_gradients(context)[x].tolist() == [3.0, 3.0]
    with autograd.context() as context:
        with pytest.raises(RuntimeError, match="Could not find autograd context"):
            group.autograd.backward(context, [x.sum()])
        with pytest.raises(RuntimeError, match="Already have an autograd context id"):
            with group.autograd.context():
                pass


def test_a_call_of_another_group_refuses_tensors_that_require_grad(group):
    x = torch.ones(2, requires_grad=True)
    default = rpc.get_group().name
    for open_context, to, ours in (
        (group.autograd.context, (rpc.get_group(), "alice"), GROUP),
        (autograd.context, (group, "learner0"), default),
    ):
        other, name = to
        with open_context():
            text = f"worker of group {other.name!r} in a context .* of group {ours!r}"
            with pytest.raises(errors.SerializationError, match=text):
                other.rpc_sync(name, torch.add, args=(x, 1))
            plain = other.rpc_sync(name, torch.add, args=(x.detach(), 1))
            assert plain.tolist() == [2.0, 2.0] and not plain.requires_grad
        assert other.rpc_sync(name, torch.add, args=(x, 1)).tolist() == [2.0, 2.0]


def test_threads_train_in_both_groups_at_once(group, quick_switches):
    def train(group, autograd, path):
        for number in range(1, 16):
            x = torch.full((3,), float(number), requires_grad=True)
            with autograd.context() as context:
                y = group.rpc_sync(path[0], along, args=(group.name, path[1:], x))
                autograd.backward(context, [(y * y).sum()])
                found = autograd.get_gradients(context)
                factor = 4 ** len(path)  # the gradient of (2**n x)**2
                assert list(found) == [x] and found[x].tolist() == [2 * factor * number] * 3

    default = rpc.get_group()
    work = [
        (group, group.autograd, ["learner0", "me", "learner1"]),
        (group, group.autograd, ["learner1"]),
        (default, autograd, ["alice", "driver", "bob"]),
        (default, default.autograd, ["bob"]),
    ]
    run_in_threads(train, work, WAIT)


def test_an_optimizer_is_in_the_group_of_its_parameters(group):
    there = [group.remote(f"learner{n}", parameter) for n in range(2)]
    here = torch.ones(2, requires_grad=True)
    optimizer = DistributedOptimizer(torch.optim.SGD, [*there, group.rref(here)], lr=0.5)
    with group.autograd.context() as context:
        remote = [each.rpc_sync().mul(3.0) for each in there]
        group.autograd.backward(context, [(remote[0] + remote[1] + here).sum()])
        optimizer.step(context)
        with pytest.raises(RuntimeError, match="Could not find autograd context"):
            optimizer.step(context + 1)
    assert [each.to_here().tolist() for each in there] == [[-0.5, -0.5]] * 2
    assert here.tolist() == [0.5, 0.5]
    other = rpc.RRef(here)
    with pytest.raises(errors.GroupError, match="are of one group, not of"):
        DistributedOptimizer(torch.optim.SGD, [*there, other], lr=0.5)


def test_the_value_of_an_rref_is_a_root(group):
    x = torch.ones(1, requires_grad=True)
    with group.autograd.context() as context:
        rref = group.remote("learner0", torch.mul, args=(x, 5))
        rref.backward(context)
        assert group.autograd.get_gradients(context)[x].tolist() == [5.0]


def test_a_guest_computes_gradients(group):
    assert rpc.rpc_sync("alice", as_guest, args=(GROUP,)) == [3.0, 3.0]


def test_the_death_of_a_worker_ends_the_pass(group):
    group.start_workers(["doomed"])
    x = torch.ones(2, requires_grad=True)
    with group.autograd.context() as context:
        y = group.rpc_sync("doomed", dies_in_backward, args=(x,))
        with pytest.raises(errors.WorkerDiedError, match="doomed"):
            group.autograd.backward(context, [y.sum()])
    assert targets.add(1) == 2
