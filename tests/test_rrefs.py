"""RRefs over real workers: counting, confirming, deleting, sharing, errors."""

import functools
import gc
import io
import pickle
import threading
import time

import pytest
import targets
import torch
from conftest import eventually

import rayrpc as rpc
from rayrpc import errors


def counts(name):
    info = rpc.rpc_sync(name, targets.rref_info)
    return int(info["num_owner_rrefs"]), int(info["num_forks"])


def is_empty(name):
    return counts(name) == (0, 0)


def finish(result):
    return result.wait() if isinstance(result, torch.futures.Future) else result


@pytest.fixture(autouse=True)
def nothing_left(workers):
    """Every test ends with empty tables everywhere."""
    yield
    for name in (*workers, "driver"):
        rpc.rpc_sync(name, targets.drop, args=("rref",))
    gc.collect()
    for name in (*workers, "driver"):
        assert eventually(functools.partial(is_empty, name)), (name, counts(name))


def test_the_owner_keeps_the_value_until_the_last_user_goes(workers):
    rref = rpc.remote("alice", targets.Adder, args=(1,))
    assert rref.rpc_sync().add(1) == 2
    assert rref.confirmed_by_owner() and not rref.is_owner()
    assert rref.owner_name() == "alice" and rref.owner() == rpc.get_worker_info("alice")
    rpc.rpc_sync("bob", targets.keep, args=("rref", rref))
    assert eventually(lambda: counts("alice") == (1, 2))
    del rref
    gc.collect()
    assert eventually(lambda: counts("alice") == (1, 1))
    rpc.rpc_sync("bob", targets.drop, args=("rref",))
    assert eventually(lambda: counts("alice") == (0, 0))


def test_an_own_value_is_counted_only_while_it_is_shared(workers):
    rref = rpc.RRef(torch.ones(3))
    assert rref.is_owner() and rref.local_value().sum() == 3
    assert counts("driver") == (0, 0)
    assert torch.equal(rpc.rpc_sync("alice", targets.read, args=(rref,)), torch.ones(3))
    rpc.rpc_sync("alice", targets.keep, args=("rref", rref))
    assert eventually(lambda: counts("driver") == (1, 1))
    rpc.rpc_sync("alice", targets.drop, args=("rref",))
    assert eventually(lambda: counts("driver") == (0, 0))
    assert rref.local_value().sum() == 3


def test_a_value_called_by_rref_is_the_very_object(workers):
    rref = rpc.remote("alice", targets.Adder, args=(1,))
    assert [rref.rpc_sync().raise_base(1) for _ in range(3)] == [2, 3, 4]
    assert rref.rpc_async().raise_base(1).wait() == 5
    assert rref.remote().raise_base(1).to_here() == 6


def test_calls_on_a_counted_rref_need_no_message_of_the_protocol(workers):
    """The caller lends it for the call: nothing is counted, asked for or taken back."""
    rref = rpc.remote("alice", targets.Adder, args=(1,))
    assert rref.rpc_sync().add(1) == 2
    rref._get_future().wait()
    agent = rpc._get_current_rpc_agent()
    sent = []
    take_pending = agent.rrefs.take_pending

    def record(to):
        sent.append(take_pending(to))
        return sent[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent.rrefs, "take_pending", record)
        for _ in range(3):
            assert rref.rpc_sync().add(1) == 2
            assert rref.rpc_async().add(2).wait() == 3
    assert sent == [(0, ())] * 6
    assert counts("alice") == (1, 1)


@pytest.mark.parametrize("api", ["rpc_sync", "rpc_async"])
def test_an_rref_that_is_lent_is_counted_until_the_call_is_answered(workers, api):
    """Also when the caller gives up on the call, and drops its last handle."""
    rref = rpc.remote("alice", targets.Adder, args=(1,))
    rref._get_future().wait()
    assert rref.rpc_sync().add(1) == 2
    with pytest.raises(errors.CallTimeoutError):
        finish(getattr(rref, api)(timeout=0.2).wait_for("rref"))
    del rref
    gc.collect()
    time.sleep(0.1)
    assert counts("alice") == (1, 1)
    rpc.rpc_sync("alice", targets.keep, args=("rref", True))
    assert eventually(lambda: counts("alice") == (0, 0))


def test_async_methods_are_resolved_on_the_owner(workers):
    rref = rpc.remote("alice", targets.Adder, args=(10,))
    assert rref.rpc_sync().add_at("bob", 1) == 11
    assert rref.rpc_async().add_at("bob", 2).wait() == 12
    assert rref.remote().add_at("bob", 3).to_here() == 13


def test_arguments_are_confirmed_before_the_function_runs(workers):
    rref = rpc.remote("alice", targets.nap, args=(0.2, 1))
    assert rpc.rpc_sync("bob", targets.is_confirmed, args=(rref,))
    assert rpc.remote("bob", targets.is_confirmed, args=(rref,)).to_here()


def test_rrefs_travel_in_containers_and_results(workers):
    rrefs = rpc.rpc_sync("alice", targets.make_rrefs, args=([1, 2, 3],))
    assert [r.to_here() for r in rrefs] == [1, 2, 3]
    assert {r.owner_name() for r in rrefs} == {"alice"}
    back = rpc.rpc_sync("bob", targets.identity, args=({"a": rrefs},))["a"]
    assert [r.to_here() for r in back] == [1, 2, 3]
    at_owner = rpc.rpc_sync("alice", targets.identity, args=(back[0],))
    assert at_owner.to_here() == 1


def test_errors_of_the_creating_call_surface_where_the_rref_is_used(workers):
    rref = rpc.remote("alice", targets.fail)
    with pytest.raises(ValueError, match="as expected"):
        rref.to_here()
    with pytest.raises(ValueError, match="as expected"):
        rref.rpc_sync().anything()
    with pytest.raises(ValueError, match="as expected"):
        rpc.rpc_sync("bob", targets.read, args=(rref,))
    own = rpc.remote("driver", targets.fail)
    with pytest.raises(ValueError, match="as expected"):
        own.to_here()


def test_a_creation_that_timed_out_says_so(workers):
    rref = rpc.remote("alice", targets.nap, args=(0.5,), timeout=0.05)
    with pytest.raises(errors.CallTimeoutError):
        rref._get_future().wait()
    for use in (rref.to_here, lambda: rpc.rpc_sync("bob", targets.read, args=(rref,))):
        with pytest.raises(errors.CallTimeoutError, match="RRef creation"):
            use()


def test_to_here_has_a_timeout_of_its_own(workers):
    rref = rpc.remote("alice", targets.nap, args=(0.5, 7))
    with pytest.raises(errors.CallTimeoutError):
        rref.to_here(timeout=0.05)
    assert rref.to_here() == 7


def test_the_value_itself_is_only_on_the_owner(workers):
    rref = rpc.remote("alice", targets.add, args=(1,))
    with pytest.raises(RuntimeError, match=r"can't call localValue\(\) on user.*Call it on owner"):
        rref.local_value()


def test_plain_pickle_refuses_rrefs(workers):
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        pickle.dumps(rpc.RRef(1))
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        torch.save(rpc.RRef(1), io.BytesIO())


def test_the_type_is_asked_for_once(workers):
    rref = rpc.remote("alice", targets.Adder)
    assert rref._get_type() is targets.Adder
    assert rref._get_type(blocking=False) is rref._get_type(blocking=False)
    with pytest.raises(AttributeError, match="has no attribute 'missing'"):
        rref.rpc_sync().missing()


def test_rref_can_be_subscripted(workers):
    assert rpc.RRef[int] is not None
    assert rpc.RRef[int](3).local_value() == 3


def test_a_share_that_cannot_be_sent_is_taken_back(workers):
    rref = rpc.remote("alice", targets.add, args=(1,))
    with pytest.raises(errors.SerializationError):
        rpc.rpc_sync("bob", targets.add, args=(rref, threading.Lock()))


def test_many_rrefs_leave_nothing_behind(workers):
    def round_of(number):
        rrefs = [rpc.remote("alice", targets.add, args=(i,)) for i in range(number)]
        assert rrefs[-1].to_here() == number
        del rrefs
        gc.collect()
        assert eventually(lambda: counts("alice") == (0, 0), 60)
        assert eventually(lambda: rpc._rref_context_get_debug_info()["num_pending_users"] == "0")

    def objects():
        time.sleep(0.2)
        return targets.objects(), rpc.rpc_sync("alice", targets.objects)

    round_of(1000)
    before = objects()
    for _ in range(4):
        round_of(1000)
    # far fewer than one object an RRef is left, of any kind: what is left is of threads and Ray
    after = objects()
    assert all(b - a < 2000 for a, b in zip(before, after, strict=True)), (before, after)
