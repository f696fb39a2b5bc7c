"""A worker's part of a pass: its states, and what it replies to the leader."""

from types import SimpleNamespace

import pytest
import torch
from conftest import keeps_variables
from graph_parts import FakeWorker, entry, received

from rayrpc._autograd.context import DistAutogradContext
from rayrpc._autograd.part_calls import ENDED, NEEDS_GRADIENTS, PENDING, abort_part
from rayrpc._autograd.participant import Participant
from rayrpc.errors import RpcError, WorkerDiedError

LEADER, ME, OTHER = 0, 1, 3


@pytest.fixture
def worker(monkeypatch):
    return FakeWorker(monkeypatch, ME)


@pytest.fixture
def context(worker):
    return DistAutogradContext(1, worker)


@pytest.fixture
def weight():
    return torch.rand(3, 3, requires_grad=True)


def make(context, **sent):
    """Return a part of messages "m10" and so on: an entry, and the worker that it was sent to."""
    messages = {int(name[1:]): value for name, value in sent.items()}
    context.messages = SimpleNamespace(receiver_of=lambda number: messages[number][1])
    entries = {number: each for number, (each, _) in messages.items()}
    return Participant(context, 5, entries, False, leader=LEADER)


def ones():
    return [torch.ones(3, 3)]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("as expected")


def test_a_part_with_all_gradients_ends_at_once(worker, context, weight):
    x, _ = received(torch.ones(3, 3), sender=LEADER)
    part = make(context, m10=(entry(x * weight), LEADER))
    reply = part.report_end(part.begin({10: ones()}, LEADER))
    gradients, status = reply.value()
    assert status == ENDED and worker.calls == [] and worker.passes == 0
    torch.testing.assert_close(gradients[1][0], weight.detach())
    torch.testing.assert_close(context.gradients()[weight], torch.ones(3, 3))


def test_a_part_that_needs_only_the_leader_says_so_each_time(worker, context, weight):
    part = make(context, m10=(entry(weight), LEADER), m11=(entry(weight), LEADER))
    assert part.report_end(part.begin({}, LEADER)).value() == ({}, NEEDS_GRADIENTS)
    assert part.process_request({10: ones()}, LEADER).value() == ({}, NEEDS_GRADIENTS)
    assert part.process_request({11: ones()}, LEADER).value() == ({}, ENDED)
    assert worker.calls == [] and not context.passes


def test_a_part_that_needs_others_reports_its_end_when_it_comes(worker, context, weight):
    part = make(context, m10=(entry(weight), OTHER))
    reply = part.report_end(part.begin({}, LEADER))
    assert reply is part.future and not reply.done()
    assert part.process_request({10: ones()}, OTHER).value() == ({}, PENDING)
    assert reply.value() == ({}, ENDED)


def test_gradients_for_other_workers_are_sent_to_them(worker, context):
    x, _ = received(torch.ones(3, 3), message_id=21, sender=OTHER)
    part = make(context, m10=(entry(x * 2), LEADER))
    assert part.report_end(part.begin({10: ones()}, LEADER)).value() == ({}, ENDED)
    (call,) = worker.calls
    context_id, pass_id, gradients, source, is_needed = call.args
    assert (call.worker, context_id, pass_id, source, is_needed) == (OTHER, 1, 5, ME, False)
    assert gradients[21][0].tolist() == [[2.0] * 3] * 3


def test_gradients_that_came_before_the_start_are_used(worker, context, weight):
    part = make(context, m10=(entry(weight), OTHER))
    assert context.passes.find(5, {10: ones()}) is None
    assert part.report_end(part.begin({}, LEADER)).value() == ({}, ENDED)


def test_gradients_of_a_reply_are_processed(worker, context, weight):
    x, _ = received(torch.ones(3, 3), message_id=21, sender=OTHER)
    part = make(context, m10=(entry(x * 2), LEADER), m11=(entry(weight), OTHER))
    reply = part.report_end(part.begin({10: ones()}, LEADER))
    assert not reply.done()
    worker.calls[0].reply.set_result(({11: ones()}, PENDING))
    assert reply.value() == ({}, ENDED)


def test_a_part_that_has_sent_to_the_leader_reports_its_end_later(worker, context, weight):
    """Else it could end by the leader's reply, and the leader would not learn of it."""
    x, _ = received(torch.ones(3, 3), sender=LEADER)
    part = make(context, m10=(entry(x * 2), OTHER), m11=(entry(weight), LEADER))
    assert part.begin({}) == {}
    assert part.process_gradients({10: ones()}, source=OTHER) == {}
    (call,) = worker.calls
    assert call.worker == LEADER
    assert part.report_end({}) is part.future and not part.future.done()
    call.reply.set_result(({11: ones()}, PENDING))
    assert part.future.value() == ({}, ENDED)
    torch.testing.assert_close(context.gradients()[weight], torch.ones(3, 3))


class TestErrors:
    def failing(self, context, weight, to=LEADER):
        return make(context, m10=(entry(Fails.apply(weight)), to))

    def test_are_reported_by_an_open_reply(self, worker, context, weight):
        part = self.failing(context, weight)
        reply = part.report_end(part.begin({10: ones()}, LEADER))
        with pytest.raises(RpcError, match="Error on Node 1: as expected"):
            reply.value()
        assert worker.calls == [] and worker.passes == 0 and not context.passes
        assert not keeps_variables(reply.value)

    def test_are_sent_to_the_leader_if_no_reply_is_open(self, worker, context, weight):
        part = self.failing(context, weight)
        assert part.report_end(part.begin({}, LEADER)).value() == ({}, NEEDS_GRADIENTS)
        part.process_request({10: ones()}, OTHER)
        (call,) = worker.calls
        assert (call.worker, call.func) == (LEADER, abort_part)
        assert "as expected" in str(call.args[2])

    def test_of_calls_end_the_part(self, worker, context):
        x, _ = received(torch.ones(3, 3), message_id=21, sender=OTHER)
        part = make(context, m10=(entry(x * 2), LEADER), m11=(entry(x * 3), OTHER))
        reply = part.report_end(part.begin({}, LEADER))
        part._send_gradients(OTHER, {})
        worker.calls[0].reply.set_exception(WorkerDiedError("other"))
        with pytest.raises(WorkerDiedError):
            reply.value()

    def test_abort_a_part_that_has_yet_to_begin(self, worker, context, weight, monkeypatch):
        monkeypatch.setattr(worker, "get", lambda context_id: context, raising=False)
        abort_part(1, 5, RpcError("failed elsewhere"))
        part = make(context, m10=(entry(weight), LEADER))
        reply = part.report_end(part.begin({}, LEADER))
        with pytest.raises(RpcError, match="failed elsewhere"):
            reply.value()
        assert not context.passes and worker.passes == 0
