"""Tasks and actors of a Ray program join a group, and leave it when Ray ends them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import eventually

import rayrpc as rpc
from rayrpc import errors
from rayrpc._transports.ray.actor_exit import HAS_EXIT_FLAG

WAIT = 60.0
# Ray kills an actor that has not ended 30 s after its last handle was deleted.
SOON = 15.0
KINDS = {"plain": 1, "threaded": 4, "asyncio": 4}  # and how many calls each runs at a time
NAME = "actor"
gently = pytest.mark.skipif(not HAS_EXIT_FLAG, reason="this Ray kills actors that are let go")


def _program() -> Any:
    """Return functions, a task and actors; local ones go by value: Ray lacks this module."""
    key = f"ray://processes-{os.getpid()}"

    def join(name, rank=-1, world_size=None):
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"{key}-{world_size}")
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)

    @ray.remote(num_cpus=0)
    def call_once(name, to):
        join(name)
        try:
            return rpc.rpc_sync(to, os.getpid)
        finally:
            rpc.shutdown()

    def sleep_and_add(seconds, x, y):
        time.sleep(seconds)
        return x + y

    class Actor:
        def __init__(self, name, at_end="", rank=-1, world_size=None):
            if at_end:
                import atexit

                atexit.register(self.shut_down, at_end)
            join(name, rank, world_size)

        def shut_down(self, path):
            try:
                rpc.shutdown()
                text = "shut down"
            except Exception as exc:
                text = repr(exc)
            Path(path).write_text(text)

        def call(self, to, func, *args):
            return rpc.rpc_sync(to, func, args=args)

        def pid(self):
            return os.getpid()

        def exit(self):
            ray.actor.exit_actor()

    class AsyncActor(Actor):
        async def call(self, to, func, *args):
            future: Any = rpc.rpc_async(to, func, args=args)
            return await future

        async def pid(self):
            return os.getpid()

        async def exit(self):
            ray.actor.exit_actor()

    return join, call_once, sleep_and_add, Actor, AsyncActor


join, call_once, sleep_and_add, Actor, AsyncActor = _program()


@pytest.fixture(scope="module")
def group(ray_cluster):
    join("driver")
    yield
    rpc.shutdown()


@pytest.fixture(params=KINDS)
def start(request, group):
    """Starts an actor of some kind."""

    def start(*args):
        made: Any = AsyncActor if request.param == "asyncio" else Actor
        made = ray.remote(num_cpus=0)(made)
        return made.options(max_concurrency=KINDS[request.param]).remote(NAME, *args)

    yield start
    assert eventually(lambda: NAME not in members(), WAIT)


def members():
    return [info.name for info in rpc._get_current_rpc_agent().get_worker_infos()]


def has_ended(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_tasks_join_call_and_leave_one_after_the_other(group):
    for name in ("first", "second"):
        assert ray.get(call_once.remote(name, "driver"), timeout=WAIT) == os.getpid()
    assert eventually(lambda: members() == ["driver"])


def test_an_actor_calls_and_is_called(start):
    actor = start()
    pid = ray.get(actor.pid.remote(), timeout=WAIT)
    assert rpc.rpc_sync(NAME, os.getpid) == pid
    assert ray.get(actor.call.remote("driver", os.getpid), timeout=WAIT) == os.getpid()
    assert ray.get(actor.call.remote(NAME, os.getpid), timeout=WAIT) == pid
    ray.kill(actor)


@gently
@pytest.mark.parametrize("way", ["it exits", "it is let go"])
def test_an_actor_that_ray_ends_leaves_its_group(start, way):
    actor = start()
    pid = ray.get(actor.pid.remote(), timeout=WAIT)
    rref = rpc.remote(NAME, max, args=(1, 2))
    assert rref.to_here() == 2
    begin = time.monotonic()
    if way == "it exits":
        actor.exit.remote()
    else:
        del actor
    assert eventually(lambda: NAME not in members(), SOON)
    assert eventually(lambda: has_ended(pid), SOON)
    assert time.monotonic() < begin + SOON
    with pytest.raises(errors.WorkerDiedError, match=f"{NAME}.*has left the group"):
        rpc.rpc_sync(NAME, os.getpid)


@gently
def test_a_call_under_way_of_an_actor_that_exits_ends_first(group):
    made: Any = ray.remote(num_cpus=0)(Actor)
    actor = made.options(max_concurrency=4).remote(NAME)
    call = actor.call.remote("driver", sleep_and_add, 1.0, 1, 2)
    assert eventually(lambda: rpc._get_current_rpc_agent().callee.active)
    actor.exit.remote()
    assert ray.get(call, timeout=WAIT) == 3
    assert eventually(lambda: NAME not in members(), SOON)


@gently
def test_a_shutdown_after_ray_has_ended_the_actor_waits_for_nobody(ray_cluster, tmp_path):
    path = tmp_path / "end"
    made: Any = ray.remote(num_cpus=0)(Actor)
    actor, other = made.remote("a", str(path), 0, 2), made.remote("b", "", 1, 2)
    ray.get([actor.pid.remote(), other.pid.remote()], timeout=WAIT)
    del actor
    assert eventually(path.exists, WAIT)  # if Ray kills the actor, it never is
    assert eventually(lambda: path.read_text() == "shut down"), path.read_text()


def test_the_actor_of_a_hosted_worker_is_not_watched(group):
    def watches():
        return [each.name for each in threading.enumerate() if each.name == "rayrpc-exit"]

    rpc.start_workers(["hosted"])
    assert rpc.rpc_sync("hosted", watches) == []
