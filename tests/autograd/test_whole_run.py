"""One run of torch's engine while gradients arrive and leave: waits, aborts and threads."""

import contextlib
import functools
import threading

import pytest
import torch
from graph_parts import entry, received, root, run_to_end

from rayrpc._autograd import whole_run
from rayrpc._autograd.edges import edge_at
from rayrpc._autograd.graph import ROOTS, WHOLE_RUN, GradGraph
from rayrpc._autograd.whole_run import WholeRun
from rayrpc.errors import RpcError

WAIT_SECONDS = 60.0


@pytest.fixture
def weight():
    return torch.rand(3, 3, requires_grad=True)


def test_a_whole_run_that_waits_can_be_aborted(weight):
    shared = weight * 2
    back, _ = received(torch.ones(3, 3))
    loss = (back + shared).sum()
    graph = GradGraph({ROOTS: root(loss), 1: entry(shared)}, retain=False)
    graph.add_gradients(ROOTS, [torch.ones(())])
    assert graph.run() == WHOLE_RUN
    with pytest.raises(RpcError, match="has ended"):
        graph.run_whole(lambda *_: graph.abort())


def test_a_whole_run_that_was_aborted_before_it_began_does_not_wait(weight):
    """Its part fails while the thread for it is started."""
    shared = weight * 2
    back, _ = received(torch.ones(3, 3))
    graph = GradGraph({ROOTS: root((back + shared).sum()), 1: entry(shared)}, retain=False)
    graph.add_gradients(ROOTS, [torch.ones(())])
    assert graph.run() == WHOLE_RUN
    graph.abort()
    with pytest.raises(RpcError, match="has ended"):
        graph.run_whole(lambda *_: None)


def test_a_local_pass_beside_a_whole_run_keeps_its_gradients(weight):
    """Its hooks are on nodes that both run, in two threads."""
    weight.register_hook(lambda gradient: gradient * 1)
    shared = weight * 2
    back, _ = received(torch.ones(3, 3))
    graph = GradGraph({ROOTS: root((back + shared).sum()), 1: entry(shared)}, retain=True)
    graph.add_gradients(ROOTS, [torch.ones(())])
    backward = functools.partial((shared * 5).sum().backward, retain_graph=True)

    def leave(node, gradients):
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join(60)
        graph.add_gradients(1, gradients)

    assert graph.run() == WHOLE_RUN
    gradients = {}
    graph.run_whole(leave).accumulate_into(gradients, threading.Lock())
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, torch.full((3, 3), 10.0))
    torch.testing.assert_close(gradients[weight], torch.full((3, 3), 4.0))


def test_the_first_node_of_a_thread_runs_before_any_wait(weight):
    """Its number is 0, which is that of the nodes that wait."""
    made = []

    def begin():
        back, node = received(torch.ones(3, 3))
        made.append((back, node))

    entries, replies, loss = {}, {}, weight * 1
    for key in range(1, 6):
        shared = weight * key
        thread = threading.Thread(target=begin)  # the receive function is its first node
        thread.start()
        thread.join(60)
        back, node = made[-1]
        assert node._sequence_nr() == 0
        entries[key] = entry(shared, key=key)
        replies[node] = lambda gradients, key=key: (key, gradients)
        loss = loss + back + shared
    graph = GradGraph({ROOTS: root(loss.sum()), **entries}, retain=False)
    graph.add_gradients(ROOTS, [torch.ones(())])
    gradients = run_to_end(graph, replies)
    torch.testing.assert_close(gradients[weight], torch.full((3, 3), 1 + 2 * 15.0))


def test_a_run_that_waits_has_no_node_in_another_thread(weight):
    """Else nodes of an accelerator's thread could make others ready, or fail, behind the wait."""
    enabled = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            enabled.append(torch._C._is_multithreading_enabled())
            return gradient

    shared = Look.apply(weight)
    back, node = received(torch.ones(3, 3))
    graph = GradGraph({ROOTS: root((back + shared).sum()), 1: entry(shared)}, retain=False)
    graph.add_gradients(ROOTS, [torch.ones(())])
    assert graph.run() == WHOLE_RUN
    run_to_end(graph, {node: lambda gradients: (1, gradients)})
    assert enabled == [False] and torch._C._is_multithreading_enabled()


def test_all_that_is_ready_has_run_before_a_wait(weight, monkeypatch):
    waits, left = [], []
    wait = whole_run.WholeRun.wait
    monkeypatch.setattr(
        whole_run.WholeRun,
        "wait",
        lambda run, key: (waits.append((key, len(left))), wait(run, key))[1],
    )
    entries, replies, value = {}, {}, weight * 1
    for key in range(1, 9):
        entries[key] = entry(value, key=key)
        back, node = received(torch.ones(3, 3))
        # the gradients come only if the pass goes on beside the wait
        replies[node] = lambda gradients, key=key: (left.append(key), (key, gradients))[1]
        value = torch.tanh(back * value) + value
    graph = GradGraph({ROOTS: root(value.sum()), **entries}, retain=False)
    graph.add_gradients(ROOTS, [torch.ones(())])
    run_to_end(graph, replies)
    assert waits == [(key, 9 - key) for key in range(8, 0, -1)]


def part_of(weight, noted=lambda key: contextlib.nullcontext(), leave=lambda *_: None):
    """Return a run that waits for the gradients of message 1, which has sent ``weight * 2``."""
    shared = weight * 2
    sent = entry(shared)
    loss = (shared * 3).sum()
    leaf = weight.view_as(weight).grad_fn.next_functions[0][0]
    nodes = [loss.grad_fn, loss.grad_fn.next_functions[0][0], shared.grad_fn]
    run = WholeRun(
        {edge_at(loss.grad_fn): torch.ones(())}, {1: sent.gates}, nodes, [], [leaf], leave, noted
    )
    return run, leaf, (loss, shared)


@pytest.mark.parametrize("is_captured", [True, False])
def test_gradients_that_come_from_another_thread_are_added_to_those_here(weight, is_captured):
    begun = threading.Event()

    @contextlib.contextmanager
    def noted(key):
        assert key == 1
        begun.set()
        yield

    run, _, _kept = part_of(weight, noted)
    arrive = threading.Thread(
        target=lambda: begun.wait(WAIT_SECONDS) and run.add_gradients(1, [torch.full((3, 3), 5.0)])
    )
    arrive.start()
    gradients = run.run(retain=False, is_captured=is_captured)
    arrive.join(WAIT_SECONDS)
    (found,) = gradients.values()
    torch.testing.assert_close(found, torch.full((3, 3), 2 * (3.0 + 5.0)))
    assert weight.grad is None


def test_gradients_that_are_there_are_not_waited_for(weight):
    def noted(key):
        raise AssertionError("it waits")

    run, leaf, _kept = part_of(weight, noted)
    run.add_gradients(1, [None])  # the tensor was not used
    gradients = run.run(retain=False, is_captured=True)
    torch.testing.assert_close(gradients[leaf], torch.full((3, 3), 6.0))


def test_an_abort_ends_a_wait_in_another_thread(weight):
    begun, ended = threading.Event(), []

    @contextlib.contextmanager
    def noted(key):
        begun.set()
        try:
            yield
        finally:
            ended.append(key)

    run, _, _kept = part_of(weight, noted)
    abort = threading.Thread(target=lambda: begun.wait(WAIT_SECONDS) and run.abort())
    abort.start()
    with pytest.raises(RpcError, match="the backward pass has ended"):
        run.run(retain=False, is_captured=True)
    abort.join(WAIT_SECONDS)
    assert ended == [1]


def test_gradients_that_have_arrived_before_an_abort_are_used(weight):
    run, leaf, _kept = part_of(weight)
    run.add_gradients(1, [torch.ones(3, 3)])
    run.abort()
    assert set(run.run(retain=False, is_captured=True)) == {leaf}


def test_a_part_without_seeds_and_messages_runs_nothing():
    run = WholeRun({}, {}, [], [], [], lambda *_: None, lambda key: contextlib.nullcontext())
    assert run.run(retain=False, is_captured=False) == {}
