"""The handle of an RRef: what it says, does and refuses, on the owner, on users, and afterwards."""

import gc
import threading
from typing import Any

import pytest
import torch
from conftest import eventually, run_in_threads
from memory_workers import WAIT, memory_group

from rayrpc._concurrency.outcome import Value
from rayrpc._protocol.ids import GloballyUniqueId
from rayrpc._runtime import current
from rayrpc._runtime.objects import NoStore
from rayrpc._runtime.rrefs.handle import RRef
from rayrpc.errors import (
    CallTimeoutError,
    NotInitializedError,
    RpcError,
    WorkerDiedError,
)

begun, go = threading.Event(), threading.Event()
kept: list[object] = []


class Thing:
    def __init__(self, number):
        self.number = number

    def __eq__(self, other):
        return type(other) is Thing and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


def make(number):
    return Thing(number)


def make_later(number):
    begun.set()
    go.wait(WAIT)
    return Thing(number)


def fail():
    raise KeyError("as expected")


def keep(rref):
    kept.append(rref)


def give():
    return kept[0]


def number_of(rref):
    return rref.local_value().number


@pytest.fixture
def start():
    begun.clear()
    go.clear()
    with memory_group() as start:
        yield start
        go.set()
        kept.clear()
        current.set_agent(None)


@pytest.fixture
def a(start):
    """A worker, which is that of this process."""
    made = start("a")
    current.set_agent(made.agent)
    return made


@pytest.fixture
def b(a, start):
    return start("b")


@pytest.fixture
def used(a, b):
    """An RRef of a value of b, which b has confirmed."""
    rref = a.remote(b, make, 3)
    assert rref._get_future().wait() is None and eventually(rref.confirmed_by_owner)
    return rref


class TestMaking:
    def test_without_a_worker_there_is_none(self):
        with pytest.raises(NotInitializedError, match=r"^Current RPC agent is not set!"):
            RRef(1)

    @pytest.mark.parametrize("value", [1, torch.nn.Linear(1, 1)], ids=["int", "Module"])
    def test_a_type_is_for_scripted_modules_alone(self, a, value):
        with pytest.raises(RuntimeError, match=r"^type_hint should only be specified"):
            RRef(value, torch.nn.Module)

    def test_a_scripted_module_has_one(self, a):
        module = torch.jit.script(torch.nn.Linear(1, 1))
        assert RRef(module, torch.nn.Module).local_value() is module
        with pytest.raises(RuntimeError, match="must provide its ModuleInterface type hint"):
            RRef(module)

    def test_each_has_an_identity_of_its_own(self, a, quick_switches):
        made: list[RRef] = []

        def make_some():
            made.extend(RRef(number) for number in range(50))

        run_in_threads(make_some, [()] * 4, WAIT)
        assert len({str(rref) for rref in made}) == 200


class TestOwner:
    def test_it_has_the_very_value(self, a):
        value = [1]
        rref = RRef(value)
        assert rref.is_owner() and rref.local_value() is value and rref.to_here() is value
        assert rref.owner() == a.agent.info and rref.owner_name() == "a"
        assert rref.confirmed_by_owner()

    def test_it_says_so(self, a):
        rref = RRef(1)
        text = str(rref)
        assert text == repr(rref) and text.startswith("OwnerRRef(GloballyUniqueId(created_on=0, ")
        rows = rref._repr_html_()
        assert "<td>a (id 0)</td>" in rows and "<td>owner</td>" in rows and "<td>yes</td>" in rows

    def test_a_timeout_has_to_be_a_number_there_too(self, a):
        soon: Any = "soon"
        with pytest.raises(TypeError):
            RRef(1).to_here(timeout=soon)

    def test_its_creation_has_ended(self, a):
        rref = RRef(1)
        future = rref._get_future()
        assert future.done() and future.wait() is None and rref._get_future() is future

    def test_its_type_is_known(self, a):
        rref = RRef(Thing(1))
        assert rref._get_type() is Thing
        future = rref._get_type(blocking=False)
        assert future.done() and future.wait() is Thing and rref._get_type(blocking=False) is future

    def test_it_waits_for_the_function_that_makes_its_own_value(self, a):
        rref = a.remote(a, make_later, 3)
        assert rref.is_owner() and begun.wait(WAIT)
        got: list[object] = []
        thread = threading.Thread(target=lambda: got.append(rref.to_here()))
        thread.start()
        assert not got
        go.set()
        thread.join(WAIT)
        assert got == [Thing(3)] and rref.to_here() is got[0]

    def test_without_a_cluster_it_has_no_reference_to_an_object(self, a):
        with pytest.raises(RpcError, match="no Ray cluster"):
            RRef(1).object_ref()

    def test_a_reference_to_an_object_is_one_of_its_worker(self, a):
        class Store(NoStore):
            def put(self, outcome):
                return "ref", outcome

        a.agent.objects = Store()
        assert RRef(1).object_ref() == ("ref", Value(1))


class TestUser:
    def test_it_has_a_copy(self, used, b):
        assert not used.is_owner() and used.owner() == b.agent.info and used.owner_name() == "b"
        first = used.to_here()
        assert first == Thing(3) and used.to_here() is not first

    def test_it_says_so(self, used):
        text = str(used)
        assert text == repr(used) and text.startswith("UserRRef(RRefId = GloballyUniqueId(created")
        assert ", ForkId = GloballyUniqueId(created_on=0, " in text
        rows = used._repr_html_()
        assert "<td>b (id 1)</td>" in rows and "<td>user</td>" in rows and "<td>yes</td>" in rows

    def test_until_its_owner_has_answered_it_is_not_confirmed(self, a, b):
        rref = a.remote(b, make_later, 3)
        assert begun.wait(WAIT)
        assert not rref.confirmed_by_owner() and "<td>not yet</td>" in rref._repr_html_()
        go.set()
        assert eventually(rref.confirmed_by_owner)

    def test_the_value_itself_is_refused_in_torchs_words(self, used, a, b):
        with pytest.raises(RuntimeError) as raised:
            used.local_value()
        assert str(raised.value) == (
            f"For UserRRef(rref_id={used._rref_id}, fork_id={used._fork_id}), can't call "
            f"localValue() on user {a.agent.info}. Call it on owner {b.agent.info}"
        )

    def test_its_owner_may_be_asked_by_all_threads(self, used, quick_switches):
        def look():
            for _ in range(10):
                assert used.to_here() == Thing(3) and used._get_type() is Thing

        run_in_threads(look, [()] * 4, WAIT)

    def test_one_that_is_dropped_while_its_value_is_fetched_lives_until_then(self, a, b):
        rref = a.remote(b, make_later, 3)
        got: list[object] = []
        thread = threading.Thread(target=lambda fetch: got.append(fetch()), args=(rref.to_here,))
        thread.start()
        assert eventually(lambda: len(b.agent.callee.under_way()) == 2)  # the fetch, too
        del rref
        gc.collect()
        go.set()
        thread.join(WAIT)
        assert got == [Thing(3)]

    def test_back_at_its_owner_it_is_the_owners(self, used, a, b):
        assert a.sync(b, number_of, used) == 3
        a.sync(b, keep, used)
        (there,) = kept
        assert isinstance(there, RRef) and there.is_owner() and there.local_value() == Thing(3)


class TestCreation:
    def test_its_future_is_one_and_ends_with_the_creation(self, a, b):
        rref = a.remote(b, make_later, 3)
        future = rref._get_future()
        assert rref._get_future() is future and not future.done()
        go.set()
        assert future.wait() is None

    def test_hooks_may_replace_the_future_and_profilers_add_one(self, used):
        mine, profiled = torch.futures.Future(), torch.futures.Future()
        used._set_future(mine)
        assert used._get_future() is mine and used._get_profiling_future() is mine
        used._set_profiling_future(profiled)
        assert used._get_profiling_future() is profiled and used._get_future() is mine

    def test_its_function_may_fail_and_the_value_is_that_error(self, a, b):
        rref = a.remote(b, fail)
        assert rref._get_future().wait() is None
        for use in (rref.to_here, lambda: a.sync(b, number_of, rref), rref._get_type):
            with pytest.raises(KeyError, match="as expected"):
                use()

    def test_one_that_timed_out_is_named_wherever_it_is_used(self, a, b, start):
        rref = a.remote(b, make_later, 3, timeout=0.02)
        with pytest.raises(CallTimeoutError):
            rref._get_future().wait()
        c = start("c")
        uses = [rref.to_here, rref._get_type, rref.object_ref, lambda: a.sync(c, keep, rref)]
        for use in uses:
            with pytest.raises(CallTimeoutError) as raised:
                use()
            assert str(raised.value).startswith(
                "RRef creation via rpc.remote timed out, and it is possible that the RRef on the "
                "owner node does not exist: RPC ran for more than set timeout (20 ms)"
            )
            assert isinstance(raised.value.__cause__, CallTimeoutError)


class TestType:
    def test_it_is_asked_for_once(self, used, b):
        served = b.agent.callee.served
        assert used._get_type() is Thing is used._get_type(blocking=False).wait()
        assert b.agent.callee.served == served + 1

    def test_it_is_asked_for_again_after_an_error(self, a, b):
        rref = a.remote(b, make_later, 3)
        with pytest.raises(CallTimeoutError):
            rref._get_type(timeout=0.02)
        go.set()
        assert rref._get_type() is Thing

    @pytest.mark.parametrize("blocking", [True, False])
    def test_so_it_is_after_an_error_of_its_future(self, a, b, blocking):
        rref = a.remote(b, make_later, 3)
        with pytest.raises(CallTimeoutError):
            rref._get_type(timeout=0.02, blocking=False).wait()
        go.set()
        rref.to_here()
        kind = rref._get_type(blocking=blocking)
        assert (kind if blocking else kind.wait()) is Thing

    def test_a_future_of_it_needs_no_wait(self, a, b):
        rref = a.remote(b, make_later, 3)
        future = rref._get_type(blocking=False)
        assert not future.done() and rref._get_type(blocking=False) is future
        go.set()
        assert future.wait() is Thing


class TestDeletion:
    @pytest.fixture
    def deleted(self, used, a, b):
        """One that was deleted before a shutdown, while the program still has its handle."""
        assert a.agent.rrefs.delete_all(WAIT) and eventually(b.is_empty)
        return used

    @pytest.mark.parametrize(
        ("use", "named"),
        [
            (lambda a, b, rref: rref.to_here(), "to_here() on it"),
            (lambda a, b, rref: rref.object_ref(), "object_ref() on it"),
            (lambda a, b, rref: rref._get_type(), "_get_type() on it"),
            (lambda a, b, rref: a.sync(b, keep, rref), "fork an UserRRef"),
            (lambda a, b, rref: rref._serialize(), "fork an UserRRef"),
        ],
    )
    def test_a_deleted_one_refuses_by_its_identities(self, deleted, a, b, use, named):
        with pytest.raises(RpcError) as raised:
            use(a, b, deleted)
        assert str(raised.value) == (
            f"User RRef with RRefId={deleted._rref_id} and ForkId={deleted._fork_id} has been "
            f"deleted. Cannot call {named} after deletion."
        )

    @pytest.mark.parametrize("use", ["to_here", "_get_type", "object_ref"])
    def test_one_whose_owner_died_says_that(self, used, a, b, use):
        b.die()
        with pytest.raises(WorkerDiedError, match="'b' is gone: killed by the test"):
            getattr(used, use)()

    def test_one_whose_owner_died_cannot_be_sent(self, used, a, b, start):
        c = start("c")
        b.die()
        with pytest.raises(WorkerDiedError, match="'b' is gone"):
            a.sync(c, keep, used)

    @pytest.mark.parametrize("died", [False, True])
    def test_after_the_end_of_its_own_worker_the_owners_death_does_not_matter(
        self, used, a, b, died
    ):
        if died:
            b.die()
            assert eventually(lambda: a.agent.members.death_of_owner(b.agent.info))
        a.agent.shutdown()
        with pytest.raises(RpcError, match=r"has been deleted\. Cannot call to_here"):
            used.to_here()

    def test_the_last_handle_of_a_value_releases_it(self, used, a, b):
        assert b.agent.rrefs.counts() == (1, 0) and a.agent.rrefs.counts() == (0, 1)
        del used  # the fixture's is left
        gc.collect()
        assert b.agent.rrefs.counts() == (1, 0)


class TestOtherGroups:
    def test_a_call_of_another_group_refuses_it(self, used, a):
        with memory_group() as start:
            x, y = start("x"), start("y")
            for rref in (used, RRef(1)):
                with pytest.raises(RpcError) as raised:
                    x.sync(y, keep, rref)
                assert str(raised.value) == (
                    f"{rref} is of group 'key', and cannot be sent in group 'key': send its "
                    "value, or an ObjectRef of it (rref.object_ref())"
                )
            kept.append(used)
            with pytest.raises(RpcError, match="cannot be sent in group 'key'"):
                x.sync(y, give)  # as a result
            a.agent.shutdown()
            with pytest.raises(RpcError, match=r"is of group 'key', which this worker has left$"):
                x.sync(y, keep, used)

    def test_its_identity_may_be_that_of_another_one(self, used, b):
        with memory_group() as start:
            x, y = start("x"), start("y")
            other = x.remote(y, make, 9)
            assert str(other) == str(used)
            assert other.to_here() == Thing(9) and used.to_here() == Thing(3)


class TestTuples:
    def test_a_library_may_carry_one_as_a_tuple(self, used, b):
        fork = used._serialize()
        assert fork[0] == used._rref_id and isinstance(fork[1], GloballyUniqueId)
        made = RRef._deserialize(tuple(x if type(x) is int else tuple(x) for x in fork))
        assert not made.is_owner() and made.to_here() == Thing(3) and made.owner_name() == "b"
        assert made._fork_id != used._fork_id

    def test_so_it_may_one_of_this_worker(self, a):
        value = [1]
        made = RRef._deserialize(RRef(value)._serialize())
        assert made.is_owner() and made.local_value() is value

    def test_without_a_worker_it_arrives_nowhere(self, used):
        fork = used._serialize()
        current.set_agent(None)
        with pytest.raises(NotInitializedError):
            RRef._deserialize(fork)


class TestLending:
    """A call lends an RRef to its owner, and forks it for everybody else."""

    def test_one_that_is_counted_is_lent_to_its_owner_alone(self, used, a, b):
        lend = a.agent.rrefs.lend
        assert lend(used, b.member.id) == used._rref_id
        assert lend(used, a.member.id) is None and lend(used, None) is None

    def test_one_that_is_not_counted_yet_is_not(self, a, b):
        rref = a.remote(b, make_later, 3)
        assert begun.wait(WAIT)
        assert a.agent.rrefs.lend(rref, b.member.id) is None
        go.set()
        assert eventually(lambda: a.agent.rrefs.lend(rref, b.member.id) is not None)

    def test_the_owners_own_is_not(self, a):
        assert a.agent.rrefs.lend(RRef(1), a.member.id) is None

    def test_one_whose_creation_failed_for_its_caller_is_not(self, a, b):
        rref = a.remote(b, make_later, 3, timeout=0.02)
        with pytest.raises(CallTimeoutError):
            rref._get_future().wait()
        go.set()
        assert eventually(rref.confirmed_by_owner)  # by the late reply
        assert a.agent.rrefs.lend(rref, b.member.id) is None
