"""The messages of one worker in a context, and what they depend on."""

import threading

import pytest
import torch
from graph_parts import received

from rayrpc._autograd.context_messages import MAX_DEPENDENCIES, ContextMessages
from rayrpc._autograd.functions import Recorder

ME = 0


@pytest.fixture
def messages():
    return ContextMessages(1)


@pytest.fixture
def weight():
    return torch.rand(3, 3, requires_grad=True)


def send(messages, message_id, *tensors, to=1):
    """Add a sent message."""
    recorder = Recorder(message_id, parameters=False)
    for tensor in tensors:
        recorder.record(tensor, None, ())
    assert messages.add_sent(recorder, to) == bool(tensors)


def receive(messages, message_id, sender):
    """Add a received message; return its tensor."""
    tensor, node = received(torch.ones(3), message_id=message_id)
    messages.add_received(message_id, node, sender)
    assert messages.received()[message_id] is node and node.sender == sender
    return tensor


def test_without_recorded_tensors_have_no_send_function(messages):
    send(messages, 5)
    assert messages.sent() == {}


def test_know_their_receivers(messages, weight):
    send(messages, 5, weight, to=2)
    assert messages.receiver_of(5) == 2


def test_depend_on_the_received_ones_that_their_tensors_are_made_of(messages, weight):
    one, other = receive(messages, 11, sender=1), receive(messages, 12, sender=2)
    send(messages, 5, one * 2, weight)
    send(messages, 6, one + other)
    assert messages.dependencies_of(messages.entry(5, [0])) == [(1, 11, 0)]
    assert messages.dependencies_of(messages.entry(5, [1])) == []
    both = messages.dependencies_of(messages.entry(6, [0]))
    assert set(both) == {(1, 11, 0), (2, 12, 0)}


def test_of_another_context_are_refused(messages):
    tensor = receive(ContextMessages(2), 11, sender=1)
    send(messages, 5, tensor)
    with pytest.raises(RuntimeError, match=r"no longer valid: .* in context 1 "):
        messages.entry(5, [0])


def test_dependencies_are_followed_as_far_as_they_are_known(messages, weight):
    send(messages, 4, weight)
    one = receive(messages, 11, sender=1)
    messages.add_dependencies({(1, 11, 0): [(ME, 4, 0), (2, 21, 3)]})
    assert messages.known_dependencies((2, 21, 3)) is None
    send(messages, 5, one, weight)
    assert messages.all_dependencies(ME, 5) == {
        (ME, 5, 0): [(1, 11, 0)],
        (ME, 5, 1): [],
        (1, 11, 0): [(ME, 4, 0), (2, 21, 3)],
        (ME, 4, 0): [],
    }


def test_dependencies_are_limited(messages):
    one = receive(messages, 11, sender=1)
    numbers = range(11, 11 + 2 * MAX_DEPENDENCIES)
    messages.add_dependencies({(1, each, 0): [(1, each + 1, 0)] for each in numbers})
    send(messages, 5, one)
    assert len(messages.all_dependencies(ME, 5)) == MAX_DEPENDENCIES


def test_a_tensor_has_one_entry_whichever_thread_asks_first(messages, weight):
    send(messages, 5, weight)
    entries = []
    barrier = threading.Barrier(4)

    def ask():
        barrier.wait(30)
        entries.append(messages.entry(5, [0]))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(entries) == 4 and len({id(entry) for entry in entries}) == 1
