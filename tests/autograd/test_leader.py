"""The leader's part of a pass: which part it begins when, its batches of calls, and the end."""

import threading
from typing import Any

import pytest
import torch
from graph_parts import FakeWorker, entry, received, root

from rayrpc._autograd.context import DistAutogradContext
from rayrpc._autograd.graph import ROOTS
from rayrpc._autograd.leader import DIRECT, QUEUEING, Leader
from rayrpc._autograd.part_calls import ENDED, NEEDS_GRADIENTS, PENDING, abort_part, propagate
from rayrpc._autograd.participant import begin_part
from rayrpc._autograd.passes import Gradients
from rayrpc.errors import RpcError, WorkerDiedError

ME, ALICE, BOB = 0, 1, 2
ROOT_GRADIENTS: Gradients = {ROOTS: [torch.ones(())]}


@pytest.fixture
def worker(monkeypatch):
    return FakeWorker(monkeypatch, ME)


@pytest.fixture
def context(worker):
    return DistAutogradContext(1, worker)


@pytest.fixture
def weight():
    return torch.rand(3, requires_grad=True)


def from_alice(message_id):
    return received(torch.ones(3), message_id=message_id, sender=ALICE)[0]


def test_a_pass_without_messages_makes_no_call(worker, context, weight):
    leader = Leader(context, 5, {ROOTS: root((weight * 2).sum())}, False, {})
    leader.run(ROOT_GRADIENTS)
    assert worker.calls == [] and worker.passes == 0 and not context.passes
    assert context.gradients()[weight].tolist() == [2.0] * 3


def test_a_part_begins_with_its_first_gradients_from_here(worker, context):
    worker.get_reply = lambda call: ({}, ENDED)
    loss = (from_alice(11) * 3).sum()
    Leader(context, 5, {ROOTS: root(loss)}, True, {ALICE: {11: {0}}}).run(ROOT_GRADIENTS)
    (call,) = worker.calls
    context_id, pass_id, messages, retain, led_by, gradients = call.args
    assert (call.worker, call.func) == (ALICE, begin_part)
    assert (context_id, pass_id, messages, retain, led_by) == (1, 5, {11: [0]}, True, ME)
    assert gradients[11][0].tolist() == [3.0] * 3


def test_a_part_with_gradients_from_others_begins_at_once(worker, context, weight):
    """Alice's message 12 gets gradients from bob, perhaps before those of 11 come from here."""
    replies = {
        (BOB, begin_part): ({5: [torch.ones(3)]}, ENDED),
        (ALICE, begin_part): ({}, PENDING),
        (ALICE, propagate): ({}, ENDED),
    }
    worker.get_reply = lambda call: replies[call.worker, call.func]
    y, _ = received(torch.ones(3), message_id=21, sender=BOB)
    entries = {ROOTS: root(y.sum()), 5: entry(from_alice(11) * weight)}
    leader = Leader(context, 5, entries, False, {BOB: {21: {0}}, ALICE: {11: {0}, 12: {0}}})
    leader.run(ROOT_GRADIENTS)
    assert {(call.worker, call.func) for call in worker.calls} == set(replies)
    (begun,) = [call for call in worker.calls if (call.worker, call.func) == (ALICE, begin_part)]
    assert begun.args[-1] == {} and len(worker.calls) == 3
    assert context.gradients()[weight].tolist() == [1.0] * 3


def test_a_part_that_has_said_so_needs_the_next_gradients(worker, context, weight):
    replies = iter([({5: [torch.ones(3)]}, NEEDS_GRADIENTS), ({}, ENDED)])
    worker.get_reply = lambda call: next(replies)
    entries = {ROOTS: root(from_alice(11).sum()), 5: entry(from_alice(12) * weight)}
    Leader(context, 5, entries, False, {ALICE: {11: {0}, 12: {0}}}).run(ROOT_GRADIENTS)
    _, call = worker.calls
    *_, source, is_needed = call.args
    assert (call.func, source, is_needed) == (propagate, ME, True)


def test_the_pass_waits_for_every_part(worker, context):
    y, _ = received(torch.ones(3), message_id=21, sender=BOB)
    loss = (from_alice(11) + y).sum()
    leader = Leader(context, 5, {ROOTS: root(loss)}, False, {ALICE: {11: {0}}, BOB: {21: {0}}})
    leader.begin(ROOT_GRADIENTS)
    assert len(leader._take_batch()) == 2
    leader._process_reply(ALICE, {}, ENDED)
    assert not leader.future.done()
    leader._process_reply(BOB, {}, PENDING)
    assert not leader.future.done()
    leader._process_reply(BOB, {}, ENDED)
    assert leader.future.done()


def test_a_late_reply_does_not_reopen_a_part(worker, context):
    """Replies may be handled by several threads, out of order."""
    loss = from_alice(11).sum()
    leader = Leader(context, 5, {ROOTS: root(loss)}, False, {ALICE: {11: {0}}})
    leader.begin(ROOT_GRADIENTS)
    leader._process_reply(ALICE, {}, ENDED)
    leader._process_reply(ALICE, {}, NEEDS_GRADIENTS)
    assert leader._status == {ALICE: ENDED} and leader.future.done()


class TestCalls:
    def leader(self, context):
        return Leader(context, 5, {ROOTS: root(from_alice(11).sum())}, False, {ALICE: {11: {0}}})

    def test_of_the_waiting_thread_are_queued_until_it_waits_no_longer(self, worker, context):
        leader = self.leader(context)
        leader._call(ALICE, begin_part, ())
        assert worker.calls == [] and leader._calling == QUEUEING
        assert leader._take_batch() == [(ALICE, begin_part, ())]
        assert leader._take_batch() == [] and leader._calling == DIRECT
        leader._call(ALICE, begin_part, ())
        assert len(worker.calls) == 1

    def test_of_other_threads_are_sent_at_once(self, worker, context):
        leader = self.leader(context)
        thread = threading.Thread(target=leader._call, args=(ALICE, begin_part, ()))
        thread.start()
        thread.join()
        assert len(worker.calls) == 1

    def test_a_wait_that_ends_leads_back_to_queueing(self, worker, context):
        leader = self.leader(context)
        states = []
        leader._await_reply(lambda has_ended: states.append((leader._calling, has_ended())))
        assert states == [(DIRECT, False)] and leader._calling == QUEUEING

    def test_of_a_callback_in_the_waiting_thread_are_sent_at_once(self, worker, context, weight):
        """It reads the connection while it waits, and runs the callbacks of other replies."""
        y, _ = received(torch.ones(3), message_id=21, sender=BOB)
        entries = {
            ROOTS: root((from_alice(11) + y).sum()),
            5: entry(from_alice(12) * weight, key=5),
        }
        others = {ALICE: {11: {0}, 12: {0}}, BOB: {21: {0}}}
        leader = Leader(context, 5, entries, False, others)
        leader.begin(ROOT_GRADIENTS)
        first, _ = leader._take_batch()
        leader._status[ALICE] = NEEDS_GRADIENTS

        def wait(has_ended):
            # the reply of one while the thread waits for the other's
            leader._on_callback(first[0], lambda: ({5: [torch.ones(3)]}, PENDING))
            return [call.func for call in worker.calls]

        sent: Any = leader._await_reply(wait)
        assert sent == [propagate]

    def test_of_a_callback_between_batches_are_sent_at_once(self, worker, context, weight):
        """A function of the program may wait for a call of its own."""
        entries = {ROOTS: root(from_alice(11).sum()), 5: entry(from_alice(12) * weight, key=5)}
        leader = Leader(context, 5, entries, False, {ALICE: {11: {0}, 12: {0}}})
        leader.begin(ROOT_GRADIENTS)
        leader._take_batch()
        assert leader._calling == QUEUEING
        leader._on_callback(ALICE, lambda: ({5: [torch.ones(3)]}, PENDING))
        assert len(worker.calls) == 1 and leader._calling == QUEUEING


class TestErrors:
    def run(self, worker, context, get_reply):
        worker.get_reply = get_reply
        y, _ = received(torch.ones(3), message_id=21, sender=BOB)
        entries = {ROOTS: root(from_alice(11).sum()), 5: entry(y)}
        leader = Leader(context, 5, entries, False, {ALICE: {11: {0}}, BOB: {21: {0}}})
        leader.run(ROOT_GRADIENTS)

    def test_abort_the_parts_that_were_begun(self, worker, context):
        def fail(call):
            raise RpcError("Error on Node 1: as expected")

        with pytest.raises(RuntimeError, match="as expected"):
            self.run(worker, context, fail)
        worker.get_reply = None
        (abort_others,) = worker.submitted
        abort_others()
        *_, call = worker.calls
        assert (call.worker, call.func, call.args[:2]) == (ALICE, abort_part, (1, 5))
        assert [each.worker for each in worker.calls] == [ALICE, ALICE]
        assert worker.passes == 0 and not context.passes

    def test_a_death_ends_the_pass_if_the_worker_takes_part(self, worker, context):
        leader = Leader(context, 5, {ROOTS: root(from_alice(11).sum())}, False, {ALICE: {11: {0}}})
        leader.on_peer_lost(BOB, WorkerDiedError("bob"))
        assert not leader.future.done()
        leader.on_peer_lost(ALICE, WorkerDiedError("alice"))
        with pytest.raises(WorkerDiedError, match="alice"):
            leader.future.wait()
