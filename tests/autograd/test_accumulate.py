"""Gradients of leaves: their sums, their memory, and their hooks."""

import threading

import pytest
import torch
from graph_parts import accumulate_node, root, run_stage, totals_of
from interrupting import interrupted

from rayrpc._autograd import accumulate
from rayrpc._autograd.accumulate import IsolatedLeaves, LeafGradients, add, hooked_leaves
from rayrpc._autograd.graph import ROOTS, GradGraph
from rayrpc._concurrency import waiting


class TestSums:
    """Gradients of one context add up, whatever their layout, and belong to it alone."""

    def passes(self, leaf, *losses):
        gradients = {}
        for loss in losses:
            graph = GradGraph({ROOTS: root(loss)}, retain=True)
            graph.add_gradients(ROOTS, [torch.ones(())])
            run_stage(graph).leaves.accumulate_into(gradients, threading.Lock())
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
                result = add(one, other)
                result = result.to_dense() if result.is_sparse else result
                torch.testing.assert_close(result, 2 * torch.eye(3))

    def test_a_gradient_that_two_leaves_get_is_copied(self):
        one, two = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
        graph = GradGraph({ROOTS: root((one + two).sum())}, retain=False)
        graph.add_gradients(ROOTS, [torch.ones(())])
        gradients = totals_of(graph.run())
        gradients[one] += 1
        torch.testing.assert_close(gradients[two], torch.ones(3))

    def test_a_gradient_with_other_strides_gets_its_leafs(self):
        leaf = torch.rand(2, 3, requires_grad=True)
        gradient = torch.rand(3, 2).t()
        totals = {}
        LeafGradients({accumulate_node(leaf): gradient}, set()).accumulate_into(
            totals, threading.Lock()
        )
        assert totals[leaf].stride() == leaf.stride() and torch.equal(totals[leaf], gradient)


class TestHooks:
    def test_nodes_with_hooks_are_found(self):
        leaves = [torch.rand(3, requires_grad=True) for _ in range(4)]
        nodes = [accumulate_node(leaf) for leaf in leaves]
        nodes[0].register_hook(lambda *_: None)
        nodes[1].register_prehook(lambda *_: None)
        leaves[2].register_post_accumulate_grad_hook(lambda *_: None)
        for _ in range(2):  # the second time by what is known
            assert [hooked_leaves([node]) for node in nodes] == [True] * 3 + [False]
        leaves[3].register_hook(lambda *_: None)
        assert hooked_leaves(nodes[3:])

    def test_suspended_hooks_come_back_in_their_order(self):
        leaf = torch.rand(3, requires_grad=True)
        calls = []
        for number in range(3):
            leaf.register_hook(lambda _, number=number: calls.append(number))
        with accumulate._suspended_hooks([leaf]):
            leaf.sum().backward()
            assert calls == []
        leaf.sum().backward()
        assert calls == [0, 1, 2]

    def test_a_hooked_node_is_run_and_its_leafs_grad_restored(self):
        leaf = torch.rand(3, requires_grad=True)
        kept = leaf.grad = torch.zeros(3)
        seen = []
        leaf.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad.clone()))
        node = accumulate_node(leaf)
        totals = {}
        for _ in range(2):
            LeafGradients({node: torch.ones(3)}, {node}).accumulate_into(totals, threading.Lock())
        assert leaf.grad is kept and [each.tolist() for each in seen] == [[1.0] * 3] * 2
        assert totals[leaf].tolist() == [2.0] * 3


class TestInterrupts:
    """Ctrl-C at any point leaves the user's gradients, and the leaf to the next pass."""

    FILES = (accumulate.__file__, waiting.__file__)

    @pytest.fixture
    def leaf(self):
        leaf = torch.rand(3, requires_grad=True)
        leaf.grad = torch.full((3,), 5.0)
        leaf.register_hook(lambda gradient: gradient * 1)
        return leaf

    def check_steps(self, leaf, step):
        number = 1
        while interrupted(step, self.FILES, number):
            assert leaf.grad is not None, f"after an interrupt at point {number}"
            assert leaf.grad.tolist() == [5.0] * 3, f"after an interrupt at point {number}"
            thread = threading.Thread(target=step, daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive(), f"after an interrupt at point {number}"
            number += 1
        return number

    def test_of_a_run_of_nodes_for_ddp(self, leaf):
        node = accumulate_node(leaf)

        def step():
            LeafGradients({node: torch.ones(3)}, {node}).accumulate_into({}, threading.RLock())

        assert self.check_steps(leaf, step) > 50

    def test_of_a_run_with_isolated_leaves(self, leaf):
        node = accumulate_node(leaf)

        def step():
            ended = []
            isolated = IsolatedLeaves([node], lambda: not ended)
            try:
                isolated.run((leaf * 2).sum().backward)
            finally:
                ended.append(True)
            assert [each.tolist() for each in isolated.gradients.values()] == [[2.0] * 3]

        assert self.check_steps(leaf, step) > 50
