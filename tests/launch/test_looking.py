"""Look at groups from another terminal: hosted, attached, stopped and joining workers."""

import json
import os
import signal
import tempfile
import threading

import pytest
import torch
from conftest import eventually
from launching import runner

import rayrpc as rpc
from rayrpc import config
from rayrpc._observe.group_status import GroupStatus
from rayrpc.launch.looking import look

CIRCLE = """
import os, threading
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

lock = threading.Lock()

def train_step(n):
    with lock:
        return n + 1

def main(rank):
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=3)
    with lock:
        rpc.api._barrier({f"rank{i}" for i in range(3)})
        print("calls", flush=True)
        rpc.rpc_sync(f"rank{(rank + 1) % 3}", train_step, args=(rank,), timeout=100)

if __name__ == "__main__":
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    mp.spawn(main, nprocs=3)
"""


ALONE = """
import time
import rayrpc as rpc

rpc.init_rpc("alone", rank=0, world_size=1)
print("joined", flush=True)
time.sleep(100)
"""


@pytest.fixture
def rayrpc_command(start):
    """Run ``rayrpc ARGS`` to its end; return the exit status and the output."""

    def run(*arguments, **environ):
        one = start("-m", "rayrpc", *arguments, **environ)
        return one.end(), one.output

    return run


def test_three_ranks_that_wait_in_a_circle_are_seen_from_outside(start, script, rayrpc_command):
    # on a local cluster, which a user does not know of
    folder = tempfile.mkdtemp(dir=os.environ["RAY_TMPDIR"])  # its name is short: sockets are in it
    environ = {"RAY_ADDRESS": None, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": None}
    status, text = rayrpc_command("status", **environ)
    assert status == 2 and "no Ray cluster that rayrpc has started for this user" in text
    program = runner(start, script)(CIRCLE, **environ)
    assert eventually(lambda: program.output.count("calls") == 3, 100), program.output
    circle = "rank0 -> rank1 -> rank2 -> rank0"
    found = []

    def is_seen():  # once the calls have waited for a second
        found[:] = rayrpc_command("stack", **environ)
        return circle in found[1]

    assert eventually(is_seen), found
    status, text = found
    assert status == 0
    for rank in range(3):
        assert f"-- rank{rank} (node " in text
        assert f"rank{rank} waits for rank{(rank + 1) % 3} (train_step, " in text
    assert "thread MainThread:" in text and ", runs train_step for rank2 (" in text
    assert 'script.py", line 9, in train_step\n    with lock:' in text
    assert "_runtime" not in text and "waits for train_step on rank1, running" in text

    _, text = rayrpc_command("status", **environ)
    assert "3 workers, started by user " in text and "script.py" in text
    assert text.count("hosted") == 3 and "rank0 -> rank1  train_step" in text and circle in text
    (line,) = (line for line in text.splitlines() if line.startswith("Ray's own status: "))
    *variables, command, subcommand = line.partition(": ")[2].split()
    assert (command, subcommand) == ("ray", "status") and "RAY_AUTH_MODE=token" in variables
    one = start(
        *("-m", "ray.scripts.scripts", "status"),
        **environ | dict(variable.split("=") for variable in variables),
    )
    assert one.end() == 0, one.output
    # the cluster's monitor, which reports it, starts later
    assert "object_store_memory" in one.output or "No cluster status" in one.output

    status, text = rayrpc_command("status", "--json", **environ)
    (group,) = json.loads(text)
    assert [worker["name"] for worker in group["workers"]] == ["rank0", "rank1", "rank2"]
    assert {call["state"] for call in group["calls"]} == {"running"}
    assert group["silent"] == group["joining"] == group["deadlocks"] == []


woken = threading.Event()


def sleeps():
    woken.wait(60)


def wake():
    woken.set()


def fall_asleep():
    woken.clear()


def test_hosted_and_attached_workers_of_a_group_are_seen_from_inside_and_outside(workers):
    future = rpc.rpc_async("alice", sleeps)
    assert eventually(lambda: [c["state"] for c in rpc.status().calls] == ["running"])
    inside = rpc.status()
    (outside,) = (group for group in look(config.settings(), True) if "driver" in str(group))
    for found in inside, outside:
        kinds = {worker["name"]: worker["hosted"] for worker in found.workers}
        assert kinds == {"driver": False, "alice": True, "bob": True}
        assert not found.silent and found.calls[0]["function"].endswith("sleeps")
        assert "driver -> alice" in found.text()
        assert "<td>driver -&gt; alice</td>" in found._repr_html_()
        assert "in sleeps" in found.stacks("alice") and "-- bob" not in found.stacks("alice")
    assert len({worker["pid"] for worker in inside.workers}) == 3
    assert inside.key in outside.key  # there with the owner's name
    text = outside.text(before=outside)
    assert "0/s" in text
    rpc.rpc_sync("alice", wake)
    future.wait()


def blocks_backward(x):
    """Return what waits in its backward pass, on this worker."""
    x = x * 2
    x.register_hook(lambda gradient: sleeps())
    return x


def test_who_waits_in_a_pass_and_in_a_gathering_is_named(workers):
    names = {"alice", "bob", "driver"}
    barrier = rpc.rpc_async("bob", rpc.api._barrier, args=(names,))
    assert eventually(lambda: "bob waits in a gathering for alice (" in str(rpc.status()))
    other = rpc.rpc_async("alice", rpc.api._barrier, args=(names,))
    assert eventually(lambda: "alice waits in a gathering for driver (" in str(rpc.status()))
    assert "bob waits in a gathering for alice (" in rpc.status().stacks()
    rpc.api._barrier(names)
    barrier.wait(), other.wait()
    assert "waits in" not in str(rpc.status())

    def run():
        with rpc.autograd.context() as context_id:
            x = torch.ones(2, requires_grad=True)
            loss = rpc.rpc_sync("alice", blocks_backward, args=(x,)).sum()
            rpc.autograd.backward(context_id, [loss])

    rpc.rpc_sync("alice", fall_asleep)
    thread = threading.Thread(target=run)
    thread.start()
    try:
        text = "driver waits in a backward pass for alice ("
        assert eventually(lambda: text in str(rpc.status())), str(rpc.status())
    finally:
        rpc.rpc_sync("alice", wake)
        thread.join(60)
    assert "waits in" not in str(rpc.status())


@pytest.mark.slow  # two clusters start
def test_other_local_clusters_are_named(start, script, rayrpc_command):
    folder = tempfile.mkdtemp(dir=os.environ["RAY_TMPDIR"])
    environ = {"RAY_ADDRESS": None, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": None}
    programs = []
    for address in (None, "local"):
        environ["RAYRPC_ADDRESS"] = address
        programs.append(
            start(script(ALONE), **environ, MASTER_ADDR="127.0.0.1", MASTER_PORT="29579")
        )
        assert eventually(lambda: "joined" in programs[-1].output, 100), programs[-1].output
    environ["RAYRPC_ADDRESS"] = None
    status, text = rayrpc_command("status", **environ)
    assert status == 0 and text.count("alone") == 1
    *_, line = text.strip().splitlines()
    assert line.startswith("other local clusters, for --address: ")
    address = line.rpartition(" ")[2]
    found = []
    for arguments in ([], ["--address", address]):
        status, text = rayrpc_command("status", "--json", *arguments, **environ)
        assert status == 0, text
        found += [worker["pid"] for group in json.loads(text) for worker in group["workers"]]
    assert sorted(found) == sorted(each.process.pid for each in programs)


def test_a_stopped_worker_is_named(workers):
    pid = next(worker["pid"] for worker in rpc.status().workers if worker["name"] == "bob")
    os.kill(pid, signal.SIGSTOP)
    found: list[GroupStatus] = []

    def looked():
        groups = look(config.settings(), True, seconds=0.5)
        (outside,) = (group for group in groups if "driver" in str(group))
        found[:] = rpc.status(timeout=0.5), outside
        return all(len(each.silent) == 1 for each in found)  # alice may be late, too

    try:
        assert eventually(looked)
    finally:
        os.kill(pid, signal.SIGCONT)
    for status in found:
        (silent,) = status.silent
        assert silent.name == "bob" and silent.pid == pid and "does not answer" in silent.why
        assert f"bob (node {silent.node}, pid {pid}) does not answer" in status.text()
        assert [worker["name"] for worker in status.workers] == ["driver", "alice"]
    assert eventually(lambda: not rpc.status().silent)


def test_who_waits_for_others_to_join_is_named(ray_cluster, start, script):
    one = start(
        script("import rayrpc as rpc\nrpc.init_rpc('early', rank=0, world_size=3)\n"),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29577",
    )

    def joining():
        return [each for group in look(config.settings(), False) for each in group.joining]

    assert eventually(joining), one.output
    (found,) = joining()
    assert found.name == "early" and found.pid == one.process.pid and found.missing == [1, 2]
    texts = [str(group) for group in look(config.settings(), False)]
    assert any("early" in text and "ranks missing: 1, 2" in text for text in texts)
