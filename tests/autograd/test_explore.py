"""Exploration: the messages that take part in a pass, asked for where they are not known."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from graph_parts import FakeWorker, received, root

from rayrpc._autograd import explore
from rayrpc._autograd.context import DistAutogradContext
from rayrpc._autograd.functions import Recorder


@pytest.fixture
def worker(monkeypatch):
    return FakeWorker(monkeypatch, 0)


@pytest.fixture
def context(worker):
    return DistAutogradContext(1, worker)


def receive(context, message_id, sender):
    tensor, node = received(torch.ones(3), message_id=message_id, sender=sender)
    context.messages.add_received(message_id, node, sender)
    return tensor


def entry_of(context, loss):
    entry = root(loss)
    assert all(context.messages.received()[node.message_id] is node for node in entry.exits)
    return entry


def test_roots_without_messages_depend_on_none(context, worker):
    loss = torch.rand(3, requires_grad=True).sum()
    assert explore.explore(context, entry_of(context, loss)) == {} and worker.calls == []


def test_known_dependencies_are_not_asked_for(context, worker):
    y = receive(context, 11, sender=1)
    context.messages.add_dependencies(
        {
            (1, 11, 0): [(2, 21, 0), (2, 22, 1)],
            (2, 21, 0): [],
            (2, 22, 1): [(1, 11, 0), (2, 21, 2)],
            (2, 21, 2): [],
        }
    )
    found = explore.explore(context, entry_of(context, y.sum()))
    assert found == {1: {11: {0}}, 2: {21: {0, 2}, 22: {1}}} and worker.calls == []


def test_senders_are_asked_for_the_rest(context, worker, monkeypatch):
    y = receive(context, 11, sender=1)
    replies: dict[Any, Any] = {(1, 11, 0): [(2, 21, 1)], (2, 21, 1): []}

    def call(agent, to, func, args, timeout):
        context_id, tensors = args
        assert context_id == context.id
        worker.calls.append(to)
        found = [key for number, slot in tensors for key in replies[to, number, slot]]
        return SimpleNamespace(wait=lambda: found)

    monkeypatch.setattr(explore, "call_without_context", call)
    found = explore.explore(context, entry_of(context, y.sum()))
    assert found == {1: {11: {0}}, 2: {21: {1}}} and worker.calls == [1, 2]


def test_messages_of_this_worker_are_followed_here(context, worker):
    weight = torch.rand(3, requires_grad=True)
    before = receive(context, 10, sender=1)
    recorder = Recorder(5, parameters=False)
    recorder.record(weight * before, None, ())
    context.messages.add_sent(recorder, 1)
    y = receive(context, 11, sender=1)
    context.messages.add_dependencies({(1, 11, 0): [(0, 5, 0)], (1, 10, 0): []})
    found = explore.explore(context, entry_of(context, y.sum()))
    assert found == {1: {10: {0}, 11: {0}}, 0: {5: {0}}} and worker.calls == []
