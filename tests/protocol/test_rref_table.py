"""The RRef protocol: every arrow of its drawing, then random sequences of all events."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from rayrpc._protocol.ids import GloballyUniqueId, IdSource
from rayrpc._protocol.messages import ChildAccept, Control, Fork, ForkAck, ForkRequest, UserDelete
from rayrpc._protocol.rref_entries import Confirmed, Released, UserState
from rayrpc._protocol.rref_table import RRefTable
from rayrpc.errors import CallError

OWNER, A, C = 0, 1, 2


class Cell:
    """A value of an RRef; the table does not look into it."""

    filled = False


def table(me):
    return RRefTable(me, IdSource(me).new, Cell)


@pytest.fixture
def owner():
    return table(OWNER)


@pytest.fixture
def a():
    return table(A)


@pytest.fixture
def c():
    return table(C)


def send_pending(sender, receiver):
    """Deliver the pending messages of ``sender``; return their types and effects."""
    ack, messages = sender.take_pending(receiver.me)
    return [type(m) for m in messages], receiver.on_messages(sender.me, ack, messages)


def settle(*tables):
    """Deliver messages until none is pending."""
    for _ in range(10):
        for sender, receiver in itertools.permutations(tables, 2):
            send_pending(sender, receiver)


def remote(user, owner):
    """Run a whole ``remote`` call; return the RRef's id and the user's fork of it."""
    rref_id, fork_id = user._new_id(), user._new_id()
    user.use(rref_id, fork_id, owner.me)
    owner.own(rref_id, fork_id, user.me).filled = True
    user.created(fork_id)
    return rref_id, fork_id


def is_empty(*tables):
    return all(not (t.owned or t.used or t._children) and t.is_settled() for t in tables)


# The life of the first fork


def test_the_first_fork_is_pending_until_the_owner_replies(owner, a):
    rref_id, fork_id = a._new_id(), a._new_id()
    a.use(rref_id, fork_id, OWNER)
    assert not a.is_confirmed(fork_id)
    owner.own(rref_id, fork_id, A)
    assert a.created(fork_id) == [Confirmed(fork_id)]
    assert a.is_confirmed(fork_id)


def test_dropping_the_only_handle_deletes_the_value_at_its_owner(owner, a):
    rref_id, fork_id = remote(a, owner)
    cell = owner.lookup(rref_id)
    a.drop(fork_id)
    assert send_pending(a, owner) == ([UserDelete], [Released(rref_id, cell)])
    settle(a, owner)
    assert is_empty(a, owner)


def test_a_pending_fork_is_not_deleted_before_it_is_confirmed(owner, a):
    rref_id, fork_id = a._new_id(), a._new_id()
    a.use(rref_id, fork_id, OWNER)
    a.drop(fork_id)
    assert send_pending(a, owner)[0] == []
    owner.own(rref_id, fork_id, A)
    a.created(fork_id)
    assert send_pending(a, owner)[0] == [UserDelete]


def test_a_remote_on_oneself_keeps_the_value_until_its_release(owner):
    rref_id, fork_id = owner._new_id(), owner._new_id()
    cell = owner.own(rref_id, fork_id, OWNER)
    assert owner.own(rref_id, fork_id, OWNER) is cell  # when the call arrives
    assert owner.release(rref_id, fork_id) == [Released(rref_id, cell)]
    assert is_empty(owner)


# A shares with C


def test_a_child_sends_a_fork_request_and_then_notifies_its_parent(owner, a, c):
    rref_id, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    assert fork == Fork(rref_id, fork.fork_id, OWNER, A)
    assert c.receive(fork) == (None, [])
    assert not c.is_confirmed(fork.fork_id)
    assert send_pending(c, owner) == ([ForkRequest], [])
    assert owner.owned[rref_id].forks == {fork_id: A, fork.fork_id: C}
    assert send_pending(owner, c) == ([ForkAck], [Confirmed(fork.fork_id)])
    assert c.is_confirmed(fork.fork_id)
    assert send_pending(c, a) == ([ChildAccept], [])
    assert not a._children


def test_a_parent_keeps_its_fork_until_the_child_is_counted(owner, a, c):
    rref_id, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    a.drop(fork_id)
    c.receive(fork)
    for sender, receiver in [(c, owner), (owner, c)]:
        assert send_pending(a, owner)[0] == []
        send_pending(sender, receiver)
    send_pending(c, a)
    assert send_pending(a, owner)[0] == [UserDelete]
    assert list(owner.owned[rref_id].forks) == [fork.fork_id]


def test_a_child_that_was_dropped_at_once_is_counted_before_it_is_deleted(owner, a, c):
    _, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    a.drop(fork_id)
    c.receive(fork)
    c.drop(fork.fork_id)
    assert send_pending(c, owner)[0] == [ForkRequest]
    settle(owner, a, c)
    assert is_empty(owner, a, c)


def test_a_worker_may_share_with_itself(owner, a):
    _, fork_id = remote(a, owner)
    fork = a.share(fork_id, A)
    a.receive(fork)
    settle(a, owner)
    assert send_pending(a, a)[0] == [ChildAccept]
    a.drop(fork_id)
    a.drop(fork.fork_id)
    settle(a, owner)
    send_pending(a, a)
    assert is_empty(owner, a)


# A sends to the owner


def test_a_fork_sent_to_the_owner_becomes_its_cell_and_is_accepted(owner, a):
    rref_id, fork_id = remote(a, owner)
    fork = a.share(fork_id, OWNER)
    a.drop(fork_id)
    assert send_pending(a, owner)[0] == []
    cell, effects = owner.receive(fork)
    assert (cell, effects) == (owner.lookup(rref_id), [])
    assert send_pending(owner, a)[0] == [ChildAccept]
    assert send_pending(a, owner)[0] == [UserDelete]
    settle(a, owner)
    assert is_empty(owner, a)


# The owner shares with C


def test_a_fork_of_the_owner_is_counted_before_it_is_sent_and_starts_confirmed(owner, c):
    rref_id, cell = owner._new_id(), Cell()
    fork = owner.share_owned(rref_id, cell, C)
    assert owner.owned[rref_id].forks == {fork.fork_id: C}
    assert c.receive(fork) == (None, [])
    assert c.is_confirmed(fork.fork_id)
    assert send_pending(c, owner)[0] == []
    c.drop(fork.fork_id)
    assert send_pending(c, owner) == ([UserDelete], [Released(rref_id, cell)])


def test_a_fork_that_the_owner_sends_to_itself_is_released_when_it_arrives(owner):
    rref_id, cell = owner._new_id(), Cell()
    fork = owner.share_owned(rref_id, cell, OWNER)
    assert owner.receive(fork) == (cell, [Released(rref_id, cell)])
    assert is_empty(owner)


def test_a_value_can_be_shared_again_after_its_last_fork_was_deleted(owner, c):
    rref_id, cell = owner._new_id(), Cell()
    for _ in range(2):
        fork = owner.share_owned(rref_id, cell, C)
        c.receive(fork)
        c.drop(fork.fork_id)
        settle(owner, c)
        assert is_empty(owner, c)


# Forks that were never sent


def test_a_used_fork_that_was_not_sent_holds_nothing(owner, a):
    _, fork_id = remote(a, owner)
    assert a.unshare(a.share(fork_id, C)) == []
    a.drop(fork_id)
    settle(a, owner)
    assert is_empty(owner, a)


def test_an_owned_fork_that_was_not_sent_holds_nothing(owner):
    rref_id, cell = owner._new_id(), Cell()
    assert owner.unshare(owner.share_owned(rref_id, cell, C)) == [Released(rref_id, cell)]
    assert is_empty(owner)


def test_an_interrupted_remote_call_leaves_nothing_whenever_it_arrives(owner, a):
    for arrives_first in (True, False):
        rref_id, fork_id = a._new_id(), a._new_id()
        a.use(rref_id, fork_id, OWNER)
        if arrives_first:
            owner.own(rref_id, fork_id, A)
        assert a.cancel(rref_id, fork_id) == [Confirmed(fork_id)]
        assert not a.used
        settle(a, owner)
        if not arrives_first:
            owner.own(rref_id, fork_id, A)
        assert not owner.owned and not owner._cancelled


def test_an_interrupted_remote_call_to_oneself_leaves_nothing_whenever_it_runs(owner):
    for runs_first in (True, False):
        rref_id, fork_id = owner._new_id(), owner._new_id()
        cell = owner.own(rref_id, fork_id, OWNER)
        if runs_first:
            owner.own(rref_id, fork_id, OWNER)
        assert owner.cancel(rref_id, fork_id) == [Released(rref_id, cell)]
        if not runs_first:
            owner.own(rref_id, fork_id, OWNER)
        assert not owner.owned


def test_a_fetch_that_waits_for_an_interrupted_remote_call_is_released(owner, a):
    rref_id, fork_id = a._new_id(), a._new_id()
    a.use(rref_id, fork_id, OWNER)
    owner.lookup(rref_id)
    a.cancel(rref_id, fork_id)
    settle(a, owner)
    owner.own(rref_id, fork_id, A)
    assert not owner.owned


@pytest.mark.parametrize("first", [A, C])
def test_an_rref_whose_remote_call_never_arrives_is_deleted_with_its_forks(owner, a, c, first):
    rref_id, fork_id = a._new_id(), a._new_id()
    a.use(rref_id, fork_id, OWNER)
    fork = a.share(fork_id, C)
    c.receive(fork)
    a.created(fork_id)  # by an error of the connection
    settle(owner, a, c)
    for user, mine in [(a, fork_id), (c, fork.fork_id)][:: 1 if first == A else -1]:
        assert rref_id in owner.owned
        user.drop(mine)
        settle(owner, a, c)
    assert is_empty(owner, a, c)


def test_interrupted_calls_that_never_arrive_are_forgotten(owner, a, monkeypatch):
    monkeypatch.setattr("rayrpc._protocol.rref_table.MAX_CANCELLED", 3)
    for _ in range(5):
        rref_id, fork_id = a._new_id(), a._new_id()
        a.use(rref_id, fork_id, OWNER)
        a.cancel(rref_id, fork_id)
    settle(a, owner)
    assert len(owner._cancelled) == 3
    owner.on_peer_lost(A)
    assert not owner._cancelled


def test_a_fork_that_is_received_again_is_held_once(owner, a, c):
    rref_id, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    for _ in range(2):
        c.receive(fork)
    settle(owner, a, c)
    assert owner.owned[rref_id].forks == {fork_id: A, fork.fork_id: C}
    c.drop(fork.fork_id)
    a.drop(fork_id)
    settle(owner, a, c)
    assert not (owner.owned or a.used or c.used)


def test_a_fork_is_noted_before_it_is_counted(owner, a):
    _, fork_id = remote(a, owner)
    noted: list[Any] = []
    shared = [a.share(fork_id, C, noted), owner.share_owned(owner._new_id(), Cell(), C, noted)]
    assert noted == shared


def test_a_deleted_fork_cannot_be_shared(owner, a):
    _, fork_id = remote(a, owner)
    a.drop(fork_id)
    with pytest.raises(KeyError):
        a.share(fork_id, C)


# What overtakes the remote call


def test_forks_and_fetches_that_overtake_the_remote_call_get_the_cell_that_it_fills(owner, a, c):
    rref_id, fork_id = a._new_id(), a._new_id()
    a.use(rref_id, fork_id, OWNER)
    fetched = owner.lookup(rref_id)
    sent, _ = owner.receive(a.share(fork_id, OWNER))
    fork = a.share(fork_id, C)
    c.receive(fork)
    send_pending(c, owner)
    assert owner.own(rref_id, fork_id, A) is fetched is sent
    assert set(owner.owned[rref_id].forks) == {fork_id, fork.fork_id}


def test_an_early_handle_at_the_owner_outlives_other_forks(owner, a, c):
    rref_id, fork_id = a._new_id(), a._new_id()
    a.use(rref_id, fork_id, OWNER)
    cell, _ = owner.receive(a.share(fork_id, OWNER))
    owner.unshare(owner.share_owned(rref_id, cell, C))
    assert owner.own(rref_id, fork_id, A) is cell


# Messages that are lost, duplicated or delayed


def test_a_duplicate_message_is_applied_once(owner, a, c):
    rref_id, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    c.receive(fork)
    ack, messages = c.take_pending(OWNER)
    owner.on_messages(C, ack, messages)
    send_pending(owner, c)
    c.drop(fork.fork_id)
    send_pending(c, owner)
    assert owner.on_messages(C, ack, messages) == []
    assert list(owner.owned[rref_id].forks) == [fork_id]
    assert owner.take_pending(C)[1] == ()


def test_messages_are_applied_in_any_order(owner, c):
    forks = [owner.share_owned(owner._new_id(), Cell(), C) for _ in range(3)]
    for fork in forks:
        c.receive(fork)
        c.drop(fork.fork_id)
    _, messages = c.take_pending(OWNER)
    for message in reversed(messages):
        owner.on_messages(C, 0, [message])
    assert not owner.owned
    send_pending(owner, c)
    assert c.is_settled()


def test_unacknowledged_messages_are_retransmitted_after_a_whole_period(owner, c):
    fork = owner.share_owned(owner._new_id(), Cell(), C)
    c.receive(fork)
    c.drop(fork.fork_id)
    _, lost = c.take_pending(OWNER)
    assert c.pending_workers() == []
    c.retransmit()
    assert c.pending_workers() == []  # it may still arrive
    c.retransmit()
    assert c.pending_workers() == [OWNER]
    assert not c.is_settled()
    assert c.take_pending(OWNER)[1] == lost


def test_messages_of_a_lost_frame_are_retransmitted_at_once(owner, c):
    fork = owner.share_owned(owner._new_id(), Cell(), C)
    c.receive(fork)
    c.drop(fork.fork_id)
    _, lost = c.take_pending(OWNER)
    c.retransmit(A)
    assert c.pending_workers() == []
    c.retransmit(OWNER)
    assert c.take_pending(OWNER)[1] == lost


def test_an_ack_covers_only_the_messages_before_the_first_gap(owner, c):
    forks = [owner.share_owned(owner._new_id(), Cell(), C) for _ in range(2)]
    for fork in forks:
        c.receive(fork)
        c.drop(fork.fork_id)
    _, (first, second) = c.take_pending(OWNER)
    owner.on_messages(C, 0, [second])
    send_pending(owner, c)
    assert not c.is_settled()
    owner.on_messages(C, 0, [first])
    send_pending(owner, c)
    assert c.is_settled()


# Workers that left or died


def test_the_forks_of_a_lost_worker_are_dropped(owner, a, c):
    rref_id, _ = remote(a, owner)
    cell = owner.lookup(rref_id)
    assert owner.on_peer_lost(C) == []
    assert owner.on_peer_lost(A) == [Released(rref_id, cell)]
    assert is_empty(owner)


def test_a_parent_drops_the_child_of_a_lost_worker(owner, a):
    _, fork_id = remote(a, owner)
    a.share(fork_id, C)
    a.drop(fork_id)
    a.on_peer_lost(C)
    assert send_pending(a, owner)[0] == [UserDelete]
    settle(a, owner)
    assert is_empty(owner, a)


def test_waiting_for_a_lost_owner_ends(owner, a, c):
    _, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    c.receive(fork)
    assert c.on_peer_lost(OWNER) == [Confirmed(fork.fork_id)]
    assert a.on_peer_lost(OWNER) == [Confirmed(fork_id)]
    for user in (a, c):
        user.drop_all()
    c.on_peer_lost(A)
    a.on_peer_lost(C)
    assert is_empty(a, c)


def test_an_rref_is_deleted_with_its_creator_if_its_remote_call_never_arrived(owner, a, c):
    rref_id, fork_id = a._new_id(), a._new_id()
    a.use(rref_id, fork_id, OWNER)
    cell = owner.lookup(rref_id)
    assert owner.on_peer_lost(A) == [Released(rref_id, cell)]
    with pytest.raises(CallError, match="was released by its owner"):
        owner.lookup(rref_id)
    owner.on_peer_joined(A)
    owner.lookup(IdSource(A, 1).new())


def test_the_owner_does_not_wait_for_a_remote_call_of_its_own(owner):
    with pytest.raises(CallError, match="was released by its owner"):
        owner.lookup(owner._new_id())


def test_no_message_goes_to_a_parent_that_was_lost_before_its_child_was_counted(owner, a, c):
    _, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    c.receive(fork)
    send_pending(c, owner)
    c.on_peer_lost(A)
    send_pending(owner, c)
    assert c.pending_workers() == []
    c.drop(fork.fork_id)
    owner.on_peer_lost(A)
    settle(owner, c)
    assert is_empty(owner, c)


def test_a_fork_of_a_lost_owner_is_not_held(owner, a, c):
    _, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    c.on_peer_lost(OWNER)
    assert c.receive(fork) == (None, [])
    assert c.is_confirmed(fork.fork_id)
    assert is_empty(c)


def test_a_parent_is_notified_even_if_the_value_was_deleted_with_its_creator(owner, a, c):
    _, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    c.receive(fork)
    sent = c.share(fork.fork_id, OWNER)
    for worker in (owner, c):
        worker.on_peer_lost(A)
    with pytest.raises(CallError, match="was released by its owner"):
        owner.receive(sent)
    c.drop(fork.fork_id)
    settle(owner, c)
    assert is_empty(owner, c)


def test_an_rref_requested_from_a_lost_worker_is_not_held(a):
    a.on_peer_lost(OWNER)
    fork_id = a._new_id()
    a.use(a._new_id(), fork_id, OWNER)
    assert a.created(fork_id) == []
    with pytest.raises(KeyError):
        a.share(fork_id, C)
    assert is_empty(a)


@pytest.mark.parametrize("share", ["used", "owned"])
def test_a_fork_for_a_lost_worker_holds_nothing(owner, a, share):
    rref_id, fork_id = remote(a, owner)
    for worker in (owner, a):
        worker.on_peer_lost(C)
    if share == "used":
        a.share(fork_id, C)
    else:
        owner.share_owned(rref_id, owner.lookup(rref_id), C)
    a.drop(fork_id)
    settle(owner, a)
    assert is_empty(owner, a)


def test_late_messages_of_a_dead_worker_hold_nothing(owner, a, c):
    rref_id, fork_id = remote(a, owner)
    c.receive(a.share(fork_id, C))
    request = c.take_pending(OWNER)
    owner.on_peer_lost(C)
    owner.on_messages(C, *request)
    assert list(owner.owned[rref_id].forks) == [fork_id]
    assert owner.pending_workers() == []
    owner.on_peer_lost(A)
    owner.own(a._new_id(), a._new_id(), A)
    assert is_empty(owner)


@pytest.mark.parametrize("late", ["fork", "fetch"])
def test_what_a_dead_worker_has_sent_does_not_bring_an_rref_back(owner, a, c, late):
    rref_id, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    c.receive(fork)
    settle(owner, a, c)
    a.drop(fork_id)
    settle(owner, a, c)
    sent = c.share(fork.fork_id, OWNER)
    owner.on_peer_lost(C)
    with pytest.raises(CallError, match="was released by its owner"):
        owner.receive(sent) if late == "fork" else owner.lookup(rref_id)
    assert is_empty(owner)


def test_a_fork_whose_parent_died_before_it_was_counted_gets_an_answer(owner, a, c):
    rref_id, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    owner.on_peer_lost(A)
    owner.on_peer_joined(A)  # a successor
    c.receive(fork)
    settle(owner, c)
    assert c.is_confirmed(fork.fork_id)
    with pytest.raises(CallError, match="was released by its owner"):
        owner.lookup(rref_id)
    c.on_peer_lost(A)
    c.drop(fork.fork_id)
    settle(owner, c)
    assert is_empty(owner, c)


def test_a_late_request_of_a_dead_worker_does_not_bring_an_rref_back(owner, a, c):
    _, fork_id = remote(a, owner)
    c.receive(a.share(fork_id, C))
    a.drop(fork_id)
    a.on_peer_lost(C)  # which the owner does not know yet
    settle(owner, a)
    send_pending(c, owner)
    assert not owner.owned
    owner.on_peer_lost(C)
    settle(owner, a)
    assert is_empty(owner, a)


def test_released_rrefs_are_forgotten(owner, a, monkeypatch):
    monkeypatch.setattr("rayrpc._protocol.rref_table.MAX_RELEASED", 3)
    for _ in range(5):
        a.drop(remote(a, owner)[1])
    settle(owner, a)
    assert len(owner._released) == 3


def test_the_next_worker_with_the_id_of_a_lost_one_starts_with_new_sequence_numbers(owner, c):
    fork = owner.share_owned(owner._new_id(), Cell(), C)
    c.receive(fork)
    c.drop(fork.fork_id)
    late = c.take_pending(OWNER)
    owner.on_peer_lost(C)
    owner.on_messages(C, *late)
    owner.on_peer_joined(C)
    c = table(C)
    again = owner.share_owned(owner._new_id(), Cell(), C)
    c.receive(again)
    c.drop(again.fork_id)
    settle(owner, c)
    assert is_empty(owner, c)


def test_shutdown_drops_every_fork(owner, a):
    remote(a, owner)
    remote(a, owner)
    a.drop_all()
    settle(a, owner)
    assert is_empty(owner, a)


def test_debug_info_counts_as_torch_does(owner, a):
    _, fork_id = remote(a, owner)
    a.share(fork_id, C)
    a.use(a._new_id(), a._new_id(), OWNER)
    assert owner.debug_info() == {
        "num_owner_rrefs": "1",
        "num_pending_futures": "0",
        "num_pending_users": "0",
        "num_forks": "1",
    }
    assert a.debug_info()["num_pending_futures"] == "1"
    assert a.debug_info()["num_pending_users"] == "1"


# Random sequences of all events


@dataclass(eq=False)
class Handle:
    """An RRef object in a worker."""

    worker: int
    rref_id: GloballyUniqueId
    owner: int
    fork_id: GloballyUniqueId | None  # None: at the owner
    cell: Cell | None


@dataclass(eq=False)
class InFlight:
    """A frame that was sent, but not received."""

    kind: str  # "call", "remote", "control" or "reply"
    src: int
    dst: int
    ack: int
    control: tuple[Control, ...]
    forks: tuple[Fork, ...] = ()
    made: tuple[GloballyUniqueId, GloballyUniqueId] | None = None  # of a remote call, its reply


@dataclass
class RRefState:
    """What the test knows of one RRef."""

    owner: int
    creator: int
    arrived: bool = False  # its remote call
    lost: bool = False  # it may have been deleted with a worker that died


WORKERS = range(4)


class Protocol(RuleBasedStateMachine):
    """Workers that share RRefs over a network that delays, duplicates and loses frames."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = {w: table(w) for w in WORKERS}
        self.alive = set(WORKERS)
        self.known = {w: set(WORKERS) for w in WORKERS}  # the workers that each one takes for alive
        self.handles: list[Handle] = []
        self.frames: list[InFlight] = []
        self.rrefs: dict[GloballyUniqueId, RRefState] = {}

    # -- sending ----------------------------------------------------------------------------

    def send(self, kind: str, src: int, dst: int, **more: Any) -> None:
        ack, control = self.tables[src].take_pending(dst)
        if dst in self.alive:
            self.frames.append(InFlight(kind, src, dst, ack, control, **more))

    def pick(self, data: Any, things: Any, label: str) -> Any:
        return data.draw(st.sampled_from(list(things)), label=label)

    def peer(self, data: Any, src: int) -> int:
        return self.pick(data, sorted(self.known[src]), "to")

    @rule(data=st.data())
    def make_a_value(self, data):
        me = self.pick(data, sorted(self.alive), "owner")
        rref_id = self.tables[me]._new_id()
        cell = Cell()
        cell.filled = True
        self.rrefs[rref_id] = RRefState(me, me, arrived=True)
        self.handles.append(Handle(me, rref_id, me, None, cell))

    @rule(data=st.data())
    def call_remote(self, data):
        src = self.pick(data, sorted(self.alive), "creator")
        owner = self.peer(data, src)
        mine = self.tables[src]
        rref_id, fork_id = mine._new_id(), mine._new_id()
        self.rrefs[rref_id] = RRefState(owner, src)
        if owner == src:
            cell = mine.own(rref_id, fork_id, owner)
            self.handles.append(Handle(src, rref_id, owner, None, cell))
        else:
            mine.use(rref_id, fork_id, owner)
            self.handles.append(Handle(src, rref_id, owner, fork_id, None))
        self.send("remote", src, owner, made=(rref_id, fork_id))
        if owner not in self.alive:
            self.rrefs[rref_id].lost = True

    def share_one(self, handle: Handle, to: int) -> Fork:
        mine = self.tables[handle.worker]
        if handle.fork_id is None:
            return mine.share_owned(handle.rref_id, handle.cell, to)
        return mine.share(handle.fork_id, to)

    def shareable(self) -> list[Handle]:
        # a handle whose owner is known to be lost raises before it gets to the table
        return [h for h in self.handles if h.owner in self.known[h.worker]]

    @precondition(lambda self: self.shareable())
    @rule(data=st.data())
    def share(self, data):
        first = self.pick(data, self.shareable(), "handle")
        same = [h for h in self.shareable() if h.worker == first.worker]
        more = data.draw(st.lists(st.sampled_from(same), max_size=2), label="more")
        to = self.peer(data, first.worker)
        forks = tuple(self.share_one(h, to) for h in [first, *more])
        if to not in self.alive:
            for fork in forks:
                self.rrefs[fork.rref_id].lost |= fork.owner not in self.alive
        self.send("call", first.worker, to, forks=forks)

    @precondition(lambda self: self.shareable())
    @rule(data=st.data())
    def fail_to_send(self, data):
        handle = self.pick(data, self.shareable(), "handle")
        fork = self.share_one(handle, self.peer(data, handle.worker))
        self.tables[handle.worker].unshare(fork)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def drop(self, data):
        self.drop_handle(self.pick(data, self.handles, "handle"))

    def drop_handle(self, handle: Handle) -> None:
        self.handles.remove(handle)
        if handle.fork_id is not None:
            self.tables[handle.worker].drop(handle.fork_id)

    def pending_links(self) -> list[tuple[int, int]]:
        return [
            (w, to)
            for w in sorted(self.alive)
            for to in self.tables[w].pending_workers()
            if to in self.known[w]
        ]

    @precondition(lambda self: self.pending_links())
    @rule(data=st.data())
    def send_control(self, data):
        src, dst = self.pick(data, self.pending_links(), "from, to")
        self.send("control", src, dst)

    @rule(data=st.data())
    def retransmit(self, data):
        self.tables[self.pick(data, sorted(self.alive), "worker")].retransmit()

    # -- the network ------------------------------------------------------------------------

    @precondition(lambda self: self.frames)
    @rule(data=st.data(), duplicated=st.booleans())
    def deliver_any(self, data, duplicated):
        frame = self.pick(data, self.frames, "frame")
        self.frames.remove(frame)
        self.deliver(frame)
        if duplicated:  # transports never duplicate a call, but its messages may be retransmitted
            self.frames.append(InFlight("control", frame.src, frame.dst, frame.ack, frame.control))

    def deliver(self, frame: InFlight) -> None:
        here = self.tables[frame.dst]
        here.on_messages(frame.src, frame.ack, frame.control)
        for fork in frame.forks:
            try:
                cell, _ = here.receive(fork)
            except CallError:
                assert self.rrefs[fork.rref_id].lost
                continue
            fork_id = None if fork.owner == frame.dst else fork.fork_id
            self.handles.append(Handle(frame.dst, fork.rref_id, fork.owner, fork_id, cell))
        if frame.kind == "reply":
            if frame.made is not None:
                rref_id, fork_id = frame.made
                if fork_id in here.used:
                    here.created(fork_id)
                else:
                    here.release(rref_id, fork_id)
            return
        if frame.kind == "remote":
            assert frame.made is not None
            rref_id, fork_id = frame.made
            here.own(rref_id, fork_id, frame.src).filled = True
            self.rrefs[rref_id].arrived = True
        self.send("reply", frame.dst, frame.src, made=frame.made)

    def losable(self) -> list[InFlight]:
        return [f for f in self.frames if f.kind == "control" or (f.control and not f.forks)]

    @precondition(lambda self: self.losable())
    @rule(data=st.data(), noticed=st.booleans())
    def lose_control(self, data, noticed):
        frame = self.pick(data, self.losable(), "frame")
        if frame.kind == "control":
            self.frames.remove(frame)
        elif frame.kind == "reply":
            frame.ack, frame.control = 0, ()
        if noticed and frame.src in self.alive:
            self.tables[frame.src].retransmit(frame.dst)

    # -- members ----------------------------------------------------------------------------

    @precondition(lambda self: len(self.alive) > 2)
    @rule(data=st.data())
    def die(self, data):
        dead = self.pick(data, sorted(self.alive), "worker")
        self.alive.remove(dead)
        for state in self.rrefs.values():
            # its value is lost, or its remote call may never arrive
            if state.owner == dead or (state.creator == dead and not state.arrived):
                state.lost = True
        # a fork that the dead worker made, and that is not counted yet, kept the RRef alive
        in_flight = [fork for frame in self.frames for fork in frame.forks]
        for fork in in_flight:
            if fork.parent == dead:
                self.rrefs[fork.rref_id].lost = True
        for worker in self.alive:
            for entry in self.tables[worker].used.values():
                if entry.parent == dead and entry.state is UserState.PENDING:
                    self.rrefs[entry.rref_id].lost = True
        self.handles = [h for h in self.handles if h.worker != dead]
        # frames of the dead worker may still arrive, before or after its loss is known
        self.frames = [f for f in self.frames if f.dst != dead]

    def unknown_deaths(self) -> list[tuple[int, int]]:
        return [(w, dead) for w in sorted(self.alive) for dead in self.known[w] - self.alive]

    @precondition(lambda self: self.unknown_deaths())
    @rule(data=st.data())
    def notice_a_death(self, data):
        self.notice(*self.pick(data, self.unknown_deaths(), "worker, dead"))

    def notice(self, worker: int, dead: int) -> None:
        self.known[worker].discard(dead)
        self.tables[worker].on_peer_lost(dead)

    # -- invariants ------------------------------------------------------------------------

    def referenced(self) -> set[GloballyUniqueId]:
        held = {h.rref_id for h in self.handles if h.fork_id is not None}
        return held | {k.rref_id for f in self.frames if f.src in self.alive for k in f.forks}

    @invariant()
    def a_referenced_rref_is_at_its_owner(self):
        requested = {f.made[0] for f in self.frames if f.kind == "remote" and f.made is not None}
        for rref_id in self.referenced():
            state = self.rrefs[rref_id]
            if not state.lost and state.owner in self.alive and rref_id not in requested:
                assert rref_id in self.tables[state.owner].owned

    @invariant()
    def a_handle_at_the_owner_gets_the_value(self):
        for handle in self.handles:
            state = self.rrefs[handle.rref_id]
            if handle.fork_id is None and state.arrived and not state.lost:
                assert handle.cell is not None and handle.cell.filled

    @invariant()
    def a_handle_holds_its_fork(self):
        for handle in self.handles:
            if handle.fork_id is not None and handle.owner in self.known[handle.worker]:
                assert self.tables[handle.worker].used[handle.fork_id].held

    def teardown(self):
        for handle in list(self.handles):
            self.drop_handle(handle)
        for worker, dead in self.unknown_deaths():
            self.notice(worker, dead)
        for _ in range(200):
            while self.frames:
                self.deliver(self.frames.pop(0))
            while self.handles:
                self.drop_handle(self.handles[0])
            for worker in self.alive:
                self.tables[worker].retransmit()
            for src, dst in self.pending_links():
                self.send("control", src, dst)
            if not self.frames and all(self.tables[w].is_settled() for w in self.alive):
                break
        for worker in self.alive:
            left = self.tables[worker]
            assert not left.owned
            assert not left.used
            assert not left._children
            assert left.is_settled()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
