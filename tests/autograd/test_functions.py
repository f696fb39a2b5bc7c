"""Send and receive functions, and the recorder that finds a message's tensors."""

import pickle
from typing import Any

import pytest
import torch
from graph_parts import received, root, run_stage

from rayrpc._autograd.functions import Recorder, SendFunction, attach_received, is_receive
from rayrpc._autograd.graph import ROOTS, GradGraph
from rayrpc._runtime.serialization import recording
from rayrpc._runtime.serialization.tensors import reduce_tensor


@pytest.fixture
def weight():
    return torch.rand(3, requires_grad=True)


def dumps(*tensors):
    """Pickle tensors as a message's, recorded or not."""
    recording.begin_message()
    return pickle.dumps([reduce_tensor(tensor) for tensor in tensors])


def loads(data):
    return [rebuild(*args) for rebuild, args in pickle.loads(data)]


def variable_of(node: Any) -> Any:
    """Return the leaf of a node that accumulates its gradients."""
    return node.variable


class TestRecorder:
    def test_records_only_tensors_that_require_grad(self, weight):
        with Recorder(7, parameters=False) as recorder:
            dumps(weight * 2, torch.ones(3), weight)
        edges = SendFunction(recorder.gates, to=3).next_functions
        assert [number for _, number in edges] == [0, 0]
        assert variable_of(edges[1][0]) is weight

    def test_forgets_a_first_attempt_at_the_same_message(self, weight):
        with Recorder(7, parameters=False) as recorder:
            dumps(weight)
            dumps(weight)
        assert len(recorder.gates) == 1

    def test_is_the_threads_until_its_context_ends(self, weight):
        with Recorder(7, parameters=False) as outer:
            with Recorder(8, parameters=False) as inner:
                dumps(weight)
            dumps(weight)
        dumps(weight)
        assert len(inner.gates) == len(outer.gates) == 1

    @pytest.mark.parametrize("parameters", [True, False])
    def test_records_parameters_only_if_asked(self, parameters):
        parameter = torch.nn.Parameter(torch.rand(3))
        with Recorder(7, parameters) as recorder:
            recording.reduce_parameter(parameter)
        assert len(recorder.gates) == parameters

    def test_has_a_gate_to_a_sparse_tensor(self):
        sparse = torch.eye(3).to_sparse().requires_grad_()
        with Recorder(7, parameters=False) as recorder:
            dumps(sparse)
        assert variable_of(SendFunction(recorder.gates, to=3).next_functions[0][0]) is sparse


class TestMessages:
    def test_recorded_tensors_become_outputs_of_a_receive_function(self, weight):
        with Recorder(7, parameters=False):
            data = dumps(weight * 2, torch.ones(3), weight)
        first, plain, second = loads(data)
        node = attach_received(7)
        assert (node.message_id, node.count) == (7, 2) and is_receive(node)
        assert first.grad_fn is node and second.grad_fn is node
        assert (first.output_nr, second.output_nr) == (0, 1)
        assert not plain.requires_grad and torch.equal(second, weight)

    def test_they_do_even_without_grad_mode(self, weight):
        with Recorder(7, parameters=False):
            data = dumps(weight)
        with torch.no_grad():
            (tensor,) = loads(data)
            assert attach_received(7) is tensor.grad_fn and tensor.requires_grad

    def test_a_message_without_recorded_tensors_has_no_receive_function(self):
        loads(dumps(torch.ones(3)))
        assert attach_received(7) is None

    def test_tensors_of_a_message_that_was_not_decoded_are_dropped(self, weight):
        with Recorder(6, parameters=False):
            loads(dumps(weight))
        assert attach_received(7) is None and attach_received(6) is None

    def test_without_a_recorder_a_tensor_is_sent_as_a_leaf(self, weight):
        (tensor,) = loads(dumps(weight * 2))
        assert tensor.requires_grad and tensor.is_leaf

    def test_send_functions_look_like_nodes(self, weight):
        with Recorder(7, parameters=False) as recorder:
            dumps(weight)
        node = SendFunction(recorder.gates, to=3)
        assert node.name() == "torch::distributed::autograd::SendRpcBackward" and node.to == 3
        assert variable_of(node.next_functions[0][0]) is weight


def test_received_tensors_can_be_changed_in_place():
    one, node = received(torch.ones(3))
    one.mul_(4)
    graph = GradGraph({ROOTS: root(one.sum())}, retain=False)
    graph.add_gradients(ROOTS, [torch.ones(())])
    torch.testing.assert_close(run_stage(graph).exits[node][0], torch.full((3,), 4.0))


def test_a_local_backward_pass_says_what_to_run_instead():
    one, _ = received(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"run torch\.distributed\.autograd\.backward"):
        one.sum().backward()
