"""One worker's part of the graph in a pass: which stages run when, and their gradients."""

import pytest
import torch
from graph_parts import accumulate_node, entry, received, root, run_stage, totals_of

from rayrpc._autograd.graph import ROOTS, GradGraph


@pytest.fixture
def weight():
    return torch.rand(3, 3, requires_grad=True)


def alternating(weight):
    """A graph that a pass goes through three times, and the same one without messages.

    ``first`` is sent, and comes back times 5; ``second`` is sent, and comes back times 3.
    """
    first = weight @ weight
    back, node1 = received(first * 5)
    second = back @ weight + first
    back2, node2 = received(second * 3)
    loss = (back2 @ weight).sum()

    plain = weight @ weight
    whole = (((plain * 5) @ weight + plain) * 3 @ weight).sum()
    return (first, node1), (second, node2), loss, whole


def run_alternating(weight, retain=False):
    (first, node1), (second, node2), loss, whole = alternating(weight)
    graph = GradGraph({ROOTS: root(loss), 1: entry(first), 2: entry(second)}, retain)
    assert graph.run() is None
    graph.add_gradients(ROOTS, [torch.ones(())])
    stage = run_stage(graph)
    assert set(stage.exits) == {node2} and stage.leaves is None
    graph.add_gradients(2, [stage.exits[node2][0] * 3])
    stage = run_stage(graph)
    assert set(stage.exits) == {node1} and stage.leaves is None
    graph.add_gradients(1, [stage.exits[node1][0] * 5])
    stage = run_stage(graph)
    assert not stage.exits
    return totals_of(stage), whole


def test_a_part_runs_in_stages_and_yields_the_gradients_of_the_whole(weight):
    gradients, whole = run_alternating(weight)
    (expected,) = torch.autograd.grad(whole, weight)
    assert set(gradients) == {weight} and weight.grad is None
    torch.testing.assert_close(gradients[weight], expected)


def test_hooks_of_a_leaf_get_its_whole_gradient_once(weight):
    seen = []

    def keep(gradient):
        seen.append(gradient.clone())
        return gradient.abs().sqrt()

    weight.register_hook(keep)
    gradients, whole = run_alternating(weight)
    assert len(seen) == 1
    (expected,) = torch.autograd.grad(whole, weight)  # it runs the hook, too
    torch.testing.assert_close(gradients[weight], expected)
    assert len(weight._backward_hooks) == 1


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_hooks_of_a_leafs_node_run_once_and_leave_its_grad_alone(weight, register):
    runs = []
    kept = weight.grad = torch.ones(3, 3)
    node = accumulate_node(weight)
    getattr(node, register)(lambda *gradients: runs.append(1))
    gradients, whole = run_alternating(weight)
    assert runs == [1] and weight.grad is kept
    (expected,) = torch.autograd.grad(whole, weight)
    torch.testing.assert_close(gradients[weight], expected)


def test_hooks_of_a_leafs_node_run_whenever_they_were_registered(weight):
    run_alternating(weight)
    run_alternating(weight)  # by now it is known that there are none
    runs = []
    node = accumulate_node(weight)
    handle = node.register_hook(lambda inputs, outputs: runs.append(1))
    run_alternating(weight)
    run_alternating(weight)
    assert runs == [1, 1]
    handle.remove()
    run_alternating(weight)
    weight.register_post_accumulate_grad_hook(lambda leaf: runs.append(2))
    run_alternating(weight)
    assert runs == [1, 1, 2]


def test_entries_that_arrived_together_run_together(weight):
    calls = []

    class Count(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            calls.append(1)
            return gradient

    shared = Count.apply(weight)
    parts = [shared * number for number in (1.0, 2.0, 3.0)]
    graph = GradGraph({n: entry(part) for n, part in enumerate(parts)}, retain=False)
    for number in range(3):
        assert graph.run() is None
        graph.add_gradients(number, [torch.ones(3, 3)])
    gradients = totals_of(graph.run())
    assert calls == [1]
    torch.testing.assert_close(gradients[weight], torch.full((3, 3), 6.0))


def test_a_message_whose_gradients_come_twice_counts_once(weight):
    graph = GradGraph({1: entry(weight * 2), 2: entry(weight * 3)}, retain=False)
    graph.add_gradients(1, [torch.ones(3, 3)])
    graph.add_gradients(1, [torch.ones(3, 3)])
    graph.add_gradients(2, [torch.ones(3, 3)])
    torch.testing.assert_close(totals_of(graph.run())[weight], torch.full((3, 3), 5.0))


def test_tensors_that_were_not_used_yield_nothing(weight):
    other = torch.rand(3, requires_grad=True)
    one, two, node = received(torch.rand(3, 3), torch.rand(3))
    graph = GradGraph({1: entry(weight * one, other * two)}, retain=False)
    graph.add_gradients(1, [torch.ones(3, 3), None])
    stage = run_stage(graph)
    assert list(stage.exits[node]) == [0]
    assert set(totals_of(stage)) == {weight}


def test_a_message_without_any_gradient_is_passed_on(weight):
    one, node = received(torch.rand(3, 3))
    graph = GradGraph({1: entry(weight * one)}, retain=False)
    graph.add_gradients(1, [None])
    stage = run_stage(graph)
    assert stage.exits == {node: {}} and totals_of(stage) == {}


def test_a_received_tensor_may_be_sent_on_as_it_is():
    one, node = received(torch.rand(3))
    graph = GradGraph({1: entry(one)}, retain=False)
    graph.add_gradients(1, [torch.full((3,), 7.0)])
    torch.testing.assert_close(run_stage(graph).exits[node][0], torch.full((3,), 7.0))


def test_the_graph_is_kept_only_if_asked(weight):
    loss = (weight @ weight).sum()
    for retain in (True, False):
        graph = GradGraph({ROOTS: root(loss)}, retain)
        graph.add_gradients(ROOTS, [torch.ones(())])
        graph.run()
    graph = GradGraph({ROOTS: root(loss)}, False)
    graph.add_gradients(ROOTS, [torch.ones(())])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        graph.run()
