"""Torch's engine as this package uses it: seeds, targets, leaves and the number of a run."""

import contextlib
import threading
from typing import Any

import pytest
import torch

from rayrpc._autograd import engine
from rayrpc._autograd.edges import edge_at
from rayrpc._autograd.engine import AccumulateGrad, profiled, run_id, seeds_of

WAIT_SECONDS = 60.0
run_engine: Any = engine.run_engine  # its gradients may be None


@pytest.fixture
def leaf():
    return torch.tensor([1.0, 2.0], requires_grad=True)


def edge_of(tensor):
    return torch.autograd.graph.get_gradient_edge(tensor)


class TestSeeds:
    def test_gradients_of_the_same_edge_are_added(self, leaf):
        first, second = edge_of(leaf * 2), edge_of(leaf * 3)
        one, two = torch.ones(2), torch.full((2,), 2.0)
        seeds = seeds_of([({0: first, 1: second}, [one, two]), ({0: first}, [two])])
        assert set(seeds) == {first, second}
        assert seeds[first].tolist() == [3.0, 3.0] and seeds[second] is two
        assert one.tolist() == [1.0, 1.0]  # what arrived is not changed

    def test_a_tensor_that_was_not_used_and_one_without_a_graph_are_left_out(self, leaf):
        edge = edge_of(leaf * 2)
        nowhere = type(edge)(None, 0)
        assert seeds_of([({0: edge, 1: nowhere}, [None, torch.ones(2)])]) == {}

    def test_of_nothing_there_are_none(self):
        assert seeds_of([]) == {}


class TestRun:
    def test_without_targets_leaves_accumulate(self, leaf):
        leaf.grad = torch.ones(2)
        value = leaf * 3
        run_engine({edge_of(value): torch.ones(2)}, False, None)
        assert leaf.grad.tolist() == [4.0, 4.0]

    def test_with_targets_it_stops_there_and_leaves_keep_their_grad(self, leaf):
        middle = leaf * 3
        value = middle * 5
        gradients = run_engine(
            {edge_of(value): torch.ones(2)}, False, [edge_of(middle), edge_of(leaf)]
        )
        assert [gradient.tolist() for gradient in gradients] == [[5.0, 5.0], [15.0, 15.0]]
        assert leaf.grad is None

    def test_a_target_that_no_gradient_reaches_has_none(self, leaf):
        other = torch.ones(2, requires_grad=True)
        gradients = run_engine(
            {edge_of(leaf * 2): torch.ones(2)}, False, [edge_of(other), edge_of(leaf)]
        )
        assert gradients[0] is None and gradients[1].tolist() == [2.0, 2.0]

    def test_several_seeds_are_one_pass(self, leaf):
        middle = leaf * 3
        first, second = middle * 5, middle * 7
        seeds = {edge_of(first): torch.ones(2), edge_of(second): torch.ones(2)}
        (gradient,) = run_engine(seeds, False, [edge_of(leaf)])
        assert gradient.tolist() == [36.0, 36.0]

    def test_a_graph_is_freed_unless_it_is_retained(self, leaf):
        value = (leaf * leaf).sum()
        seeds = {edge_of(value): torch.ones(())}
        for _ in range(2):
            (gradient,) = run_engine(seeds, True, [edge_of(leaf)])
            assert gradient.tolist() == [2.0, 4.0]
        run_engine(seeds, False, [edge_of(leaf)])
        with pytest.raises(RuntimeError, match="second time"):
            run_engine(seeds, False, [edge_of(leaf)])

    def test_the_gradients_have_no_graph(self, leaf):
        value = (leaf * leaf).sum()
        (gradient,) = run_engine({edge_of(value): torch.ones(())}, False, [edge_of(leaf)])
        assert not gradient.requires_grad


class TestRunId:
    def test_each_run_has_a_number_and_outside_of_one_there_is_none(self, leaf):
        seen = []
        value = leaf * 2
        value.register_hook(lambda _: seen.append(run_id()))
        end = (value * 3).sum()
        for _ in range(2):
            run_engine({edge_of(end): torch.ones(())}, True, [edge_of(leaf)])
        assert run_id() == -1 and len(set(seen)) == 2 and -1 not in seen

    def test_a_thread_beside_a_run_is_in_none(self, leaf):
        seen = []

        def look(_):
            thread = threading.Thread(target=lambda: seen.append(run_id()))
            thread.start()
            thread.join(WAIT_SECONDS)

        value = leaf * 2
        value.register_hook(look)
        run_engine({edge_of(value * 3): torch.ones(2)}, False, [edge_of(leaf)])
        assert seen == [-1]


def test_the_nodes_of_leaves_are_known_by_their_class(leaf):
    value = leaf * 2
    (node, _), *_ = value.grad_fn.next_functions
    assert type(node) is AccumulateGrad and type(value.grad_fn) is not AccumulateGrad
    assert node.variable is leaf
    run_engine({edge_at(node): torch.ones(2)}, False, None)
    assert leaf.grad.tolist() == [1.0, 1.0]


def test_an_event_is_recorded_only_where_a_profiler_runs():
    assert type(profiled("mine")) is contextlib.nullcontext
    with torch.autograd.profiler.profile() as profile:
        with profiled("mine"):
            torch.ones(1)
    assert "mine" in {event.name for event in profile.function_events}
