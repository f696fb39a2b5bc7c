"""The calls between the parts of a pass, where there is no part that they are for."""

import pytest
import torch
from graph_parts import FakeWorker

from rayrpc._autograd.context import DistAutogradContext
from rayrpc._autograd.part_calls import PENDING, propagate
from rayrpc.errors import RpcError

LEADER, ME = 0, 1


def test_needed_gradients_for_a_part_that_has_ended_are_refused(monkeypatch):
    worker = FakeWorker(monkeypatch, ME)
    context = DistAutogradContext(1, worker)
    monkeypatch.setattr(worker, "find_context", lambda context_id: context, raising=False)
    gradients = {10: [torch.ones(3, 3)]}
    assert propagate(1, 5, gradients, LEADER, False).value() == ({}, PENDING)
    with pytest.raises(RpcError, match="the part of worker 1 in the pass has ended"):
        propagate(1, 5, gradients, LEADER, True)
