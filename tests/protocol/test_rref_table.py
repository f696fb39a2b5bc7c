"""The RRef protocol: every arrow of its drawing, then any order of everything at once."""

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
from rayrpc._protocol.rref_table import Confirmed, Released, RRefTable, UserState

OWNER, A, C = 0, 1, 2


class Cell:
    """A value of an RRef; the table only hands it on."""

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


def say(sender, receiver):
    """Carry what ``sender`` has to say to ``receiver``; return the messages and their effects."""
    ack, messages = sender.take(receiver.me)
    return [type(m) for m in messages], receiver.apply(sender.me, ack, messages)


def settle(*tables):
    for _ in range(10):
        for sender, receiver in itertools.permutations(tables, 2):
            say(sender, receiver)


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


def test_a_remote_call_is_pending_until_the_owner_has_made_it(owner, a):
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
    assert say(a, owner) == ([UserDelete], [Released(rref_id, cell)])
    settle(a, owner)
    assert is_empty(a, owner)


def test_a_pending_fork_is_not_deleted_before_it_is_confirmed(owner, a):
    rref_id, fork_id = a._new_id(), a._new_id()
    a.use(rref_id, fork_id, OWNER)
    a.drop(fork_id)
    assert say(a, owner)[0] == []
    owner.own(rref_id, fork_id, A)
    a.created(fork_id)
    assert say(a, owner)[0] == [UserDelete]


def test_a_remote_on_oneself_keeps_the_value_until_it_is_released(owner):
    rref_id, fork_id = owner._new_id(), owner._new_id()
    cell = owner.own(rref_id, fork_id, OWNER)
    assert owner.own(rref_id, fork_id, OWNER) is cell  # when the call arrives
    assert owner.release(rref_id, fork_id) == [Released(rref_id, cell)]
    assert is_empty(owner)


# A shares with C


def test_a_child_asks_the_owner_to_count_it_and_then_tells_its_parent(owner, a, c):
    rref_id, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    assert fork == Fork(rref_id, fork.fork_id, OWNER, A)
    assert c.receive(fork) == (None, [])
    assert not c.is_confirmed(fork.fork_id)
    assert say(c, owner) == ([ForkRequest], [])
    assert owner.owned[rref_id].forks == {fork_id: A, fork.fork_id: C}
    assert say(owner, c) == ([ForkAck], [Confirmed(fork.fork_id)])
    assert c.is_confirmed(fork.fork_id)
    assert say(c, a) == ([ChildAccept], [])
    assert not a._children


def test_a_parent_keeps_its_fork_until_the_child_is_counted(owner, a, c):
    rref_id, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    a.drop(fork_id)
    c.receive(fork)
    for sender, receiver in [(c, owner), (owner, c)]:
        assert say(a, owner)[0] == []
        say(sender, receiver)
    say(c, a)
    assert say(a, owner)[0] == [UserDelete]
    assert list(owner.owned[rref_id].forks) == [fork.fork_id]


def test_a_child_that_was_dropped_at_once_is_still_counted_first(owner, a, c):
    _, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    a.drop(fork_id)
    c.receive(fork)
    c.drop(fork.fork_id)
    assert say(c, owner)[0] == [ForkRequest]
    settle(owner, a, c)
    assert is_empty(owner, a, c)


def test_a_worker_may_share_with_itself(owner, a):
    _, fork_id = remote(a, owner)
    fork = a.share(fork_id, A)
    a.receive(fork)
    settle(a, owner)
    assert say(a, a)[0] == [ChildAccept]
    a.drop(fork_id)
    a.drop(fork.fork_id)
    settle(a, owner)
    say(a, a)
    assert is_empty(owner, a)


# A sends to the owner


def test_a_fork_sent_to_the_owner_is_its_cell_and_is_accepted(owner, a):
    rref_id, fork_id = remote(a, owner)
    fork = a.share(fork_id, OWNER)
    a.drop(fork_id)
    assert say(a, owner)[0] == []
    cell, effects = owner.receive(fork)
    assert (cell, effects) == (owner.lookup(rref_id), [])
    assert say(owner, a)[0] == [ChildAccept]
    assert say(a, owner)[0] == [UserDelete]
    settle(a, owner)
    assert is_empty(owner, a)


# The owner shares with C


def test_a_fork_of_the_owner_is_counted_before_it_leaves_and_starts_confirmed(owner, c):
    rref_id, cell = owner._new_id(), Cell()
    fork = owner.share_owned(rref_id, cell, C)
    assert owner.owned[rref_id].forks == {fork.fork_id: C}
    assert c.receive(fork) == (None, [])
    assert c.is_confirmed(fork.fork_id)
    assert say(c, owner)[0] == []
    c.drop(fork.fork_id)
    assert say(c, owner) == ([UserDelete], [Released(rref_id, cell)])


def test_a_fork_that_the_owner_sends_to_itself_is_not_counted_any_more(owner):
    rref_id, cell = owner._new_id(), Cell()
    fork = owner.share_owned(rref_id, cell, OWNER)
    assert owner.receive(fork) == (cell, [Released(rref_id, cell)])
    assert is_empty(owner)


def test_a_value_can_be_shared_again_after_its_last_fork_went(owner, c):
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


def test_a_deleted_fork_cannot_be_shared(owner, a):
    _, fork_id = remote(a, owner)
    a.drop(fork_id)
    with pytest.raises(KeyError):
        a.share(fork_id, C)


# What overtakes the remote call


def test_whatever_overtakes_the_remote_call_gets_the_cell_that_the_call_fills(owner, a, c):
    rref_id, fork_id = a._new_id(), a._new_id()
    a.use(rref_id, fork_id, OWNER)
    fetched = owner.lookup(rref_id)
    sent, _ = owner.receive(a.share(fork_id, OWNER))
    fork = a.share(fork_id, C)
    c.receive(fork)
    say(c, owner)
    assert owner.own(rref_id, fork_id, A) is fetched is sent
    assert set(owner.owned[rref_id].forks) == {fork_id, fork.fork_id}


def test_an_early_handle_at_the_owner_outlives_other_forks(owner, a, c):
    rref_id, fork_id = a._new_id(), a._new_id()
    a.use(rref_id, fork_id, OWNER)
    cell, _ = owner.receive(a.share(fork_id, OWNER))
    owner.unshare(owner.share_owned(rref_id, cell, C))
    assert owner.own(rref_id, fork_id, A) is cell


# Messages that are lost, doubled or late


def test_a_message_that_comes_twice_counts_once(owner, a, c):
    rref_id, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    c.receive(fork)
    ack, messages = c.take(OWNER)
    owner.apply(C, ack, messages)
    say(owner, c)
    c.drop(fork.fork_id)
    say(c, owner)
    assert owner.apply(C, ack, messages) == []
    assert list(owner.owned[rref_id].forks) == [fork_id]
    assert owner.take(C)[1] == ()


def test_messages_count_in_any_order(owner, c):
    forks = [owner.share_owned(owner._new_id(), Cell(), C) for _ in range(3)]
    for fork in forks:
        c.receive(fork)
        c.drop(fork.fork_id)
    _, messages = c.take(OWNER)
    for message in reversed(messages):
        owner.apply(C, 0, [message])
    assert not owner.owned
    say(owner, c)
    assert c.is_settled()


def test_what_is_not_acknowledged_is_offered_again_after_a_whole_turn(owner, c):
    fork = owner.share_owned(owner._new_id(), Cell(), C)
    c.receive(fork)
    c.drop(fork.fork_id)
    _, lost = c.take(OWNER)
    assert c.waiting() == []
    c.offer_again()
    assert c.waiting() == []  # it may still be on its way
    c.offer_again()
    assert c.waiting() == [OWNER]
    assert not c.is_settled()
    assert c.take(OWNER)[1] == lost


def test_what_is_known_to_be_lost_is_offered_again_at_once(owner, c):
    fork = owner.share_owned(owner._new_id(), Cell(), C)
    c.receive(fork)
    c.drop(fork.fork_id)
    _, lost = c.take(OWNER)
    c.offer_again(A)
    assert c.waiting() == []
    c.offer_again(OWNER)
    assert c.take(OWNER)[1] == lost


def test_an_ack_covers_only_what_came_without_a_gap(owner, c):
    forks = [owner.share_owned(owner._new_id(), Cell(), C) for _ in range(2)]
    for fork in forks:
        c.receive(fork)
        c.drop(fork.fork_id)
    _, (first, second) = c.take(OWNER)
    owner.apply(C, 0, [second])
    say(owner, c)
    assert not c.is_settled()
    owner.apply(C, 0, [first])
    say(owner, c)
    assert c.is_settled()


# Workers that are gone


def test_a_worker_that_is_gone_loses_its_forks(owner, a, c):
    rref_id, _ = remote(a, owner)
    cell = owner.lookup(rref_id)
    assert owner.on_peer_lost(C) == []
    assert owner.on_peer_lost(A) == [Released(rref_id, cell)]
    assert is_empty(owner)


def test_a_parent_forgets_the_child_of_a_worker_that_is_gone(owner, a):
    _, fork_id = remote(a, owner)
    a.share(fork_id, C)
    a.drop(fork_id)
    a.on_peer_lost(C)
    assert say(a, owner)[0] == [UserDelete]
    settle(a, owner)
    assert is_empty(owner, a)


def test_who_waits_for_an_owner_that_is_gone_wakes_up(owner, a, c):
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


def test_an_rref_goes_with_its_maker_if_its_remote_call_never_came(owner, a, c):
    rref_id, fork_id = a._new_id(), a._new_id()
    a.use(rref_id, fork_id, OWNER)
    cell = owner.lookup(rref_id)
    assert owner.on_peer_lost(A) == [Released(rref_id, cell)]
    with pytest.raises(KeyError):
        owner.lookup(rref_id)
    owner.on_peer_joined(A)
    owner.lookup(rref_id)


def test_the_owner_does_not_wait_for_a_remote_call_of_its_own(owner):
    with pytest.raises(KeyError):
        owner.lookup(owner._new_id())


def test_nothing_is_said_to_a_parent_that_went_before_its_child_was_counted(owner, a, c):
    _, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    c.receive(fork)
    say(c, owner)
    c.on_peer_lost(A)
    say(owner, c)
    assert c.waiting() == []
    c.drop(fork.fork_id)
    owner.on_peer_lost(A)
    settle(owner, c)
    assert is_empty(owner, c)


def test_a_fork_of_an_owner_that_is_gone_is_not_held(owner, a, c):
    _, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    c.on_peer_lost(OWNER)
    assert c.receive(fork) == (None, [])
    assert c.is_confirmed(fork.fork_id)
    assert is_empty(c)


def test_the_parent_of_a_fork_learns_of_it_though_the_value_went_with_its_maker(owner, a, c):
    _, fork_id = remote(a, owner)
    fork = a.share(fork_id, C)
    c.receive(fork)
    sent = c.share(fork.fork_id, OWNER)
    for worker in (owner, c):
        worker.on_peer_lost(A)
    with pytest.raises(KeyError):
        owner.receive(sent)
    c.drop(fork.fork_id)
    settle(owner, c)
    assert is_empty(owner, c)


def test_an_rref_asked_of_a_worker_that_is_gone_is_not_held(a):
    a.on_peer_lost(OWNER)
    fork_id = a._new_id()
    a.use(a._new_id(), fork_id, OWNER)
    assert a.created(fork_id) == []
    with pytest.raises(KeyError):
        a.share(fork_id, C)
    assert is_empty(a)


@pytest.mark.parametrize("share", ["used", "owned"])
def test_a_share_for_a_worker_that_is_gone_holds_nothing(owner, a, share):
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


def test_what_a_worker_sent_before_it_died_holds_nothing(owner, a, c):
    rref_id, fork_id = remote(a, owner)
    c.receive(a.share(fork_id, C))
    request = c.take(OWNER)
    owner.on_peer_lost(C)
    owner.apply(C, *request)
    assert list(owner.owned[rref_id].forks) == [fork_id]
    assert owner.waiting() == []
    owner.on_peer_lost(A)
    owner.own(a._new_id(), a._new_id(), A)
    assert is_empty(owner)


def test_who_takes_the_id_of_a_worker_that_is_gone_is_heard_from_the_start(owner, c):
    fork = owner.share_owned(owner._new_id(), Cell(), C)
    c.receive(fork)
    c.drop(fork.fork_id)
    late = c.take(OWNER)
    owner.on_peer_lost(C)
    owner.apply(C, *late)
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


# Anything in any order


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
    """A frame on its way."""

    kind: str  # "call", "remote", "control" or "reply"
    src: int
    dst: int
    ack: int
    control: tuple[Control, ...]
    forks: tuple[Fork, ...] = ()
    made: tuple[GloballyUniqueId, GloballyUniqueId] | None = None  # of a remote call, its reply


@dataclass
class RRefState:
    """What the world knows of one RRef."""

    owner: int
    maker: int
    arrived: bool = False  # its remote call
    lost: bool = False  # a death may have taken it along


WORKERS = range(4)


class Protocol(RuleBasedStateMachine):
    """Workers that make, share and drop RRefs over a network that delays, doubles and loses."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = {w: table(w) for w in WORKERS}
        self.alive = set(WORKERS)
        self.known = {w: set(WORKERS) for w in WORKERS}  # whom each worker takes for alive
        self.handles: list[Handle] = []
        self.frames: list[InFlight] = []
        self.rrefs: dict[GloballyUniqueId, RRefState] = {}

    # -- sending ----------------------------------------------------------------------------

    def send(self, kind: str, src: int, dst: int, **more: Any) -> None:
        ack, control = self.tables[src].take(dst)
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
        src = self.pick(data, sorted(self.alive), "maker")
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
        # a handle whose owner is known to be gone raises before it gets to the table
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
        self.let_go(self.pick(data, self.handles, "handle"))

    def let_go(self, handle: Handle) -> None:
        self.handles.remove(handle)
        if handle.fork_id is not None:
            self.tables[handle.worker].drop(handle.fork_id)

    def voices(self) -> list[tuple[int, int]]:
        return [
            (w, to)
            for w in sorted(self.alive)
            for to in self.tables[w].waiting()
            if to in self.known[w]
        ]

    @precondition(lambda self: self.voices())
    @rule(data=st.data())
    def speak(self, data):
        src, dst = self.pick(data, self.voices(), "from, to")
        self.send("control", src, dst)

    @rule(data=st.data())
    def turn(self, data):
        self.tables[self.pick(data, sorted(self.alive), "worker")].offer_again()

    # -- the network ------------------------------------------------------------------------

    @precondition(lambda self: self.frames)
    @rule(data=st.data(), again=st.booleans())
    def deliver_any(self, data, again):
        frame = self.pick(data, self.frames, "frame")
        self.frames.remove(frame)
        self.deliver(frame)
        if again:  # transports never double a call; what it says may still come twice
            self.frames.append(InFlight("control", frame.src, frame.dst, frame.ack, frame.control))

    def deliver(self, frame: InFlight) -> None:
        here = self.tables[frame.dst]
        here.apply(frame.src, frame.ack, frame.control)
        for fork in frame.forks:
            try:
                cell, _ = here.receive(fork)
            except KeyError:
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
            rref_id, fork_id = frame.made
            here.own(rref_id, fork_id, frame.src).filled = True
            self.rrefs[rref_id].arrived = True
        self.send("reply", frame.dst, frame.src, made=frame.made)

    def losable(self) -> list[InFlight]:
        return [f for f in self.frames if f.kind == "control" or (f.control and not f.forks)]

    @precondition(lambda self: self.losable())
    @rule(data=st.data(), told=st.booleans())
    def lose_control(self, data, told):
        frame = self.pick(data, self.losable(), "frame")
        if frame.kind == "control":
            self.frames.remove(frame)
        elif frame.kind == "reply":
            frame.ack, frame.control = 0, ()
        if told and frame.src in self.alive:
            self.tables[frame.src].offer_again(frame.dst)

    # -- members ----------------------------------------------------------------------------

    @precondition(lambda self: len(self.alive) > 2)
    @rule(data=st.data())
    def die(self, data):
        dead = self.pick(data, sorted(self.alive), "worker")
        self.alive.remove(dead)
        for state in self.rrefs.values():
            # its value is gone, or its remote call may never arrive
            if state.owner == dead or (state.maker == dead and not state.arrived):
                state.lost = True
        # a share that the dead had made, and that is not counted yet, kept it alive
        on_their_way = [fork for frame in self.frames for fork in frame.forks]
        for fork in on_their_way:
            if fork.parent == dead:
                self.rrefs[fork.rref_id].lost = True
        for worker in self.alive:
            for entry in self.tables[worker].used.values():
                if entry.parent == dead and entry.state is UserState.PENDING:
                    self.rrefs[entry.rref_id].lost = True
        self.handles = [h for h in self.handles if h.worker != dead]
        # what the dead had sent may still arrive, before or after the news
        self.frames = [f for f in self.frames if f.dst != dead]

    def news(self) -> list[tuple[int, int]]:
        return [(w, dead) for w in sorted(self.alive) for dead in self.known[w] - self.alive]

    @precondition(lambda self: self.news())
    @rule(data=st.data())
    def learn_of_a_death(self, data):
        self.learn(*self.pick(data, self.news(), "worker, dead"))

    def learn(self, worker: int, dead: int) -> None:
        self.known[worker].discard(dead)
        self.tables[worker].on_peer_lost(dead)

    # -- what must hold ---------------------------------------------------------------------

    def referenced(self) -> set[GloballyUniqueId]:
        held = {h.rref_id for h in self.handles if h.fork_id is not None}
        return held | {k.rref_id for f in self.frames if f.src in self.alive for k in f.forks}

    @invariant()
    def what_is_referenced_is_at_its_owner(self):
        coming = {f.made[0] for f in self.frames if f.kind == "remote"}
        for rref_id in self.referenced():
            state = self.rrefs[rref_id]
            if not state.lost and state.owner in self.alive and rref_id not in coming:
                assert rref_id in self.tables[state.owner].owned

    @invariant()
    def a_handle_at_the_owner_gets_the_value(self):
        for handle in self.handles:
            state = self.rrefs[handle.rref_id]
            if handle.fork_id is None and state.arrived and not state.lost:
                assert handle.cell.filled

    @invariant()
    def a_handle_holds_its_fork(self):
        for handle in self.handles:
            if handle.fork_id is not None and handle.owner in self.known[handle.worker]:
                assert self.tables[handle.worker].used[handle.fork_id].held

    def teardown(self):
        for handle in list(self.handles):
            self.let_go(handle)
        for news in self.news():
            self.learn(*news)
        for _ in range(200):
            while self.frames:
                self.deliver(self.frames.pop(0))
            while self.handles:
                self.let_go(self.handles[0])
            for worker in self.alive:
                self.tables[worker].offer_again()
            for src, dst in self.voices():
                self.send("control", src, dst)
            if not self.frames and all(self.tables[w].is_settled() for w in self.alive):
                break
        for worker in self.alive:
            left = self.tables[worker]
            # a remote call that died on its way leaves an empty cell for as long as its maker lives
            owned = [i for i, o in left.owned.items() if o.forks or not self.rrefs[i].lost]
            assert not owned
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
