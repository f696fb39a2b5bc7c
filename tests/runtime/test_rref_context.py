"""The context of RRefs: what a released RRef is to those that still name it."""

import contextlib
import gc

import pytest
from conftest import eventually
from interrupting import strikes
from memory_workers import memory_group

from rayrpc._protocol.ids import IdSource
from rayrpc._protocol.messages import Fork
from rayrpc._runtime.rrefs import collected, context, handle
from rayrpc._runtime.rrefs.context import RRefContext
from rayrpc.errors import CallError

OWNER, CREATOR, HOLDER = 0, 1, 2


@pytest.fixture
def owner():
    rrefs = RRefContext(OWNER, IdSource(OWNER), lambda *ids: ids, lambda worker: None)
    with contextlib.closing(rrefs):
        yield rrefs


@pytest.mark.parametrize("by", ["lookup", "borrow", "receive"])
def test_a_released_rref_is_refused_by_name(owner, by):
    ids = IdSource(CREATOR)
    rref_id, fork_id = ids.new(), ids.new()
    owner.own(rref_id, fork_id, HOLDER)
    assert owner.lookup(rref_id)
    owner.on_peer_lost(HOLDER)
    with pytest.raises(CallError, match=r"local_id=0\) was released by its owner: the worker"):
        if by == "receive":
            owner.receive(Fork(rref_id, ids.new(), OWNER, HOLDER))
        else:
            getattr(owner, by)(rref_id)


def test_a_fork_of_a_released_rref_is_discarded(owner):
    ids = IdSource(CREATOR)
    rref_id, fork_id = ids.new(), ids.new()
    owner.own(rref_id, fork_id, CREATOR)
    owner.on_peer_lost(CREATOR)
    owner.discard(Fork(rref_id, ids.new(), OWNER, CREATOR))


class TestCollectedHandles:
    @pytest.fixture
    def workers(self):
        with memory_group() as start:
            yield start("a"), start("b")

    def test_no_interrupt_keeps_the_fork(self, workers):
        a, b = workers
        files = [module.__file__ for module in (collected, context, handle)]
        for strike in strikes(files):
            handles = [a.remote(b, abs, -1)]
            strike(handles.clear)
            assert eventually(a.is_empty), f"after an interrupt at point {strike.number}"

    def test_an_error_in_the_protocol_keeps_no_other_fork(self, workers, monkeypatch, caplog):
        a, b = workers
        handles = [a.remote(b, abs, -1)]

        def fail(fork):
            raise KeyError(fork)

        monkeypatch.setattr(a.agent.rrefs._table, "unshare", fail)
        ids = IdSource(1)
        a.agent.rrefs.release_later(Fork(ids.new(), ids.new(), OWNER, CREATOR))
        handles.clear()
        assert eventually(a.is_empty)
        assert "may leak some" in caplog.text

    def test_one_in_a_cycle_is_noticed_too(self, workers):
        a, b = workers
        handle = a.remote(b, abs, -1)
        handle.itself = handle
        del handle
        assert not a.is_empty()
        gc.collect()
        assert eventually(a.is_empty) and not a.agent.rrefs._handles
