"""Groups and transports of one process: who joins, who follows, and whose memory frames have."""

import threading
import uuid
from typing import Any

import numpy as np
import pytest
from conftest import eventually, in_thread

from rayrpc._concurrency.outcome import Error
from rayrpc._protocol.membership import Member
from rayrpc._protocol.messages import Frame, Kind
from rayrpc._protocol.transport import Deferred
from rayrpc._transports import memory
from rayrpc._transports.memory import MemoryDirectory, MemoryHub, MemoryTransport
from rayrpc.errors import GroupError, WorkerDiedError

WAIT_SECONDS = 60.0


@pytest.fixture
def hub():
    return MemoryHub()


class Worker:
    """A member, and the changes that it has applied."""

    def __init__(self, hub, name, rank=-1, world_size=None, key="key"):
        self.member = Member(f"token-{uuid.uuid4().hex}", name, rank, world_size, f"address-{name}")
        self.directory = MemoryDirectory(hub, key)
        self.changes: list = []
        self.may_apply = threading.Event()
        self.may_apply.set()

    def join(self, timeout=WAIT_SECONDS):
        return self.directory.join(self.member, timeout)

    def follow(self, snapshot):
        def apply(changes):
            assert self.may_apply.wait(WAIT_SECONDS)
            self.changes += [(change.kind, change.member.name) for change in changes]

        self.directory.follow(snapshot.version, apply, lambda reason: None)


@pytest.fixture
def worker(hub):
    """Make a worker; its directory closes with the test."""
    made = []

    def worker(*args, **options):
        made.append(Worker(hub, *args, **options))
        return made[-1]

    yield worker
    for each in made:
        each.may_apply.set()
        each.directory.close()


class TestDirectory:
    def test_a_group_of_fixed_size_is_joined_when_all_are_there(self, worker):
        first, second = worker("a", 0, 2), worker("b", 1, 2)
        joining = in_thread(first.join)
        snapshot = second.join()
        assert {member.name for member in snapshot.members} == {"a", "b"}
        assert joining(WAIT_SECONDS).session == snapshot.session

    def test_one_that_waits_in_vain_says_whom_it_waited_for_and_is_forgotten(self, worker):
        with pytest.raises(
            GroupError,
            match=r"'a' waited 0\.02 s for group 'key' to be complete: of world_size 3, "
            r"ranks \[1, 2\] are missing",
        ):
            worker("a", 0, 3).join(0.02)
        again = worker("a", 0, 1)
        assert [member.name for member in again.join().members] == ["a"]

    def test_one_that_the_group_refuses_is_told_why(self, worker):
        worker("a").join()
        with pytest.raises(GroupError, match="name a is not unique"):
            worker("a").join()  # another process of that name

    def test_groups_of_other_keys_are_others(self, worker):
        worker("a", 0, 1).join()
        other = worker("a", 0, 1, key="other")
        assert [member.name for member in other.join().members] == ["a"]

    def test_followers_apply_what_changes_in_order(self, worker):
        first = worker("a")
        first.follow(first.join())
        second, third = worker("b"), worker("c")
        second.join()
        third.join()
        second.directory.leave()
        third.directory.die("killed")
        assert eventually(lambda: len(first.changes) == 4)
        assert first.changes == [
            ("joined", "b"),
            ("joined", "c"),
            ("left", "b"),
            ("died", "c"),
        ]
        assert [member.name for member in first.directory.members()] == ["a"]

    def test_who_leaves_waits_until_the_others_have_applied_that(self, worker):
        first, second = worker("a"), worker("b")
        first.follow(first.join())
        second.join()
        assert eventually(lambda: first.changes == [("joined", "b")])
        first.may_apply.clear()
        leaving = threading.Thread(target=second.directory.leave)
        leaving.start()
        leaving.join(0.03)
        assert leaving.is_alive()
        first.may_apply.set()
        leaving.join(WAIT_SECONDS)
        assert first.changes[-1] == ("left", "b")

    def test_but_not_for_ever(self, worker, monkeypatch):
        monkeypatch.setattr(memory, "APPLY_SECONDS", 0.02)
        first, second = worker("a"), worker("b")
        first.follow(first.join())
        first.may_apply.clear()
        second.join()
        second.directory.leave()
        assert first.changes == []

    def test_nor_for_one_that_follows_no_longer(self, worker):
        first, second = worker("a"), worker("b")
        first.follow(first.join())
        first.directory.close()
        first.directory.close()
        second.join()
        second.directory.leave()
        assert first.changes == []

    def test_a_barrier_returns_what_all_have_reported(self, worker):
        workers = [worker("a"), worker("b")]
        for each in workers:
            each.join()
        first = in_thread(workers[0].directory.sync, "tag", 1, WAIT_SECONDS)
        assert workers[1].directory.sync("tag", 2, WAIT_SECONDS) == {"a": 1, "b": 2}
        assert first(WAIT_SECONDS) == {"a": 1, "b": 2}

    def test_a_barrier_names_who_has_not_come_and_goes_on_without_who_has_left(self, worker):
        first, second = worker("a"), worker("b")
        for each in (first, second):
            each.join()
        with pytest.raises(GroupError, match=r"waited 0\.02 s at 'tag' for workers.*: b\."):
            first.directory.sync("tag", 1, 0.02)
        waiting = in_thread(first.directory.sync, "next", 1, WAIT_SECONDS)
        second.directory.leave()
        assert waiting(WAIT_SECONDS) == {"a": 1}

    def test_one_that_is_no_member_any_more_asks_in_vain(self, worker):
        one = worker("a")
        one.join()
        one.directory.leave()
        one.directory.leave()
        assert one.directory.members() == [] and one.directory.sync("tag", 1, 0.0) == {}


class TestTransport:
    @pytest.fixture
    def pair(self, hub):
        """A caller, and a callee that keeps what it is asked."""
        made: list[Any] = []
        served: list[Frame] = []
        for number, name in enumerate("ab"):
            made.append(MemoryTransport(hub, f"address-{name}"))
            member = Member(f"token-{name}", name, number, None, f"address-{name}")
            made[-1].member = member
        members = {each.member.id: each.member for each in made}

        def serve(frame, may_block=True):
            served.append(frame)
            return reply_to(frame)

        for each in made:
            each.start(serve, members.get)
        yield (*made, served)
        for each in made:
            each.close()

    def test_a_request_and_its_reply_share_no_memory_with_their_senders(self, pair):
        caller, callee, served = pair
        sent = np.arange(4, dtype=np.uint8)
        frame = Frame(Kind.CALL, 0, 0, 1, data=b"x", buffers=[sent])
        reply = caller.call(callee.member, frame).wait(WAIT_SECONDS)
        served[0].buffers[0][0] = 7  # the callee's own
        assert list(sent) == [0, 1, 2, 3]
        sent[:] = 9
        assert list(reply.buffers[0]) == [0, 1, 2, 3]

    def test_a_call_to_nobody_says_that_it_is_gone(self, pair):
        caller, callee, _ = pair
        callee.close()
        pending = caller.call(callee.member, Frame(Kind.CALL, 0, 0, 1))
        with pytest.raises(WorkerDiedError, match=r"'b'.*it does not serve"):
            pending.wait(WAIT_SECONDS)

    def test_a_call_is_sent_once_its_thread_runs_and_a_frame_knows_its_pending(self, pair):
        caller, callee, served = pair
        frame = Frame(Kind.CALL, 0, 0, 1)
        pending = caller.call(callee.member, frame)
        assert frame.pending is pending and pending.wait(WAIT_SECONDS)
        assert len(served) == 1

    def test_calls_of_a_lost_peer_end_and_those_of_others_go_on(self, hub, pair):
        caller, callee, _ = pair
        later = Deferred()
        callee.start(lambda frame, may_block=True: later, lambda _: None)
        pending = caller.call(callee.member, Frame(Kind.CALL, 0, 0, 1))
        to_itself = caller.call(caller.member, Frame(Kind.CALL, 0, 0, 2))
        assert to_itself.wait(WAIT_SECONDS)
        error = WorkerDiedError("b", "it was killed")
        caller.on_peer_lost(callee.member, error)
        outcomes: list = []
        pending.on_done(outcomes.append)
        assert outcomes == [Error(error)]
        later.set(reply_to(Frame(Kind.CALL, 0, 0, 1)))  # too late
        with pytest.raises(WorkerDiedError):
            pending.wait(WAIT_SECONDS)


def reply_to(frame):
    return Frame(Kind.VALUE, 0, 1, frame.call_id, data=frame.data, buffers=frame.buffers)
