"""Objects that are not there yet, and which values are sent in place of their references."""

import asyncio

import pytest
import torch

import rayrpc as rpc
from rayrpc._transports.ray import objects
from rayrpc._transports.ray.objects import PendingObjects


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
