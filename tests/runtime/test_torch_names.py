"""Private functions of torch's RPC API that programs call."""

import pytest
import torch

import rayrpc as rpc
from rayrpc import api
from rayrpc._runtime.torch_names import _invoke_rpc, _rref_typeof_on_user, _to_worker_info
from rayrpc.internal import RPCExecMode


@pytest.mark.parametrize("way", ["name", "id", "info"])
def test_a_destination_becomes_a_worker_info(worker_b, way):
    info = worker_b.agent.get_worker_info()
    assert _to_worker_info(getattr(info, way, info)) == info


def test_a_call_has_a_future_that_wait_all_does_not_wait_for(worker_b):
    with api._wait_all():
        future = _invoke_rpc("b", torch.add, RPCExecMode.ASYNC, (torch.ones(1), 1))
        assert not api._thread_local_var.future_list
    assert future.wait().item() == 2
    future = _invoke_rpc("b", sorted, RPCExecMode.ASYNC, ([1, 2],), {"reverse": True})
    assert future.wait() == [2, 1]


def test_the_type_of_a_value_is_known_to_its_users(worker_b):
    rref = rpc.remote("b", torch.ones, (2,))
    assert _rref_typeof_on_user(rref) is torch.Tensor
    assert _rref_typeof_on_user(rref, blocking=False).wait() is torch.Tensor
