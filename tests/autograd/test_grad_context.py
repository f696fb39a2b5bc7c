"""One worker's share of a context: messages, what they depend on, and gradients."""

from types import SimpleNamespace

import pytest
import torch
from graph_parts import accumulate_node, received

from rayrpc._autograd.accumulate import LeafGradients
from rayrpc._autograd.context import MAX_DEPENDENCIES, DistAutogradContext
from rayrpc._autograd.functions import Recorder

ME = 0


@pytest.fixture
def context():
    return DistAutogradContext(1, None)


@pytest.fixture
def weight():
    return torch.rand(3, 3, requires_grad=True)


def send(context, message_id, *tensors, to=1):
    """Add a sent message."""
    recorder = Recorder(message_id, parameters=False)
    for tensor in tensors:
        recorder.record(tensor, None, ())
    assert context.add_send_function(recorder, to) == bool(tensors)


def receive(context, message_id, sender):
    """Add a received message; return its tensor."""
    tensor, node = received(torch.ones(3), message_id=message_id, sender=sender)
    context.receives[message_id] = node
    return tensor


class TestMessages:
    def test_without_recorded_tensors_have_no_send_function(self, context):
        send(context, 5)
        assert context.sends == {}

    def test_depend_on_the_received_ones_that_their_tensors_are_made_of(self, context, weight):
        one, other = receive(context, 11, sender=1), receive(context, 12, sender=2)
        send(context, 5, one * 2, weight)
        send(context, 6, one + other)
        assert context.dependencies_of(context.entry(5, [0])) == [(1, 11, 0)]
        assert context.dependencies_of(context.entry(5, [1])) == []
        assert set(context.dependencies_of(context.entry(6, [0]))) == {(1, 11, 0), (2, 12, 0)}

    def test_of_another_context_are_refused(self, context):
        tensor = receive(DistAutogradContext(2, None), 11, sender=1)
        send(context, 5, tensor)
        with pytest.raises(RuntimeError, match="no longer valid"):
            context.entry(5, [0])

    def test_dependencies_are_followed_as_far_as_they_are_known(self, context, weight):
        send(context, 4, weight)
        one = receive(context, 11, sender=1)
        context.dependencies = {(1, 11, 0): [(ME, 4, 0), (2, 21, 3)]}
        send(context, 5, one, weight)
        assert context.all_dependencies(ME, 5) == {
            (ME, 5, 0): [(1, 11, 0)],
            (ME, 5, 1): [],
            (1, 11, 0): [(ME, 4, 0), (2, 21, 3)],
            (ME, 4, 0): [],
        }

    def test_dependencies_are_limited(self, context):
        one = receive(context, 11, sender=1)
        numbers = range(11, 11 + 2 * MAX_DEPENDENCIES)
        context.dependencies = {(1, each, 0): [(1, each + 1, 0)] for each in numbers}
        send(context, 5, one)
        assert len(context.all_dependencies(ME, 5)) == MAX_DEPENDENCIES


class TestPasses:
    def test_gradients_that_overtake_the_start_of_a_part_are_kept_for_it(self, context):
        part = SimpleNamespace()
        assert context.find_pass(9, {5: [None]}) is None
        assert context.find_pass(9, {6: [None]}) is None
        assert context.add_pass(9, part) == {5: [None], 6: [None]}
        assert context.find_pass(9, {7: [None]}) is part


def test_gradients_that_cannot_be_added_up_are_an_error_of_the_caller_of_gradients(context, weight):
    node = accumulate_node(weight)
    for _ in range(2):
        context.add_gradients(LeafGradients({node: torch.ones(3, 3)}, set()))
    torch.testing.assert_close(context.gradients()[weight], torch.full((3, 3), 2.0))
    context.add_gradients(LeafGradients({node: torch.ones(2)}, set()))
    with pytest.raises(RuntimeError, match="size"):
        context.gradients()
