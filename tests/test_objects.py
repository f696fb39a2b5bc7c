"""Objects of Ray's store in calls, Futures and RRefs; two programs that share them."""

import functools
import gc
import subprocess
import sys
import threading
import time
from typing import Any, cast

import pytest
import ray
import targets
import torch
from conftest import eventually
from docstrings import run_example
from ray._private import worker as ray_worker

import rayrpc as rpc
from rayrpc import errors

WAIT = 60.0


def _tasks() -> Any:
    """Return tasks and an actor; as local ones they go by value: Ray's workers lack this module."""

    @ray.remote(num_cpus=0)
    def double(x, seconds=0.0):
        time.sleep(seconds)
        return 2 * x

    @ray.remote(num_cpus=0)
    def fail(text):
        raise ValueError(text)

    @ray.remote(num_cpus=0)
    class Box:
        """Keeps what it is given, and completes when it is told to."""

        def __init__(self):
            self.kept = None
            self.opened = threading.Event()

        def keep(self, value):
            self.kept = value

        def get(self):
            return self.kept

        def wait(self, value):
            self.opened.wait(WAIT)
            return value

        def open(self):
            self.opened.set()

    return double, fail, Box


double, fail, Box = _tasks()


@pytest.fixture
def box(workers):
    made = Box.options(max_concurrency=4).remote()
    yield made
    ray.kill(made)


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


def inside(values):
    return [ray.get(each) if isinstance(each, ray.ObjectRef) else each for each in values]


def put(value):
    return {"ref": ray.put(value)}


def arange_later(number):
    targets.wait_until_kept("arange_later")
    return torch.arange(number)


def raise_with(ref):
    raise LookupError(ref)


def references():
    """Return how many objects of the store this process refers to.

    Ray may keep an entry without references for an object that was borrowed when its owner died.
    """
    gc.collect()
    ray_itself: Any = ray_worker.global_worker
    counts = ray_itself.core_worker.get_all_reference_counts().values()
    return sum(1 for count in counts if count["local"] or count["submitted"])


def settled_references():
    """Return the same; one is missing while the worker asks the directory for changes again."""
    counts = []
    for _ in range(10):
        counts.append(references())
        time.sleep(0.1)
    return max(counts)


class TestReferencesOfFutures:
    def test_a_value_that_is_there_or_that_comes_later(self, workers, box):
        assert ray.get(rpc.object_ref(done(torch.ones(3)))).tolist() == [1, 1, 1]
        future = torch.futures.Future()
        ref = rpc.object_ref(future)
        assert ray.wait([ref], timeout=0.3) == ([], [ref])
        later = double.remote(ref)
        future.set_result(torch.arange(4))
        assert ray.get(ref, timeout=WAIT).tolist() == [0, 1, 2, 3]
        assert ray.get(later, timeout=WAIT).tolist() == [0, 2, 4, 6]

    def test_of_a_call_that_runs(self, workers):
        refs = [
            rpc.object_ref(rpc.rpc_async("alice", targets.nap, args=(0.01, n))) for n in range(20)
        ]
        assert ray.get(refs, timeout=WAIT) == list(range(20))

    def test_a_thousand_that_wait_at_once(self, workers):
        futures = [torch.futures.Future() for _ in range(1000)]
        refs = [rpc.object_ref(future) for future in futures]
        for number, future in reversed(list(enumerate(futures))):
            future.set_result(number)
        assert ray.get(refs, timeout=WAIT) == list(range(1000))

    @pytest.mark.parametrize("text", ["as expected", "C:\\new\n'quoted'"])
    def test_an_error_is_raised_of_its_own_type(self, workers, text):
        failed = torch.futures.Future()
        ref = rpc.object_ref(failed)
        failed.set_exception(LookupError(text))
        caught: Any
        with pytest.raises(LookupError) as caught:
            ray.get(ref, timeout=WAIT)
        assert caught.value.cause.args == (text,)
        with pytest.raises(RuntimeError, match="picky error"):  # its type takes more than a text
            ray.get(rpc.object_ref(rpc.rpc_async("bob", targets.fail_picky)), timeout=WAIT)
        with pytest.raises(ValueError, match="as expected"):  # of what takes it, too
            ray.get(double.remote(rpc.object_ref(rpc.rpc_async("bob", targets.fail))), timeout=WAIT)

    def test_a_value_that_cannot_be_sent_is_an_error(self, workers):
        with pytest.raises(TypeError, match="cannot be sent"):
            ray.get(rpc.object_ref(done(threading.Lock())))
        with pytest.raises(TypeError, match="it has an RRef"):
            ray.get(rpc.object_ref(done([rpc.RRef(1)])))

    def test_a_value_with_references_keeps_their_objects(self, workers, box):
        ref = rpc.object_ref(done({"inner": ray.put(17)}))
        ray.get(box.keep.remote([ref]))
        del ref
        gc.collect()
        (outer,) = ray.get(box.get.remote())
        assert ray.get(ray.get(outer)["inner"], timeout=WAIT) == 17

    def test_what_is_read_is_the_readers_own(self, workers):
        source = torch.zeros(200_000)
        ref = rpc.object_ref(done(source))
        source += 1
        first, second = ray.get(ref), ray.get(ref)
        first += 2
        assert not second.any() and not ray.get(ref).any()

    def test_only_a_future_has_one(self, workers):
        with pytest.raises(TypeError, match="object_ref takes a torch"):
            rpc.object_ref(cast(Any, 3))


class TestReferencesOfRRefs:
    @pytest.mark.parametrize("owner", ["alice", "driver"])
    def test_a_value_that_is_there_or_that_comes_later(self, workers, owner):
        rref = rpc.remote(owner, torch.ones, args=(3,))
        assert ray.get(rref.object_ref(), timeout=WAIT).tolist() == [1, 1, 1]
        ref = rpc.remote(owner, arange_later, args=(3,)).object_ref()  # does not wait for it
        rpc.rpc_sync(owner, targets.keep, args=("arange_later", True))
        assert ray.get(double.remote(ref), timeout=WAIT).tolist() == [0, 2, 4]
        rpc.rpc_sync(owner, targets.drop, args=("arange_later",))

    @pytest.mark.parametrize("owner", ["alice", "driver"])
    def test_an_error_of_the_creating_call_is_raised(self, workers, owner):
        rref = rpc.remote(owner, targets.fail)
        with pytest.raises(ValueError, match="as expected"):
            ray.get(rref.object_ref(), timeout=WAIT)

    def test_it_is_a_copy_of_the_value_as_it_is(self, workers):
        rref = rpc.remote("alice", torch.zeros, args=(2,))
        ref = rref.object_ref()
        rref.rpc_sync().add_(1)
        assert ray.get(ref).tolist() == [0, 0] and ray.get(rref.object_ref()).tolist() == [1, 1]

    def test_a_worker_takes_it_that_was_given_the_rref(self, workers):
        rref = rpc.remote("alice", torch.ones, args=(2,))
        assert rpc.rpc_sync("bob", take_object, args=(rref,)).tolist() == [2, 2]


def is_lost(ref):
    try:
        ray.get(ref, timeout=WAIT)
    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError):
        return True
    return False


def take_object(rref):
    return 2 * ray.get(rref.object_ref())


class TestArguments:
    @pytest.mark.parametrize("to", ["alice", "driver"])
    def test_one_that_is_a_reference_arrives_as_its_value(self, workers, to):
        ref = double.remote(torch.ones(3), 0.2)
        assert rpc.rpc_sync(to, targets.add, args=(ref,)).tolist() == [3, 3, 3]
        assert rpc.rpc_async(to, targets.add, args=(1, ref)).wait().tolist() == [3, 3, 3]
        got = rpc.remote(to, targets.add, args=(1,), kwargs={"y": ref}).to_here()
        assert got.tolist() == [3, 3, 3]
        got += 1  # writable
        big = ray.put(torch.zeros(300_000))
        assert rpc.rpc_sync(to, torch.Tensor.add_, args=(big, 1)).all()
        assert not ray.get(big).any()

    @pytest.mark.parametrize("to", ["alice", "driver"])
    def test_one_in_an_argument_or_in_a_result_stays_a_reference(self, workers, to):
        ref = double.remote(21, 0.2)
        assert rpc.rpc_sync(to, inside, args=([ref, 1],)) == [42, 1]
        got = rpc.rpc_sync(to, put, args=(17,))
        assert isinstance(got["ref"], ray.ObjectRef) and ray.get(got["ref"]) == 17
        assert ray.get(rpc.rpc_async(to, put, args=(18,)).wait()["ref"]) == 18
        assert ray.get(rpc.remote(to, put, args=(19,)).to_here()["ref"]) == 19
        same = rpc.rpc_sync(to, targets.identity, args=((ref, [ref]),))
        assert same[0] == same[1][0] == ref

    def test_from_a_worker_to_the_driver(self, workers):
        ref = double.remote(21)
        assert rpc.rpc_sync("alice", send_on, args=("driver", [ref])) == ([42], 42)

    def test_methods_of_rrefs_take_them(self, workers):
        rref = rpc.remote("alice", targets.Adder, args=(1,))
        assert rref.rpc_sync().add(double.remote(20)) == 41
        assert rref.rpc_async().add(x=double.remote(20)).wait() == 41
        assert rref.remote().add(double.remote(20)).to_here() == 41

    def test_an_rref_beside_it_is_counted_once(self, workers):
        rref = rpc.remote("alice", torch.ones, args=(2,))
        got = rpc.rpc_sync("bob", to_here_and, args=(double.remote(1), rref))
        assert got == (2, [1, 1])
        with pytest.raises(ValueError, match="no value"):
            rpc.rpc_sync("bob", to_here_and, args=(fail.remote("no value"), rref))
        del rref
        gc.collect()
        assert eventually(lambda: rpc.rpc_sync("alice", targets.count_owned) == 0)

    def test_an_error_of_the_object_is_that_of_the_call(self, workers):
        for error in ("no value", "IndexError: no"):
            with pytest.raises(ValueError, match=error):
                rpc.rpc_sync("alice", targets.add, args=(fail.remote(error),))
            with pytest.raises(ValueError, match=error):
                rpc.rpc_async("alice", targets.add, args=(1, fail.remote(error))).wait()
            with pytest.raises(ValueError, match=error):
                rpc.remote("alice", targets.add, args=(fail.remote(error),)).to_here()

    def test_calls_that_wait_for_objects_take_no_slot(self, workers, box):
        ref = box.wait.remote(1)
        waiting = [rpc.rpc_async("alice", targets.add, args=(ref,)) for _ in range(40)]
        assert rpc.rpc_sync("alice", targets.add, args=(2,)) == 3  # all 16 slots are free
        assert not any(future.done() for future in waiting)
        ray.get(box.open.remote())
        assert [future.wait() for future in waiting] == [2] * 40

    def test_a_timeout_counts_the_wait_for_the_object(self, workers, box):
        start = time.monotonic()
        with pytest.raises(errors.CallTimeoutError):
            rpc.rpc_sync("alice", targets.add, args=(box.wait.remote(1),), timeout=0.5)
        assert time.monotonic() - start < 20

    def test_an_exception_brings_none(self, workers):
        with pytest.raises(LookupError):
            rpc.rpc_sync("alice", raise_with, args=([ray.put(1)],))

    @pytest.mark.parametrize("transport", ["ray", pytest.param("direct", marks=pytest.mark.slow)])
    def test_by_other_transports(self, ray_cluster, transport, start, script):
        environ = {"RAY_ADDRESS": ray_cluster, "RAYRPC_TRANSPORT": transport}
        run = start("-m", "rayrpc", "run", script(OVER), "29795", **environ)
        assert run.end() == 0, run.output
        assert "all is well" in run.output


OVER = """
import os, sys
import ray, torch
import rayrpc
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

def inside(refs):
    return [ray.get(each) for each in refs], refs

def rank(number):
    rpc.init_rpc(f"w{number}", rank=number, world_size=2)
    ref = ray.put(torch.ones(2))
    to = f"w{1 - number}"
    assert rpc.rpc_sync(to, torch.add, args=(ref, 1)).tolist() == [2, 2]
    values, refs = rpc.rpc_async(to, inside, args=([ref],)).wait()
    assert torch.equal(values[0], ray.get(refs[0]))
    assert ray.get(rpc.remote(to, torch.ones, args=(2,)).object_ref()).tolist() == [1, 1]
    rpc.shutdown()

if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1])
    mp.spawn(rank, nprocs=2)
    print("all is well")
"""


def send_on(to, refs):
    return rpc.rpc_sync(to, inside, args=(refs,)), rpc.rpc_sync(to, targets.identity, args=refs)


def to_here_and(value, rref):
    return value, rref.to_here().tolist()


class TestRRefsOfObjects:
    @pytest.mark.parametrize("to", [None, "driver", "bob"])
    def test_its_owner_has_the_value(self, workers, to):
        rref = rpc.rref(double.remote(torch.ones(2), 0.2), to)
        assert rref.owner_name() == (to or "driver") and rref.is_owner() == (to != "bob")
        assert rref.to_here().tolist() == [2, 2]
        assert rref.rpc_sync().add_(1).tolist() == [3, 3]

    def test_an_error_of_the_object_is_raised_where_it_is_used(self, workers):
        for to in (None, "bob"):
            rref = rpc.rref(fail.remote("no value"), to)
            with pytest.raises(ValueError, match="no value"):
                rref.to_here()

    def test_it_waits_longer_than_calls_may_take(self, workers, box):
        ref = box.wait.remote(5)
        rpc._set_rpc_timeout(0.2)
        try:
            rref = rpc.rref(ref, "alice")
            time.sleep(0.5)
            ray.get(box.open.remote())
            assert rref.to_here(timeout=WAIT) == 5
        finally:
            rpc._set_rpc_timeout(60)

    def test_only_a_reference_has_one(self, workers):
        for make in (rpc.rref, rpc.as_future):
            with pytest.raises(TypeError, match=r"must be a ray\.ObjectRef, got 3"):
                make(3)


class TestFuturesOfObjects:
    def test_it_completes_with_the_value(self, workers):
        ref = double.remote(torch.ones(2), 0.2)
        futures = [rpc.as_future(ref) for _ in range(50)]
        assert futures[0].then(lambda ended: ended.value() + 1).wait().tolist() == [3, 3]
        assert all(future.wait().tolist() == [2, 2] for future in futures)

    def test_no_thread_waits_for_an_object(self, workers, box):
        ref = box.wait.remote(1)
        before = threading.active_count()
        futures = [rpc.as_future(ref) for _ in range(200)]
        assert threading.active_count() < before + 5
        ray.get(box.open.remote())
        assert [future.wait() for future in futures] == [1] * 200

    def test_an_error_is_raised_of_its_own_type(self, workers):
        with pytest.raises(ValueError, match="no value"):
            rpc.as_future(fail.remote("no value")).wait()
        lost = Box.remote()
        future = rpc.as_future(lost.wait.remote(1))
        ray.kill(lost)
        with pytest.raises(ray.exceptions.RayActorError):
            future.wait()

    def test_an_exception_that_is_a_value_is_a_value(self, workers):
        assert str(rpc.as_future(ray.put(KeyError("a value"))).wait()) == "'a value'"

    def test_its_callbacks_may_use_ray_and_block(self, workers):
        def use(ended):
            return ray.get(double.remote(ended.value())) + rpc.rpc_sync("alice", targets.add, (1,))

        futures = [rpc.as_future(double.remote(n)).then(use) for n in range(4)]
        assert [future.wait() for future in futures] == [4 * n + 2 for n in range(4)]


def round_trips(count):
    for number in range(count):
        value = torch.full((3,), float(number))
        rref = rpc.remote("alice", torch.neg, args=(ray.put(value),))
        back = rpc.rref(rref.object_ref(), to="bob")
        (ref,) = rpc.rpc_sync("bob", targets.identity, args=([back.object_ref()],))
        assert torch.equal(rpc.as_future(ref).wait(), -value)


class TestLifetimes:
    def assert_nothing_left(self, before):
        now = []

        def is_as_before():
            now[:] = [references(), *(rpc.rpc_sync(n, references) for n in ("alice", "bob"))]
            owned = sum(rpc.rpc_sync(n, targets.count_owned) for n in ("alice", "bob"))
            return owned == 0 and all(a <= b for a, b in zip(now, before, strict=True))

        assert eventually(is_as_before), (before, now)

    @pytest.mark.parametrize(
        "count",
        [100, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])],
    )
    def test_round_trips_leave_no_object_and_no_rref(self, workers, count):
        round_trips(3)  # whatever the first one starts stays
        on_workers = (rpc.rpc_sync(name, settled_references) for name in ("alice", "bob"))
        before = [settled_references(), *on_workers]
        for part in range(2):
            round_trips(count // 4)
            # the owner of an object and of an RRef, who holds others, dies
            rpc.start_workers([f"mortal{part}"])
            rref = rpc.remote(f"mortal{part}", torch.ones, args=(2,))
            held = rpc.rref(rref.object_ref(), to="alice")
            ref = double.remote(1)
            rpc.rpc_sync(f"mortal{part}", targets.keep, args=("held", [held, ref]))
            round_trips(count // 4)
            with pytest.raises(errors.WorkerDiedError):
                rpc.rpc_sync(f"mortal{part}", targets.kill_me)
            del rref, held, ref
        self.assert_nothing_left(before)

    def test_an_object_lives_as_long_as_its_reference_in_a_call(self, workers, box):
        ref = box.wait.remote(3)
        kept = rpc.remote("alice", targets.keep, args=("ref", [ref]))
        kept.to_here()
        del ref
        gc.collect()
        ray.get(box.open.remote())
        time.sleep(0.2)
        assert rpc.rpc_sync("alice", get_kept) == 3
        rpc.rpc_sync("alice", targets.drop, args=("ref",))


def get_kept():
    return ray.get(targets.kept("ref")[0], timeout=WAIT)


class TestDeaths:
    def test_an_object_dies_with_the_worker_that_made_it(self, workers):
        rpc.start_workers(["carol"])
        rref = rpc.remote("carol", torch.ones, args=(300_000,))
        there, later = rref.object_ref(), rpc.remote("carol", targets.hang).object_ref()
        future = rpc.as_future(later)
        with pytest.raises(errors.WorkerDiedError, match="carol"):
            rpc.rpc_sync("carol", targets.kill_me)
        for ref in (there, later):  # Ray may learn of the death some seconds later
            assert eventually(functools.partial(is_lost, ref))
        with pytest.raises((ray.exceptions.RayActorError, ray.exceptions.ObjectLostError)):
            future.wait()
        with pytest.raises(errors.WorkerDiedError, match="carol"):
            rref.object_ref()

    def test_after_the_death_of_the_actor_of_pending_objects_others_come(self, workers):
        other: torch.futures.Future[int] = torch.futures.Future()
        lost, there = rpc.object_ref(torch.futures.Future()), rpc.object_ref(other)
        other.set_result(1)
        assert ray.get(there, timeout=WAIT) == 1  # the actor runs, and has been asked for the first
        store: Any = rpc._get_current_rpc_agent().objects
        ray.kill(store._actor, no_restart=False)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(lost, timeout=WAIT)

        def comes():
            later = rpc.object_ref(rpc.rpc_async("alice", targets.nap, args=(0.2, 7)))
            try:
                return ray.get(later, timeout=WAIT) == 7
            except ray.exceptions.ActorUnavailableError:  # Ray is still restarting the actor
                return False

        assert eventually(comes)

    def test_an_object_outlives_a_holder(self, workers):
        rpc.start_workers(["dave"])
        before = settled_references()
        ref = double.remote(torch.ones(2))
        rpc.rpc_sync("dave", targets.keep, args=("ref", [ref]))
        held = rpc.rref(ref, to="dave")
        assert held.to_here().tolist() == [2, 2]
        with pytest.raises(errors.WorkerDiedError, match="dave"):
            rpc.rpc_sync("dave", targets.kill_me)
        assert rpc.rpc_sync("alice", targets.add, args=(ref,)).tolist() == [3, 3]
        del ref, held
        assert eventually(lambda: references() <= before)

    def test_what_is_pending_fails_where_its_worker_shuts_down(self, ray_cluster, start, script):
        run = start(script(SHUT_DOWN), "29796", RAY_ADDRESS=ray_cluster)
        assert run.end() == 0, run.output
        assert "ended as it should" in run.output


SHUT_DOWN = """
import os, sys
import ray, torch
import rayrpc as rpc

os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1])
rpc.init_rpc("alone", rank=0, world_size=1)
ref = rpc.object_ref(torch.futures.Future())
there = rpc.object_ref(rpc.rpc_async("alone", torch.ones, args=(2,)))
assert ray.get(there, timeout=60).tolist() == [1, 1]
future = rpc.as_future(ref)
last = torch.futures.Future()
done = rpc.object_ref(last)
last.set_result(torch.arange(3))
rpc.shutdown()
assert ray.get(done, timeout=60).tolist() == [0, 1, 2]
try:
    future.wait()
except RuntimeError as error:
    assert "RPC was shut down on worker 'alone'" in str(error), error
try:
    ray.get(ref, timeout=60)
except RuntimeError as error:
    assert "RPC was shut down on worker 'alone'" in str(error), error
    assert ray.get(there, timeout=60).tolist() == [1, 1]
    print("ended as it should")
"""


RAY_PROGRAM = """
import sys, time
import ray, torch

ray.init(address=sys.argv[1], namespace="shared")

@ray.remote(num_cpus=0)
class Mailbox:
    def __init__(self):
        self.refs = {}

    def put(self, name, refs):
        self.refs[name] = refs

    def get(self, name):
        return self.refs.pop(name, None)

box = Mailbox.options(name="mailbox").remote()
for number in range(5):
    ray.get(box.put.remote("in", [ray.put(torch.full((100_000,), float(number)))]))
    while (refs := ray.get(box.get.remote("out"))) is None:
        time.sleep(0.01)
    assert torch.equal(ray.get(refs[0]), torch.full((100_000,), number + 1.0))
print("the Ray program is done", flush=True)
while ray.get(box.get.remote("end")) is None:  # objects die with the program that made them
    time.sleep(0.01)
"""


def test_a_ray_program_and_an_rpc_program_pass_tensors_to_and_fro(
    ray_cluster, workers, start, script
):
    other = start(script(RAY_PROGRAM), ray_cluster)
    find = functools.partial(ray.get_actor, "mailbox", namespace="shared")
    assert eventually(lambda: _found(find))
    box = find()
    refs: list[Any] = []
    for _ in range(5):
        assert eventually(lambda: refs.extend(ray.get(box.get.remote("in")) or []) or refs)
        rref = rpc.rref(refs.pop(), to="alice")
        added = rref.remote().add(1)
        ref = added.object_ref()
        ray.wait([ref])
        ray.get(box.put.remote("out", [ref]))
    other.wait_for("the Ray program is done")
    ray.get(box.put.remote("end", []))
    assert other.end() == 0, other.output


def _found(find):
    try:
        return find() is not None
    except ValueError:
        return False


@pytest.mark.parametrize(
    "documented", [rpc.object_ref, rpc.rref, rpc.as_future, rpc.RRef.object_ref]
)
def test_the_examples_of_the_docstrings_run(workers, documented):
    if "worker1" not in {info.name for info in rpc._get_current_rpc_agent().get_worker_infos()}:
        rpc.start_workers(["worker1"])
    run_example(documented, rpc=rpc, ray=ray, torch=torch)


def test_before_init_rpc_there_are_none():
    code = "import rayrpc as rpc, torch\n"
    for call in ("object_ref(torch.futures.Future())", "rref(1)", "as_future(1)"):
        code += f"try: rpc.{call}\nexcept RuntimeError as error: assert 'init_rpc' in str(error)\n"
        code += "else: raise AssertionError\n"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT)
