"""The directory dies and is started again; what members do that it has declared lost."""

import io
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import targets
from conftest import eventually
from directories import kill_directory, wait_for_restart
from launching import alive

import rayrpc as rpc
from rayrpc import config, errors
from rayrpc._concurrency import notices
from rayrpc._protocol.membership import Member
from rayrpc._transports.ray import directory_client, ray_api
from rayrpc._transports.ray.directory_answers import MOST_MEMBERS, SharedReports
from rayrpc._transports.ray.directory_client import RayDirectory


@pytest.fixture
def group(ray_cluster):
    """Alice and bob are hosted; this process is "driver" in their group."""
    options = rpc.TensorPipeRpcBackendOptions(init_method="ray://restarts")
    rpc.init_rpc("driver", rpc_backend_options=options)
    rpc.start_workers(["alice", "bob"])
    yield
    if rpc._is_current_rpc_agent_set():
        rpc.shutdown()


def names():
    return {each.name for each in rpc._get_current_rpc_agent().get_worker_infos()}


def pid_of_worker(name):
    return rpc.rpc_sync(name, os.getpid)


@pytest.mark.usefixtures("group")
def test_calls_go_on_and_deaths_and_joins_are_noticed():
    rref = rpc.remote("alice", targets.Adder)
    pending = rpc.rpc_async("bob", time.sleep, args=(3,))
    bob = pid_of_worker("bob")
    old = kill_directory()
    for number in range(200):
        assert rpc.rpc_sync("alice", targets.identity, args=(number,)) == number
    assert rref.rpc_sync().add(1) == 1
    pending.wait()
    wait_for_restart(old)

    rpc.start_workers(["carol"])
    assert rpc.rpc_sync("alice", targets.call_on, args=("carol", targets.identity, 5)) == 5
    ids = [rpc.get_worker_info(name).id for name in ("driver", "alice", "bob", "carol")]
    assert len(set(ids)) == 4

    lost = rpc.rpc_async("bob", time.sleep, args=(60,))
    os.kill(bob, signal.SIGKILL)
    with pytest.raises(errors.WorkerDiedError, match="bob"):
        lost.wait()
    assert eventually(lambda: names() == {"driver", "alice", "carol"})
    # each member learns of it by itself
    assert eventually(lambda: rpc.rpc_sync("alice", names) == {"driver", "alice", "carol"})
    rpc.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("group")
def test_it_may_be_restarted_again_and_again():
    for _ in range(3):
        wait_for_restart(kill_directory())
        assert rpc.rpc_sync("alice", targets.call_on, args=("bob", targets.identity, 7)) == 7
    assert names() == {"driver", "alice", "bob"}
    # a member that has not reported yet is in no session, and must not pass a barrier alone
    agent = rpc._get_current_rpc_agent()
    directory = agent._directory._actor
    late = [directory.sync.remote("tag", "late", 1), directory.members.remote("late")]
    assert ray.wait(late, timeout=2)[0] == []
    me = agent.members.me
    twin = Member("twin", "alice", -1, None, me.address, me.node, main=me.main)
    with pytest.raises(RuntimeError, match="is not unique"):
        RayDirectory(agent._directory._key, "rayrpc", 10.0).join(twin, 60.0)
    rpc.shutdown()


@pytest.mark.usefixtures("group")
def test_the_members_of_a_large_group_read_one_list():
    me = rpc._get_current_rpc_agent().members.me
    size = MOST_MEMBERS + 1
    ranks = range(size)
    directories = [RayDirectory("large", "rayrpc", 10.0) for _ in ranks]

    def join(rank):
        member = Member(f"large-{rank}", f"w{rank}", rank, size, me.address, me.node)
        return directories[rank].join(member, 60.0)

    with ThreadPoolExecutor(size) as threads:
        snapshots = list(threads.map(join, ranks))
    assert [each.me.name for each in snapshots] == [f"w{rank}" for rank in ranks]
    for each in snapshots:
        assert sorted(member.id for member in each.members) == list(ranks)

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(lambda rank: directories[rank].sync("tag", rank, 60.0), ranks))
    assert found == [{f"w{rank}": rank for rank in ranks}] * size
    answer = ray.get(directories[0]._actor.sync.remote("tag", "large-0", 0), timeout=60)
    assert isinstance(answer, SharedReports)
    for directory in directories:
        directory.leave()


STATIC = """
import os, signal, sys, time
import ray
import rayrpc as rpc

rank, world_size = int(sys.argv[1]), 3
rpc.init_rpc(f"w{rank}", rank=rank, world_size=world_size)
assert rpc.rpc_sync(f"w{(rank + 1) % world_size}", max, args=(1, 2)) == 2
print("joined", flush=True)
if rank == 0:
    time.sleep(3)  # the others wait at the barrier of shutdown by now
    actor = rpc._get_current_rpc_agent()._directory._actor
    os.kill(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())), signal.SIGKILL)
    assert rpc.rpc_sync("w1", max, args=(1, 2)) == 2
rpc.shutdown()
print("has shut down", flush=True)
"""


def test_a_graceful_shutdown_waits_for_all_members_across_a_restart(ray_cluster, start, script):
    path = script(STATIC)
    runs = [
        start(path, str(rank), MASTER_ADDR="localhost", MASTER_PORT="29692") for rank in range(3)
    ]
    assert [run.end(120) for run in runs] == [0, 0, 0], "\n".join(run.output for run in runs)
    assert all("has shut down" in run.output for run in runs)


def test_who_waits_for_others_is_told_on_a_terminal(ray_cluster, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(notices, "NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(config, "_current", config.settings().replace(init_timeout=2.0))
    options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://localhost:29693")
    with pytest.raises(errors.GroupError, match="rank 1 is missing"):
        rpc.init_rpc("w0", rank=0, world_size=2, rpc_backend_options=options)
    text = terminal.getvalue()
    assert text.startswith("rayrpc: waiting for RPC group ")
    assert "localhost:29693', 2 workers: `rayrpc status` shows who is there\n" in text


@pytest.mark.usefixtures("group")
def test_a_fault_of_ray_that_passes_ends_no_following(monkeypatch, caplog):
    wait, faults = ray_api.wait, []

    def wait_or_fail(*args, **kwargs):
        if threading.current_thread().name == "rayrpc-directory" and len(faults) < 2:
            faults.append(1)
            raise ray.exceptions.RaySystemError("as expected")
        return wait(*args, **kwargs)

    monkeypatch.setattr(ray_api, "wait", wait_or_fail)
    assert eventually(lambda: len(faults) == 2, 60)
    rpc.start_workers(["carol"])
    assert eventually(lambda: "carol" in names(), 60)
    os.kill(pid_of_worker("carol"), signal.SIGKILL)
    assert eventually(lambda: "carol" not in names(), 60)
    assert caplog.text.count("is asked again") == 1


def end_soon():
    """Have this process end soon once its group has declared it lost."""
    directory_client.LEAVE_SECONDS = 1.0


def leave_when_lost():
    """Have this worker leave its group when its calls fail."""

    def run():
        with pytest.raises(errors.WorkerDiedError):
            rpc.rpc_sync("me", targets.wait_until_kept, args=("the end",), timeout=0)
        rpc.shutdown(graceful=False)

    threading.Thread(target=run, daemon=True).start()


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.usefixtures("ray_cluster")
def test_a_hosted_worker_that_was_declared_lost_ends_unless_it_leaves(leaves):
    workers = rpc.start_workers(["carol"], me="me")
    agent = rpc._get_current_rpc_agent()
    try:
        rpc.rpc_sync("carol", end_soon)
        if leaves:
            rpc.rpc_sync("carol", leave_when_lost)
        worker = rpc.rpc_sync("carol", targets.pid)
        token = agent.lookup("carol").token
        ray.get(agent._directory._actor.expel.remote(token, "lost by the test"), timeout=60)
        assert eventually(lambda: "carol" not in names(), 60)
        if leaves:
            time.sleep(3)
        assert eventually(lambda: alive(worker) == leaves, 60)
    finally:
        targets.keep("the end", True)  # else the lost worker's call would go on here
        has_ended = eventually(lambda: not agent.callee.active)
        targets.drop("the end")
        workers.stop()
        rpc.shutdown()
    assert has_ended and eventually(lambda: not alive(worker))
