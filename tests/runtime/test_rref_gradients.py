"""Backward passes from values of RRefs, at their owner."""

import pytest
import torch

import rayrpc as rpc
from rayrpc import autograd
from rayrpc.errors import RpcError


def squares(x):
    return (x * x).sum()


def test_the_owner_may_run_a_local_pass(workers):
    x = torch.ones(2, requires_grad=True)
    rref = rpc.RRef(squares(x))
    rref.backward(retain_graph=True)
    rref.backward()
    assert x.grad is not None and x.grad.tolist() == [4.0, 4.0]


def test_the_owner_may_run_a_pass_of_a_context(workers):
    with autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        doubled = rpc.rpc_sync("alice", torch.mul, (x, 2))
        rpc.RRef(squares(doubled)).backward(context)
        assert autograd.get_gradients(context)[x].tolist() == [8.0, 8.0]


def test_a_user_runs_a_pass_of_a_context_where_the_value_is(workers):
    with autograd.context() as context:
        x = torch.ones(2, requires_grad=True)
        rref = rpc.remote("alice", squares, (x,))
        rref.backward(context, retain_graph=True)
        rref.backward(context)
        assert autograd.get_gradients(context)[x].tolist() == [4.0, 4.0]
        assert x.grad is None


def test_a_user_may_run_no_local_pass(workers):
    with pytest.raises(RpcError, match="User RRefs require 'dist_autograd_ctx_id'"):
        rpc.remote("alice", torch.ones, (1,)).backward()


def test_a_value_that_is_no_tensor_has_none(workers):
    with pytest.raises(RpcError, match="should contain a tensor"):
        rpc.RRef("text").backward()
    with autograd.context() as context:
        with pytest.raises(RuntimeError, match="should contain a tensor"):
            rpc.remote("alice", str).backward(context)
