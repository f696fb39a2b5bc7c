"""Objects that are not there yet, and which values are sent in place of their references."""

import asyncio
import functools
import queue
import threading
import types

import pytest
import torch

import rayrpc as rpc
from rayrpc._concurrency.outcome import Value
from rayrpc._protocol.messages import Payload
from rayrpc._transports.ray import objects, ray_api
from rayrpc._transports.ray.objects import Codec, PendingObjects, RayObjects
from rayrpc.errors import CallError


def pending():
    """Return the code of the actor, outside of Ray."""
    made = object.__new__(PendingObjects)
    made._worker, made._objects = "alice", {}
    return made


@pytest.mark.parametrize("waits_first", [True, False])
def test_an_object_may_come_before_its_reader_or_after(waits_first):
    async def run():
        made = pending()
        parts = ["module", "name", b"", []]
        if waits_first:
            reader = asyncio.ensure_future(made.wait(1))
            await asyncio.sleep(0)
            await made.complete(1, parts)
            stored = await asyncio.wait_for(reader, 60)
        else:
            await made.complete(1, parts)
            stored = await asyncio.wait_for(made.wait(1), 60)
        assert stored.parts is parts
        assert not made._objects

    asyncio.run(run())


class Ref:
    """A reference whose object is there when the test says so."""

    def _on_completed(self, callback):
        self.complete = callback


def encoded(outcome):
    return Payload(str(outcome).encode(), [])


@pytest.fixture
def store():
    made = RayObjects("alice", Codec(encoded, "module", "name"))
    yield made
    made.close()


def test_each_callback_is_called_once_whenever_its_worker_shuts_down(store, quick_switches):
    outcomes = queue.SimpleQueue()
    refs = [Ref() for _ in range(300)]
    for number, ref in enumerate(refs[:200]):
        store.when_ready(ref, functools.partial(_note, outcomes, number))

    def wait_for_more():
        for number, ref in enumerate(refs[200:], 200):
            store.when_ready(ref, functools.partial(_note, outcomes, number))

    def complete():
        for ref in refs[:200]:
            ref.complete(1)

    threads = [threading.Thread(target=each) for each in (wait_for_more, complete, store.close)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    called = dict(outcomes.get(timeout=60) for _ in refs)
    assert len(called) == len(refs) and outcomes.empty()
    for outcome in called.values():
        assert outcome == Value(1) or "RPC was shut down on worker 'alice'" in str(outcome.error)


def _note(outcomes, number, outcome):
    outcomes.put((number, outcome))


def test_an_object_that_is_promised_while_its_worker_shuts_down_is_an_error(store, monkeypatch):
    actor = types.SimpleNamespace(wait="wait", complete="complete")
    sent = queue.SimpleQueue()

    def submit(method, *args):
        if method == "wait":
            store.close()
        else:
            sent.put(args)
        return method

    monkeypatch.setattr(store, "_start_actor", lambda: actor)
    monkeypatch.setattr(ray_api, "submit", submit)
    ref, complete = store.promise()
    assert ref == "wait"
    _, (_, _, data, _) = sent.get(timeout=60)
    assert b"RPC was shut down on worker 'alice'" in data
    complete(Value(1))  # it comes too late
    with pytest.raises(queue.Empty):
        sent.get(timeout=0.1)
    with pytest.raises(CallError, match="RPC was shut down on worker 'alice'"):
        store.promise()


def test_values_at_hand_are_sent_and_others_are_not(workers, monkeypatch):
    import ray

    store = rpc._get_current_rpc_agent().objects
    small, large = ray.put(torch.ones(3)), ray.put(torch.ones(1000))
    found = store.at_hand(small)
    assert found is not None and found.value.tolist() == [1, 1, 1]
    monkeypatch.setattr(objects, "AT_HAND_BYTES", 2000)
    assert store.at_hand(small) is not None and store.at_hand(large) is None
    monkeypatch.setattr(store, "_locate", None)  # an old Ray
    assert store.at_hand(small) is None

    class Unreadable:
        def __reduce__(self):
            return int, ("no number",)

    monkeypatch.undo()
    assert store.at_hand(ray.put(Unreadable())) is None
