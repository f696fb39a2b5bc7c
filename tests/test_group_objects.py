"""Groups beside the default one: ``init_group``, ``Group``, ``get_group``."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import pytest
import ray
import targets
import torch
from conftest import eventually
from docstrings import run_example
from launching import connected

import rayrpc as rpc
from rayrpc import autograd, config, errors
from rayrpc.launch.detached import stop_group

WAIT = 60.0
GROUP = f"samplers-{os.getpid()}"


@pytest.fixture(scope="module")
def samplers(workers):
    """A group with two workers of its own; the default one has alice and bob."""
    group = rpc.init_group(GROUP, "me")
    group.start_workers(["sampler0", "sampler1"])
    yield group
    group.shutdown()


def _targets() -> Any:
    """Return functions that go by value, as local ones: workers cannot import this module."""

    def fail_at(name, value):
        if rpc.get_worker_info().name == name:
            raise KeyError(value)
        return value

    def die_at(name):
        if rpc.get_worker_info().name == name:
            os._exit(1)

    def fetch(rrefs):
        return [rref.to_here() for rref in rrefs]

    def join_by_own_name(group):
        return rpc.init_group(group, rpc.get_worker_info().name).me.name

    def call_each_other(group):
        return set(rpc.get_group(group).rpc_all("*", max, args=(1, 2)).wait())

    def leave(group):
        rpc.get_group(group).shutdown()

    return fail_at, die_at, fetch, join_by_own_name, call_each_other, leave


fail_at, die_at, fetch, join_by_own_name, call_each_other, leave = _targets()


class TestCalls:
    def test_calls_go_to_the_workers_of_the_group(self, samplers):
        assert samplers.rpc_sync("sampler0", targets.add, args=(1, 2)) == 3
        assert samplers.rpc_async("sampler1", max, kwargs={}, args=(1, 2)).wait() == 2
        assert samplers.remote("sampler1", torch.ones, args=(2,)).to_here().tolist() == [1, 1]
        with pytest.raises(RuntimeError, match="alice"):
            samplers.rpc_sync("alice", max, args=(1, 2))
        with pytest.raises(RuntimeError, match="sampler0"):
            rpc.rpc_sync("sampler0", max, args=(1, 2))
        assert rpc.rpc_sync("alice", max, args=(1, 2)) == 2

    def test_an_error_is_the_functions_own_and_timeouts_count(self, samplers):
        with pytest.raises(ValueError, match="invalid literal"):
            samplers.rpc_sync("sampler0", int, args=("x",))
        with pytest.raises(errors.CallTimeoutError):
            samplers.rpc_sync("sampler0", targets.nap, args=(5.0,), timeout=0.1)

    def test_a_worker_of_the_group_has_it_as_its_default_one(self, samplers):
        assert samplers.rpc_sync("sampler0", rpc.get_worker_info).name == "sampler0"
        args = ("sampler1", max, (1, 2))
        assert samplers.rpc_sync("sampler0", rpc.rpc_sync, args=args) == 2

    def test_this_process_serves_the_calls_of_both_groups(self, samplers):
        call = rpc.rpc_sync
        assert samplers.rpc_sync("sampler0", call, args=("me", os.getpid)) == os.getpid()
        assert rpc.rpc_sync("alice", call, args=("driver", os.getpid)) == os.getpid()

    def test_both_groups_take_many_calls_at_once(self, samplers, quick_switches):
        wrong = []

        def call(group, to):
            for number in range(100):
                if group.rpc_sync(to, targets.add, args=(number, 1)) != number + 1:
                    wrong.append(number)

        pairs = [(samplers, "sampler0"), (rpc.get_group(), "alice"), (samplers, "me")]
        threads = [threading.Thread(target=call, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        assert not wrong and not any(thread.is_alive() for thread in threads)


class TestNames:
    def test_a_group_tells_who_is_in_it(self, samplers):
        assert {info.name for info in samplers.workers()} == {"me", "sampler0", "sampler1"}
        assert [info.name for info in samplers.workers("sampler[1-9]")] == ["sampler1"]
        assert samplers.workers("Sampler*") == []
        assert samplers.name == GROUP and samplers.me.name == "me"
        assert samplers.get_worker_info("sampler1").name == "sampler1"
        assert repr(samplers).startswith(f"<rayrpc group {GROUP!r}: me of me, sampler")

    def test_groups_are_found_by_name(self, samplers):
        assert rpc.get_group(GROUP).me == samplers.me
        assert rpc.get_group().me == rpc.get_worker_info()
        assert rpc.get_group(rpc.get_group().name).me.name == "driver"
        with pytest.raises(errors.GroupError, match=f"not in group 'x', but in .*{GROUP!r}"):
            rpc.get_group("x")

    def test_a_process_joins_a_group_once(self, samplers):
        for name in (GROUP, rpc.get_group().name):
            with pytest.raises(errors.GroupError, match=f"is in group {name!r}"):
                rpc.init_group(name, "again")

    @pytest.mark.parametrize("arguments", [(1, "a"), ("a", None)])
    def test_names_are_texts(self, workers, arguments):
        with pytest.raises(TypeError, match="must be a str"):
            rpc.init_group(*arguments)

    def test_a_group_is_left_and_joined_again(self, samplers):
        for _ in range(2):
            group = rpc.init_group(f"{GROUP}-again", "me")
            group.start_workers(["other"])
            assert group.rpc_sync("other", max, args=(1, 2)) == 2
            group.shutdown()
            with pytest.raises(errors.GroupError, match="not in group"):
                rpc.get_group(f"{GROUP}-again")
        assert samplers.rpc_sync("sampler0", max, args=(1, 2)) == 2
        assert rpc.rpc_sync("alice", max, args=(1, 2)) == 2


class TestAll:
    def test_results_are_by_name(self, samplers):
        done = samplers.rpc_all("sampler*", torch.add, args=(torch.ones(1), 1))
        assert {name: value.tolist() for name, value in done.wait().items()} == {
            "sampler0": [2.0],
            "sampler1": [2.0],
        }
        found = samplers.rpc_all("*", max, args=(1, 2)).wait()
        assert found.keys() == {"me", "sampler0", "sampler1"}

    def test_failures_are_told_by_name(self, samplers):
        done = samplers.rpc_all("sampler*", fail_at, args=("sampler1", 7))
        with pytest.raises(errors.GroupCallError, match="sampler1: KeyError") as caught:
            done.wait()
        assert caught.value.results == {"sampler0": 7} and caught.value.group == GROUP
        assert isinstance(caught.value.errors["sampler1"], KeyError)
        again = pickle.loads(pickle.dumps(caught.value))
        assert str(again) == str(caught.value) and again.results == {"sampler0": 7}

    def test_a_worker_that_dies_is_one_of_them(self, samplers):
        samplers.start_workers(["mortal"])
        done = samplers.rpc_all("*", die_at, args=("mortal",), timeout=WAIT)
        with pytest.raises(errors.GroupCallError, match="1 failed") as caught:
            done.wait()
        assert isinstance(caught.value.errors["mortal"], errors.WorkerDiedError)
        assert eventually(lambda: not samplers.workers("mortal"))

    def test_none_that_matches_is_an_error_at_once(self, samplers):
        with pytest.raises(errors.GroupError, match=r"matches 'x\*'; it has me, sampler."):
            samplers.rpc_all("x*", max, args=(1, 2))


class TestRRefs:
    def test_their_methods_call_in_their_group(self, samplers):
        rref = samplers.remote("sampler0", torch.ones, args=(3,))
        assert rref.rpc_sync().sum().item() == 3
        assert rref.rpc_async().sum().wait().item() == 3
        assert rref.remote().sum().to_here().item() == 3
        assert (rref.lazy() + 1).tolist() == [2, 2, 2]
        assert samplers.rpc_sync("sampler1", fetch, args=([rref],))[0].tolist() == [1, 1, 1]

    def test_a_value_of_this_process_becomes_one(self, samplers):
        rref = samplers.rref([1, 2])
        assert rref.is_owner() and rref.owner() == samplers.me
        assert samplers.rpc_sync("sampler0", fetch, args=([rref],)) == [[1, 2]]

    @pytest.mark.parametrize("is_owned", [False, True])
    def test_another_groups_calls_refuse_them(self, samplers, is_owned):
        default = rpc.get_group()
        here = samplers.rref(1) if is_owned else samplers.remote("sampler0", max, args=(1, 2))
        there = rpc.RRef(1) if is_owned else rpc.remote("alice", max, args=(1, 2))
        for rref, group, to, other in (
            (here, default, "alice", samplers),
            (there, samplers, "sampler0", default),
        ):
            with pytest.raises(
                RuntimeError, match=f"of group {other.name!r}.* in group {group.name!r}"
            ):
                group.rpc_sync(to, fetch, args=([rref],))
            assert other.rpc_sync(other.workers()[-1], fetch, args=([rref],)) in ([1], [2])

    def test_one_of_a_group_that_was_left_says_so(self, samplers):
        group = rpc.init_group(f"{GROUP}-left", "me")
        rref = group.rref(1)
        group.shutdown()
        with pytest.raises(RuntimeError, match="which this worker has left"):
            rpc.rpc_sync("alice", fetch, args=([rref],))


class TestAutograd:
    def test_a_context_is_of_the_default_group(self, samplers):
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context:
            with pytest.raises(errors.SerializationError, match="context of distributed autograd"):
                samplers.rpc_sync("sampler0", torch.add, args=(x, 1))
            plain = samplers.rpc_sync("sampler0", torch.add, args=(x.detach(), 1))
            loss = (rpc.rpc_sync("alice", torch.mul, args=(x, 2)) * plain).sum()
            autograd.backward(context, [loss])
            assert autograd.get_gradients(context)[x].tolist() == [4.0, 4.0]
        assert samplers.rpc_sync("sampler0", torch.add, args=(x, 1)).tolist() == [2.0, 2.0]


def _in_a_task() -> Any:
    """Return tasks; as local functions they go by value: Ray's workers lack this module."""

    @ray.remote(num_cpus=0)
    def take_part(group, rank):
        made = rpc.init_group(group, f"rank{rank}", rank=rank, world_size=2)
        total = made.rpc_sync(f"rank{1 - rank}", max, args=(rank, 5))
        made.shutdown()
        return total

    @ray.remote(num_cpus=0)
    def join_no_default(group):
        made = rpc.init_group(group, "alone")
        try:
            rpc.rpc_sync("alone", max, args=(1, 2))
        except RuntimeError as exc:
            ref = rpc.object_ref(made.rpc_async("alone", max, args=(1, 2)))
            return str(exc), ray.get(ref), rpc.as_future(ref).wait()
        finally:
            made.shutdown()

    return take_part, join_no_default


take_part, join_no_default = _in_a_task()


class TestProcesses:
    def test_a_hosted_worker_may_be_in_another_group_too(self, samplers):
        group = f"{GROUP}-both"
        joined = samplers.rpc_all("sampler*", join_by_own_name, args=(group,), timeout=WAIT).wait()
        assert joined == {"sampler0": "sampler0", "sampler1": "sampler1"}
        calls = samplers.rpc_all("sampler*", call_each_other, args=(group,), timeout=WAIT).wait()
        assert calls["sampler0"] == calls["sampler1"] == {"sampler0", "sampler1"}
        samplers.rpc_all("sampler*", leave, args=(group,), timeout=WAIT).wait()
        assert samplers.rpc_sync("sampler0", max, args=(1, 2)) == 2

    def test_a_group_of_fixed_size_waits_for_all(self, ray_cluster):
        tasks = [take_part.remote(f"{GROUP}-static", rank) for rank in (0, 1)]
        assert ray.get(tasks, timeout=WAIT) == [5, 5]

    def test_a_process_need_not_have_a_default_group(self, ray_cluster):
        text, *results = ray.get(join_no_default.remote(f"{GROUP}-alone"), timeout=WAIT)
        assert "RPC has not been initialized" in text and results == [2, 2]


@pytest.mark.usefixtures("workers")
def test_the_examples_of_the_docstrings_run():
    run_example(rpc.init_group, rpc=rpc, torch=torch)
    run_example(rpc.start_workers, rpc=rpc)
    try:
        rpc.get_group("samplers").shutdown()
        run_example(rpc.connect, rpc=rpc, torch=torch)
    finally:
        stop_group(rpc.settings(), "samplers")
    for documented in (rpc.on_join, rpc.on_leave):
        run_example(documented, rpc=rpc)


class TestConnect:
    def test_a_process_calls_workers_and_is_none_of_them(self, samplers):
        pid, names, everyone = ray.get(ask_as_guest.remote(GROUP, "sampler0"), timeout=WAIT)
        assert pid == samplers.rpc_sync("sampler0", os.getpid)
        assert set(names) == set(everyone) == {"me", "sampler0", "sampler1"}
        assert eventually(lambda: len(samplers._agent.members.all()) == 3)

    def test_rrefs_and_callbacks_reach_a_guest(self, samplers):
        assert ray.get(use_as_guest.remote(GROUP, "sampler0"), timeout=WAIT) == [3.0, 4.0]

    def test_a_group_that_is_not_there_is_an_error_at_once(self, workers):
        with pytest.raises(errors.GroupError, match="no group 'nobody' with workers"):
            rpc.connect("nobody")

    @pytest.mark.parametrize("way", ["the direct transport", "Ray's calls"])
    def test_a_group_of_fixed_size(self, ray_cluster, way, monkeypatch):
        name = f"{GROUP}-fixed-{way.split()[-1]}"
        transport = "auto" if way == "the direct transport" else "ray"
        tasks = [stay.remote(name, rank, transport) for rank in range(2)]
        monkeypatch.setattr(config, "_current", rpc.settings().replace(transport=transport))
        made = connected(name)
        try:
            there = made.rref(torch.ones(2))
            total = made.rpc_sync("rank0", on_to, args=(name, "rank1", there), timeout=WAIT)
            assert total == 2.0 and [info.id for info in made.workers()] == [0, 1]
            del there
            made.rpc_sync("rank0", end)
            assert ray.get(tasks, timeout=WAIT) == [["rank0", "rank1"]] * 2
            # until it is reported, a call says that the worker has ended, which is true, too
            assert eventually(lambda: not made.workers())
            with pytest.raises(errors.WorkerDiedError, match="left the group"):
                made.rpc_sync("rank1", max, args=(1, 2))
        finally:
            made.shutdown()

    def test_none_can_be_started_into_a_group_of_fixed_size(self, ray_cluster):
        name = f"{GROUP}-whole"
        tasks = [stay.remote(name, rank, "auto") for rank in range(2)]
        made = connected(name)
        with pytest.raises(errors.GroupError, match="only be started into a dynamic group"):
            made.start_workers(["more"])
        made.rpc_sync("rank0", end)
        made.shutdown()
        assert ray.get(tasks, timeout=WAIT) == [["rank0", "rank1"]] * 2

    def test_a_member_need_not_connect(self, samplers):
        with pytest.raises(errors.GroupError, match="get_group"):
            rpc.connect(GROUP)


def _guests() -> Any:
    """Return tasks; as local functions they go by value."""

    @ray.remote(num_cpus=0)
    def ask_as_guest(group, to):
        made = rpc.connect(group)
        try:
            everyone = made.rpc_all("*", max, args=(1, 2)).wait()
            return made.rpc_sync(to, os.getpid), [w.name for w in made.workers()], list(everyone)
        finally:
            made.shutdown()

    @ray.remote(num_cpus=0)
    def use_as_guest(group, to):
        made = rpc.connect(group)
        try:
            rref = made.remote(to, torch.ones, args=(3,))
            mine = made.rref(torch.ones(4))
            there = made.rpc_sync(to, lambda owned: owned.to_here().sum().item(), args=(mine,))
            return [rref.rpc_sync().sum().item(), there]
        finally:
            made.shutdown()

    return ask_as_guest, use_as_guest


ask_as_guest, use_as_guest = _guests()


def _in_a_group_of_fixed_size() -> Any:
    """Return a task that takes part in one until it is told to end, and what it is called for."""

    @ray.remote(num_cpus=0)
    def stay(group, rank, transport):
        rpc.configure(transport=transport)
        made = rpc.init_group(group, f"rank{rank}", rank=rank, world_size=2)
        if rank == 0:
            rpc._ended = threading.Event()
            rpc._ended.wait(WAIT)
        names = [info.name for info in made.workers()]
        made.shutdown(timeout=WAIT)  # rank 1 serves in it
        return names

    def on_to(group, to, rref):
        return rpc.get_group(group).rpc_sync(to, lambda rref: rref.to_here().sum().item(), (rref,))

    def end():
        rpc._ended.set()

    return stay, on_to, end


stay, on_to, end = _in_a_group_of_fixed_size()
