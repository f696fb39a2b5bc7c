"""One worker's share of a context: the workers that it connects, and gradients."""

import pytest
import torch
from graph_parts import accumulate_node

from rayrpc._autograd.accumulate import LeafGradients
from rayrpc._autograd.context import DistAutogradContext


@pytest.fixture
def context():
    return DistAutogradContext(1, None)


@pytest.fixture
def weight():
    return torch.rand(3, 3, requires_grad=True)


class TestWorkers:
    def test_callees_are_those_that_were_called(self, context):
        context.add_callee(1)
        context.add_callee(2)
        context.add_callee(1)
        assert context.callees() == context._known_worker_ids() == {1, 2}

    def test_callers_are_counted_down(self, context):
        context.add_caller(1)
        context.add_caller(2)
        assert context.remove_caller(3) and context.remove_caller(1)
        assert not context.remove_caller(2) and not context.remove_caller(2)


def test_gradients_that_cannot_be_added_up_are_an_error_of_the_caller_of_gradients(context, weight):
    node = accumulate_node(weight)
    for _ in range(2):
        context.add_gradients(LeafGradients({node: torch.ones(3, 3)}, set()))
    torch.testing.assert_close(context.gradients()[weight], torch.full((3, 3), 2.0))
    context.add_gradients(LeafGradients({node: torch.ones(2)}, set()))
    with pytest.raises(RuntimeError, match="size"):
        context.gradients()
