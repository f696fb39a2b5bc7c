"""One worker's part of a backward pass: what waits for what, and what gradients come out."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from rayrpc._autograd import functions, participant
from rayrpc._autograd.accumulate import Leaves, added
from rayrpc._autograd.context import DistAutogradContext
from rayrpc._autograd.graph import Entry, GradGraph


def received(*tensors):
    """Return tensors as if a message had brought them, and their receive function."""
    joined = [tensor.detach().clone() for tensor in tensors]
    functions._here.arrived[1] = list(joined)
    node = functions.receive(1)
    return *joined, node


def edge(tensor):
    return (tensor.grad_fn, tensor.output_nr)


def entry(*tensors):
    edges = [get_gradient_edge(tensor)[:2] for tensor in tensors]
    return Entry(edges, functions.is_receive)


def root(tensor):
    return Entry([edge(tensor)], functions.is_receive)


def settled(stage):
    gradients = {}
    stage.leaves.settle(gradients, threading.Lock())
    return gradients


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
    graph = GradGraph({"root": root(loss), 1: entry(first), 2: entry(second)}, retain)
    assert graph.run() is None
    graph.feed("root", [torch.ones(())])
    stage = graph.run()
    assert set(stage.exits) == {node2} and stage.leaves is None
    graph.feed(2, [stage.exits[node2][0] * 3])
    stage = graph.run()
    assert set(stage.exits) == {node1} and stage.leaves is None
    graph.feed(1, [stage.exits[node1][0] * 5])
    stage = graph.run()
    assert not stage.exits
    return settled(stage), whole


def test_a_part_runs_in_stages_and_yields_the_gradients_of_the_whole(weight):
    gradients, whole = run_alternating(weight)
    (expected,) = torch.autograd.grad(whole, weight)
    assert set(gradients) == {weight} and weight.grad is None
    torch.testing.assert_close(gradients[weight], expected)


def test_hooks_of_a_leaf_see_its_whole_gradient_once(weight):
    seen = []
    weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient.abs().sqrt())
    gradients, whole = run_alternating(weight)
    assert len(seen) == 1
    (expected,) = torch.autograd.grad(whole, weight)  # it runs the hook, too
    torch.testing.assert_close(gradients[weight], expected)
    assert len(weight._backward_hooks) == 1


@pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
def test_hooks_of_a_leafs_node_run_once_and_leave_its_grad_alone(weight, register):
    runs = []
    kept = weight.grad = torch.ones(3, 3)
    node = weight.view(3, 3).grad_fn.next_functions[0][0]
    getattr(node, register)(lambda *gradients: runs.append(1))
    gradients, whole = run_alternating(weight)
    assert runs == [1] and weight.grad is kept
    (expected,) = torch.autograd.grad(whole, weight)
    torch.testing.assert_close(gradients[weight], expected)


def test_hooks_of_a_leafs_node_are_seen_whenever_they_were_registered(weight):
    run_alternating(weight)
    run_alternating(weight)  # by now it is known that nobody watches
    runs = []
    node = weight.view(3, 3).grad_fn.next_functions[0][0]
    handle = node.register_hook(lambda inputs, outputs: runs.append(1))
    run_alternating(weight)
    run_alternating(weight)
    assert runs == [1, 1]
    handle.remove()
    run_alternating(weight)
    weight.register_post_accumulate_grad_hook(lambda leaf: runs.append(2))
    run_alternating(weight)
    assert runs == [1, 1, 2]


def test_a_part_that_has_asked_the_leader_promises_to_tell_of_its_end(weight, monkeypatch):
    """Else it could end by the leader's answer, with nobody to tell the leader."""
    calls = []

    def call(worker, func, args, timeout):
        calls.append((worker, torch.futures.Future()))
        return calls[-1][1]

    agent = SimpleNamespace(info=SimpleNamespace(id=1))
    home = SimpleNamespace(lock=threading.Lock(), passes=0)
    monkeypatch.setattr(participant.current, "get_agent", lambda: agent)
    monkeypatch.setattr(participant, "contexts", lambda: home)
    monkeypatch.setattr(participant, "call_outside", call)
    x, node = received(torch.ones(3, 3))
    node.sender = 0
    context = DistAutogradContext(1)
    context.sends = {10: SimpleNamespace(to=3), 11: SimpleNamespace(to=0)}
    run = participant.Pass(context, 5, {10: entry(x * 2), 11: entry(weight)}, False, leader=0)
    assert run.begin({}) == {}
    assert run.feed({10: [torch.ones(3, 3)]}, source=3) == {}
    assert [worker for worker, _ in calls] == [0]
    assert run.promised({}) is run.future and not run.future.done()
    calls[0][1].set_result(({11: [torch.ones(3, 3)]}, participant.PROMISED))
    assert run.future.value() == ({}, participant.OVER)
    torch.testing.assert_close(context.gradients()[weight], torch.ones(3, 3))


def test_gradients_that_cannot_be_added_up_are_an_error_of_who_asks(weight):
    context = DistAutogradContext(1)
    node = weight.view(3, 3).grad_fn.next_functions[0][0]
    for _ in range(2):
        context.take(Leaves({node: torch.ones(3, 3)}, set()))
    torch.testing.assert_close(context.gradients()[weight], torch.full((3, 3), 2.0))
    context.take(Leaves({node: torch.ones(2)}, set()))
    with pytest.raises(RuntimeError, match="size"):
        context.gradients()


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
        graph.feed(number, [torch.ones(3, 3)])
    gradients = settled(graph.run())
    assert calls == [1]
    torch.testing.assert_close(gradients[weight], torch.full((3, 3), 6.0))


def test_a_message_that_is_fed_twice_counts_once(weight):
    graph = GradGraph({1: entry(weight * 2), 2: entry(weight * 3)}, retain=False)
    graph.feed(1, [torch.ones(3, 3)])
    graph.feed(1, [torch.ones(3, 3)])
    graph.feed(2, [torch.ones(3, 3)])
    torch.testing.assert_close(settled(graph.run())[weight], torch.full((3, 3), 5.0))


def test_tensors_that_were_not_used_yield_nothing(weight):
    other = torch.rand(3, requires_grad=True)
    one, two, node = received(torch.rand(3, 3), torch.rand(3))
    graph = GradGraph({1: entry(weight * one, other * two)}, retain=False)
    graph.feed(1, [torch.ones(3, 3), None])
    stage = graph.run()
    assert list(stage.exits[node]) == [0]
    assert set(settled(stage)) == {weight}


def test_a_message_without_any_gradient_is_passed_on(weight):
    one, node = received(torch.rand(3, 3))
    graph = GradGraph({1: entry(weight * one)}, retain=False)
    graph.feed(1, [None])
    stage = graph.run()
    assert stage.exits == {node: {}} and settled(stage) == {}


def test_what_was_received_may_be_sent_on_as_it_is():
    one, node = received(torch.rand(3))
    graph = GradGraph({1: entry(one)}, retain=False)
    graph.feed(1, [torch.full((3,), 7.0)])
    torch.testing.assert_close(graph.run().exits[node][0], torch.full((3,), 7.0))


def test_the_graph_is_kept_only_if_asked(weight):
    loss = (weight @ weight).sum()
    for retain in (True, False):
        graph = GradGraph({"root": root(loss)}, retain)
        graph.feed("root", [torch.ones(())])
        graph.run()
    graph = GradGraph({"root": root(loss)}, False)
    graph.feed("root", [torch.ones(())])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        graph.run()


def test_received_tensors_can_be_changed_in_place():
    one, node = received(torch.ones(3))
    one.mul_(4)
    graph = GradGraph({"root": root(one.sum())}, retain=False)
    graph.feed("root", [torch.ones(())])
    torch.testing.assert_close(graph.run().exits[node][0], torch.full((3,), 4.0))


def test_a_local_backward_pass_says_what_to_run_instead():
    one, _ = received(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"run torch\.distributed\.autograd\.backward"):
        one.sum().backward()


class TestSums:
    """Gradients of one context add up, whatever their layout, and belong to it alone."""

    def passes(self, leaf, *losses):
        gradients = {}
        for loss in losses:
            graph = GradGraph({"root": root(loss)}, retain=True)
            graph.feed("root", [torch.ones(())])
            graph.run().leaves.settle(gradients, threading.Lock())
        return gradients[leaf]

    @pytest.mark.parametrize("order", [(True, True), (True, False), (False, True)])
    def test_of_dense_and_sparse_ones(self, order):
        table = torch.rand(5, 2, requires_grad=True)
        index = torch.tensor([1, 3, 1])
        embed = torch.nn.functional.embedding
        losses = [embed(index, table, sparse=sparse).sum() for sparse in order]
        total = self.passes(table, *losses)
        expected = torch.zeros(5, 2)
        expected[1], expected[3] = 4, 2
        torch.testing.assert_close(total.to_dense() if total.is_sparse else total, expected)

    def test_of_layouts_either_way_round(self):
        dense, sparse = torch.eye(3), torch.eye(3).to_sparse()
        for one in (dense, sparse):
            for other in (dense, sparse):
                result = added(one, other)
                result = result.to_dense() if result.is_sparse else result
                torch.testing.assert_close(result, 2 * torch.eye(3))

    def test_a_gradient_that_two_leaves_get_is_copied(self):
        one, two = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
        graph = GradGraph({"root": root((one + two).sum())}, retain=False)
        graph.feed("root", [torch.ones(())])
        gradients = settled(graph.run())
        gradients[one] += 1
        torch.testing.assert_close(gradients[two], torch.ones(3))
