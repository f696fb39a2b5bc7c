"""One worker's part of the graph in a pass: which stages run when, and their gradients."""

from typing import Any

import pytest
import torch
from graph_parts import (
    accumulate_node,
    entry,
    received,
    root,
    run_stage,
    run_to_end,
    totals_of,
)

from rayrpc._autograd.functions import SEND_NODE
from rayrpc._autograd.graph import ROOTS, WHOLE_RUN, GradGraph


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
    entries = {ROOTS: root(loss), 1: entry(first, key=1), 2: entry(second, key=2)}
    graph = GradGraph(entries, retain)
    assert graph.run() is None
    graph.add_gradients(ROOTS, [torch.ones(())])
    replies = {
        node2: lambda gradients: (2, [gradients[0] * 3]),
        node1: lambda gradients: (1, [gradients[0] * 5]),
    }
    return run_to_end(graph, replies), whole


def test_a_part_yields_the_gradients_of_the_whole(weight):
    gradients, whole = run_alternating(weight)
    (expected,) = torch.autograd.grad(whole, weight)
    assert set(gradients) == {weight} and weight.grad is None
    torch.testing.assert_close(gradients[weight], expected)


def test_profiles_show_where_the_gradients_of_sent_messages_come_in(weight):
    graph = GradGraph({1: entry(weight * 2, key=1), 2: entry(weight * 3, key=2)}, False)
    for key in (1, 2):
        graph.add_gradients(key, [torch.ones(3, 3)])
    with torch.profiler.profile() as recorded:
        run_to_end(graph, {})
    assert [event.name for event in recorded.events()].count(SEND_NODE) == 2


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
    graph = GradGraph({n: entry(part, key=n) for n, part in enumerate(parts)}, retain=False)
    for number in range(3):
        assert graph.run() is None
        graph.add_gradients(number, [torch.ones(3, 3)])
    gradients = totals_of(graph.run())
    assert calls == [1]
    torch.testing.assert_close(gradients[weight], torch.full((3, 3), 6.0))


def test_a_message_whose_gradients_come_twice_counts_once(weight):
    graph = GradGraph({1: entry(weight * 2), 2: entry(weight * 3, key=2)}, retain=False)
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


def test_stages_that_share_no_node_run_as_they_become_ready(weight):
    """What two of them share may be a leaf."""
    back, node1 = received(torch.ones(3, 3))
    loss = (back @ weight).sum()
    graph = GradGraph({ROOTS: root(loss), 1: entry(weight * 2)}, retain=False)
    graph.add_gradients(ROOTS, [torch.ones(())])
    assert set(run_stage(graph).exits) == {node1}
    with pytest.raises(RuntimeError, match="second time"):  # the stage has freed its graph
        loss.backward()
    graph.add_gradients(1, [torch.ones(3, 3)])
    (total,) = totals_of(run_stage(graph)).values()
    expected = torch.ones(3, 3) * 2 + torch.ones(3, 3).T @ torch.ones(3, 3)
    torch.testing.assert_close(total, expected)


def test_a_node_that_stages_would_share_runs_once_with_the_whole_gradient(weight):
    seen = []

    class Clip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(gradient)
            return gradient.clamp(-1, 1)

    first = Clip.apply(weight * 1)
    back, node = received(torch.ones(3, 3))
    loss = (back * 5 + first * 2).sum()  # first is needed beside what is made of it elsewhere
    graph = GradGraph({ROOTS: root(loss), 1: entry(first)}, retain=False)
    graph.add_gradients(ROOTS, [torch.ones(())])
    assert graph.run() == WHOLE_RUN
    gradients = run_to_end(graph, {node: lambda gradients: (1, [gradients[0] * -0.3])})
    assert [each.tolist() for each in seen] == [[[0.5] * 3] * 3]
    torch.testing.assert_close(gradients[weight], torch.full((3, 3), 0.5))


def test_a_node_behind_another_shared_one_waits_too(weight):
    """A residual: what both stages reach leads to what both reach."""
    shared = weight * 2
    other = shared * 3
    back, node = received(torch.ones(3, 3))
    loss = (back * 1 + other + shared).sum()
    graph = GradGraph({ROOTS: root(loss), 1: entry(other)}, retain=False)
    graph.add_gradients(ROOTS, [torch.ones(())])
    runs = []
    for made in (shared, other):
        made.grad_fn.register_hook(lambda *_: runs.append(1))
    gradients = run_to_end(graph, {node: lambda gradients: (1, gradients)})
    assert len(runs) == 2
    torch.testing.assert_close(gradients[weight], torch.full((3, 3), 2 * (3 + 3 + 1.0)))


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_of_several_tensors_runs_once(weight, mode):
    other = torch.rand(3, 3, requires_grad=True)
    inner = weight * other
    calls = []
    torch.autograd.graph.register_multi_grad_hook(
        [weight, other, inner], lambda gradients: calls.append(gradients), mode=mode
    )
    graph = GradGraph({ROOTS: root(inner.sum())}, retain=False)
    graph.add_gradients(ROOTS, [torch.ones(())])
    gradients = run_to_end(graph, {})
    assert len(calls) == 1
    torch.testing.assert_close(gradients[weight], other.detach())
    assert weight.grad is other.grad is None


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_hooks_of_a_receive_functions_node_run_once(register):
    runs = []
    one, node = received(torch.rand(3))
    getattr(node, register)(lambda *gradients: runs.append(1))
    graph = GradGraph({ROOTS: root((one * 2).sum())}, retain=False)
    graph.add_gradients(ROOTS, [torch.ones(())])
    left: dict[Any, Any] = {}
    assert graph.run() == WHOLE_RUN
    graph.run_whole(lambda each, gradients: left.update({each: gradients}))
    assert runs == [1] and left[node][0].tolist() == [2.0] * 3


def test_a_failing_hook_of_a_leaf_leaves_its_grad_alone(weight):
    kept = weight.grad = torch.ones(3, 3)

    def fail(leaf):
        raise ValueError("as expected")

    hook = weight.register_post_accumulate_grad_hook(fail)
    for _ in range(2):  # what the first run held is released
        graph = GradGraph({ROOTS: root((weight * 2).sum())}, retain=False)
        graph.add_gradients(ROOTS, [torch.ones(())])
        with pytest.raises(ValueError, match="as expected"):
            run_to_end(graph, {})
        assert weight.grad is kept
    hook.remove()
    assert len(weight._backward_hooks or ()) == 0
