"""Groups whose members die, and come again."""

import os
import signal

import pytest
from conftest import eventually

import rayrpc as rpc
from rayrpc import errors
from rayrpc.parallel.distributed import World, get_world, is_world_initialized

FIRST_DIES = """
import os, sys
from rayrpc import errors
from rayrpc.parallel.distributed import World

rank = int(sys.argv[1])
world = World(str(rank), rank, 2, init_dist=False, rpc_init_method="ray://first-dies")
group = world.create_rpc_group("group", ["0", "1"])
group.pair(f"of {rank}", rank)
group.barrier()
if rank == 0:
    while not group.is_paired("ready"):
        pass
    os._exit(1)
try:
    group.pair("ready", True)
    while group.is_paired("of 1"):
        pass
except errors.WorkerDiedError as exc:
    print("raised:", exc)
"""


def test_a_look_up_fails_when_the_process_with_the_table_has_died(ray_cluster, start, script):
    path = script(FIRST_DIES)
    first, second = (start(path, str(rank)) for rank in range(2))
    assert first.end() == 1, first.output
    assert "'0'" in second.wait_for("raised:") and second.end() == 0


def world():
    found = get_world()
    assert found is not None
    return found


def make_group(name, members):
    """Run on each member, at the same time."""
    if not is_world_initialized():
        World(name, init_rpc=False, init_dist=False)
    world().create_rpc_group("mixed", members)
    return os.getpid()


def pair(key, value):
    world().groups["mixed"].pair(key, value)


def make_everywhere(members):
    calls = [rpc.rpc_async(n, make_group, args=(n, members), timeout=60) for n in members]
    return {name: call.wait() for name, call in zip(members, calls, strict=True)}


@pytest.fixture
def pids(workers):
    rpc.start_workers(["carol"])
    yield make_everywhere(["alice", "carol", "driver"])
    for name in ("alice", "driver"):
        rpc.rpc_sync(name, stop)


def stop():
    world().stop()


def test_keys_of_a_dead_member_are_free_again(pids):
    group = world().groups["mixed"]
    rpc.rpc_sync("carol", pair, args=("key", "carol's"))
    assert group.get_paired("key").to_here() == "carol's"
    with pytest.raises(KeyError, match="already paired"):
        rpc.rpc_sync("alice", pair, args=("key", "alice's"))
    os.kill(pids["carol"], signal.SIGKILL)
    with pytest.raises(errors.WorkerDiedError, match="carol"):
        group.barrier()
    assert not group.is_paired("key")
    with pytest.raises(KeyError, match="not found"):
        group.get_paired("key")
    rpc.rpc_sync("alice", pair, args=("key", "alice's"))
    assert group.get_paired("key").to_here() == "alice's"


def test_a_member_that_was_started_again_may_pair_its_key(pids):
    rpc.rpc_sync("carol", pair, args=("key", 1))
    os.kill(pids["carol"], signal.SIGKILL)
    for name in ("alice", "driver"):
        rpc.rpc_sync(name, leave)
    assert eventually(lambda: "carol" not in names())
    rpc.start_workers(["carol"])
    make_everywhere(["alice", "carol", "driver"])
    rpc.rpc_sync("carol", pair, args=("key", 2))
    assert world().groups["mixed"].get_paired("key").to_here() == 2


def leave():
    world().groups["mixed"].destroy()


def names():
    return [info.name for info in rpc._get_current_rpc_agent().get_worker_infos()]
