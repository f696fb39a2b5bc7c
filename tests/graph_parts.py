"""Parts of graphs as messages connect them, and a worker that sends nothing."""

import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from rayrpc._autograd import explore, functions, leader, part_calls, participant
from rayrpc._autograd.graph import WHOLE_RUN, Entry, Stage
from rayrpc._runtime.noted_waits import NotedWaits
from rayrpc._runtime.started_call import StartedCall


def received(*tensors, message_id=1, sender=0):
    """Return tensors as if a message had brought them, and their receive function."""
    outputs = [tensor.detach().clone() for tensor in tensors]
    functions._thread.received[message_id] = list(outputs)
    node = functions.attach_received(message_id)
    node.sender = sender
    return *outputs, node


def entry(*tensors, key=1):
    """Return the entry of a message, with the id ``key``, that sent these tensors."""
    send = functions.SendFunction(
        [functions._make_gate(tensor, key, slot) for slot, tensor in enumerate(tensors)], to=0
    )
    edges, gates = dict(enumerate(send.next_functions)), dict(enumerate(send.gates))
    return Entry(edges, functions.is_receive, gates)


def root(tensor):
    """Return the entry of a pass from one root."""
    return Entry({0: (tensor.grad_fn, tensor.output_nr)}, functions.is_receive)


def run_stage(graph):
    """Run the next stage of a graph that has one, and return it."""
    stage = graph.run()
    assert isinstance(stage, Stage)
    return stage


def run_to_end(graph, replies):
    """Run all stages of a graph, and the whole run if it needs one; return the leaves' gradients.

    Args:
        graph: with the gradients of its roots.
        replies: what other workers do: takes the gradients of a receive function, and returns the
            id of a message and its gradients.
    """

    def leave(node, gradients):
        graph.add_gradients(*replies[node](gradients))

    while True:
        stage = graph.run()
        if stage == WHOLE_RUN:
            leaves = graph.run_whole(leave)
            break
        assert isinstance(stage, Stage)
        for node, slots in stage.exits.items():
            leave(node, [slots.get(slot) for slot in range(node.count)])
        if stage.leaves is not None:
            leaves = stage.leaves
            break
    return totals_of(Stage({}, leaves))


def totals_of(stage):
    """Return the gradients of a last stage by leaf."""
    gradients = {}
    stage.leaves.accumulate_into(gradients, threading.Lock())
    return gradients


def accumulate_node(leaf):
    """Return the node of a leaf."""
    return leaf.view_as(leaf).grad_fn.next_functions[0][0]


class FakeWorker:
    """A worker whose calls of other workers are kept, for the test to reply to.

    Args:
        monkeypatch: installs it.
        worker_id: the worker's id.
        get_reply: returns the reply to a call at once, or raises its error.
    """

    def __init__(self, monkeypatch, worker_id, get_reply=None):
        self.get_reply = get_reply
        self.info = SimpleNamespace(id=worker_id)
        self.default_timeout = 1.0
        self.passes = 0
        self.calls = []
        self.submitted = []
        self.waits = NotedWaits()
        self.agent = self.members = self  # it stands for the contexts of its agent, too
        for module in (explore, leader, participant):
            monkeypatch.setattr(module, "call_without_context", self.call)
        for module in (explore, part_calls, participant):
            monkeypatch.setattr(module, "serving_contexts", lambda: self)
        monkeypatch.setattr(leader, "start_without_context", self.start)

    def call(self, agent, worker, func, args, timeout):
        """Keep a call, and return the Future of its reply."""
        call = Call(worker, func, args, torch.futures.Future())
        self.calls.append(call)
        if self.get_reply is not None:
            try:
                call.reply.set_result(self.get_reply(call))
            except Exception as exc:
                call.reply.set_exception(exc)
        return call.reply

    def start(self, agent, worker, func, args, timeout):
        """Keep a call, and return it as one that was started."""
        reply = self.call(agent, worker, func, args, timeout)
        return StartedCall(lambda has_ended: reply.wait(), lambda: None)

    def count_pass(self, change):
        self.passes += change

    def find(self, worker):
        return SimpleNamespace(name=f"worker{worker}")

    def submit(self, task):
        self.submitted.append(task)


class Call(NamedTuple):
    worker: int
    func: Any
    args: tuple
    reply: torch.futures.Future
