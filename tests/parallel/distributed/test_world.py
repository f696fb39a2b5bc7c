"""Worlds and their groups: three ranks run the checks of each section together."""

import os
import sys
from typing import Any

import pytest
from conftest import ROOT, Run, python_path

import rayrpc as rpc
from rayrpc.parallel.distributed import World, is_world_initialized

SCRIPT = """
import os, sys, time, traceback
import pytest, torch
import torch.multiprocessing as mp
from rayrpc import errors
from rayrpc.parallel.distributed import (
    CollectiveGroup, RpcGroup, World, get_cur_name, get_cur_rank, get_world, is_world_initialized,
)

NAMES = ["0", "1", "2"]


class Counter:
    def __init__(self, value=20):
        self.value = value

    def count(self, by=1):
        self.value += by
        return self.value


def add(a, b):
    return a + b


def full(value):
    return torch.full((4,), float(value))


# -- sections: each is run by all ranks ---------------------------------------------------------

def names(world, rank):
    assert is_world_initialized() and get_world() is world
    assert (get_cur_rank(), get_cur_name()) == (rank, str(rank))
    assert world.get_ranks() == [0, 1, 2] and world.get_members() == NAMES
    assert repr(world) == f"<World: '{rank}' is rank {rank} of 3, started>"
    with pytest.raises(RuntimeError, match="has a world already"):
        World("again", rank, 3)


def point_to_point(world, rank):
    group = world.create_collective_group([0, 1, 2])
    assert group.size() == 3
    if rank == 0:
        group.send(full(1), 1)
        group.isend(full(2), 2).wait()
        seen = set()
        for _ in range(2):
            got = torch.empty(4)
            sender = group.irecv(got).wait()  # from any source
            assert torch.equal(got, full(sender))
            seen.add(sender)
        assert seen == {1, 2}
    else:
        got = torch.empty(4)
        assert group.recv(got) == 0 and torch.equal(got, full(rank))
        group.send(full(rank), 0)
    group.barrier()
    group.destroy()
    group.destroy()


def part_of_the_world(world, rank):
    group = world.create_collective_group([2, 1])
    if rank:
        got = torch.empty(4)
        if rank == 1:
            group.send(full(1), 2)
        else:
            assert group.irecv(got).wait() == 1
            assert torch.equal(got, full(1))
    else:
        assert group.irecv(torch.empty(4)).wait() == -1
    group.destroy()


def collectives(world, rank):
    group = world.create_collective_group([0, 1, 2])
    t = full(rank + 1)
    group.broadcast(t, 1)
    assert torch.equal(t, full(2))
    t = full(rank)
    work = group.all_reduce(t, async_op=True)
    work.wait()
    assert torch.equal(t, full(3))
    t = full(rank)
    group.all_reduce(t, torch.distributed.ReduceOp.MAX)
    assert torch.equal(t, full(2))
    t = full(5 - rank)
    group.reduce(t, 1)
    assert rank != 1 or torch.equal(t, full(12))
    found = [full(-1) for _ in range(3)]
    group.all_gather(found, full(rank))
    assert [int(f[0]) for f in found] == [0, 1, 2]
    found = [full(-1) for _ in range(3)] if rank == 1 else None
    group.gather(full(rank), found, 1)
    assert rank != 1 or [int(f[0]) for f in found] == [0, 1, 2]
    t = full(-1)
    group.scatter(t, [full(n * 10) for n in range(3)] if rank == 0 else None)
    assert torch.equal(t, full(rank * 10))
    group.destroy()


def several_tensors(world, rank):
    group = world.create_collective_group([0, 1, 2])
    pair = [full(rank), full(rank + 10)]
    group.broadcast_multigpu(pair, 2, src_tensor=1)
    assert all(torch.equal(t, full(12)) for t in pair)
    pair = [full(rank), full(10)]
    group.all_reduce_multigpu(pair)
    assert all(torch.equal(t, full(33)) for t in pair)
    pair = [full(rank), full(10)]
    work = group.all_reduce_multigpu(pair, torch.distributed.ReduceOp.MAX, async_op=True)
    work.wait()
    assert all(torch.equal(t, full(10)) for t in pair)
    pair = [full(rank), full(1)]
    group.reduce_multigpu(pair, 1, dst_tensor=1)
    assert rank != 1 or torch.equal(pair[1], full(6))
    outputs = [[full(-1) for _ in range(6)] for _ in range(2)]
    group.all_gather_multigpu(outputs, [full(rank), full(rank + 10)])
    for each in outputs:
        assert [int(t[0]) for t in each] == [0, 10, 1, 11, 2, 12]
    with pytest.raises(ValueError, match="can be reduced by"):
        group.all_reduce_multigpu(pair, torch.distributed.ReduceOp.BAND)
    group.destroy()


def calls(world, rank):
    group = world.create_rpc_group("calls", NAMES)
    assert group.rpc_sync("1", add, args=(1, 2), timeout=60) == 3
    assert group.rpc_async("1", add, args=(1, 2)).wait() == 3
    assert group.remote("1", add, kwargs={"a": 1, "b": 2}).to_here() == 3
    assert group.size() == 3 and group.is_member() and group.is_member("2")
    assert not group.is_member("3") and group.get_cur_name() == str(rank)
    assert group.get_group_name() == "calls" and group.get_group_members() == NAMES
    with pytest.raises(RuntimeError, match="process '7' is not in group 'calls'"):
        group.rpc_sync("7", add, args=(1, 2))
    with pytest.raises(RuntimeError, match="has a group 'calls' already"):
        world.create_rpc_group("calls", NAMES)
    with pytest.raises(RuntimeError, match="not among its members"):
        world.create_rpc_group("others", ["7"])
    group.barrier()
    group.destroy()


def values(world, rank):
    if rank == 2:
        return
    group = world.create_rpc_group("values", ["1", "0"])
    if rank == 0:
        group.pair("counter", Counter())
        with pytest.raises(KeyError, match="already paired to Group"):
            group.pair("counter", 1)
    group.barrier()
    assert group.is_paired("counter") and not group.is_paired("other")
    assert group.get_paired("counter").to_here().value == 20
    if rank == 1:
        with pytest.raises(KeyError, match="already paired to Group"):
            group.pair("counter", 1)
        with pytest.raises(KeyError, match="not paired to"):
            group.unpair("counter")
        with pytest.raises(KeyError, match="not found on Group"):
            group.get_paired("other")
        sent = group.rpc_sync("0", add, args=([group], []))[0]
        assert isinstance(sent, RpcGroup) and sent.is_paired("counter")
    group.barrier()
    if rank == 0:
        group.unpair("counter")
    group.barrier()
    assert not group.is_paired("counter")
    group.destroy()


def services(world, rank):
    if rank == 2:
        return
    group = world.create_rpc_group("services", ["0", "1"])
    counter = Counter()
    if rank == 0:
        group.register("count", counter.count)
    group.barrier()
    if rank == 1:
        assert group.is_registered("count") and not group.is_registered("other")
        with pytest.raises(KeyError, match="already registered in Group"):
            group.register("count", counter.count)
        with pytest.raises(KeyError, match="not registered in"):
            group.deregister("count")
        with pytest.raises(KeyError, match="not found on Group"):
            group.registered_sync("other")
        assert group.registered_sync("count") == 21
        assert group.registered_async("count", args=(2,)).wait() == 23
        assert group.registered_remote("count", kwargs={"by": 3}).to_here() == 26
        with pytest.raises(TypeError, match="unsupported operand"):
            group.registered_sync("count", args=("x",))
    group.barrier()
    assert counter.value == (26 if rank == 0 else 20)
    if rank == 0:
        group.destroy()  # takes what it registered along
        group.destroy()
    else:
        end = time.monotonic() + 60
        while group.is_registered("count"):
            assert time.monotonic() < end
            time.sleep(0.02)
        group.destroy()


def outsiders(world, rank):
    group = RpcGroup("outsiders", [str((rank + 1) % 3)])
    with pytest.raises(RuntimeError, match="RpcGroup.pair is for members"):
        group.pair("key", 1)


SECTIONS = [
    names, point_to_point, part_of_the_world, collectives, several_tensors, calls, values,
    services, outsiders,
]


def main(rank):
    world = World(
        str(rank), rank, 3,
        dist_init_method=f"file://{os.getcwd()}/rendezvous",  # no port is free for sure
        rpc_init_method="tcp://localhost:29690",  # no more than a key
    )
    for section in SECTIONS:
        try:
            section(world, rank)
        except BaseException:
            traceback.print_exc()
            print("failed", section.__name__, rank, flush=True)
            os._exit(1)
        print("passed", section.__name__, rank, flush=True)
    world.stop()
    assert not is_world_initialized()
    print("passed stop", rank, flush=True)


if __name__ == "__main__":
    try:
        mp.spawn(main, nprocs=3)
    except Exception as exc:
        print("ended with", type(exc).__name__)
"""

SECTIONS = [
    "names",
    "point_to_point",
    "part_of_the_world",
    "collectives",
    "several_tensors",
    "calls",
    "values",
    "services",
    "outsiders",
]


@pytest.fixture(scope="module")
def printed(ray_cluster, tmp_path_factory):
    """What three ranks printed."""
    folder = tmp_path_factory.mktemp("world")
    (folder / "world.py").write_text(SCRIPT)
    environ = {**os.environ, "PYTHONPATH": python_path(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "rayrpc", "run", "world.py"]
    run = Run(command, environ, folder)
    run.end()
    run.close()
    return run.output


@pytest.mark.parametrize("section", SECTIONS)
def test_all_ranks_pass_the_section(printed, section):
    assert printed.count(f"passed {section} ") == 3, printed


@pytest.mark.parametrize(
    ("given", "missing"), [({"world_size": 2}, "rank"), ({"rank": 0}, "world_size")]
)
def test_a_missing_rank_or_size_is_named(monkeypatch, given, missing):
    monkeypatch.setenv(missing.upper(), "many")
    with pytest.raises(ValueError, match=f"process 'lonely' needs its {missing}.*'many'"):
        World("lonely", **given)


def test_a_world_that_cannot_be_made_leaves_nothing_behind(ray_cluster):
    wrong: Any = {"dist_init_method": "nonsense://", "rpc_init_method": "ray://half-a-world"}
    for _ in range(2):
        with pytest.raises(RuntimeError, match="nonsense"):
            World("lonely", 0, 1, **wrong)
        assert not is_world_initialized() and not rpc._is_current_rpc_agent_set()
