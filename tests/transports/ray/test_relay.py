"""A relay defers calls without losing one, and Ray starts it again when it dies."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray
from conftest import eventually

import rayrpc as rpc
from rayrpc._transports.ray.directory_answers import DIRECTORY_NAME
from rayrpc._transports.ray.endpoint import DEFERRED
from rayrpc._transports.ray.inspection import describe
from rayrpc._transports.ray.relay import MAX_HELD, RELAY_GROUPS, Relay

# Every script starts with this.
ATTACHED = """
import os, signal, sys, threading, time
import ray
import rayrpc as rpc

CALLS = 30
runs = []

def work(number):
    runs.append(number)
    time.sleep(1.5)
    return number

def count():
    return len(runs)

def pid_of_relay(name):
    members = rpc._get_current_rpc_agent().members
    endpoint = members.find(rpc.get_worker_info(name).id).address.find()
    return ray.get(endpoint.__ray_call__.remote(lambda self: os.getpid()), timeout=60)

def wait_for(check):
    end = time.monotonic() + 60
    while not check():
        assert time.monotonic() < end
        time.sleep(0.05)

def kill_relay(name):
    old = pid_of_relay(name)
    os.kill(old, signal.SIGKILL)

    def is_restarted():
        try:
            return pid_of_relay(name) != old
        except ray.exceptions.RayActorError:
            return False

    wait_for(is_restarted)

def outcome(future):
    try:
        return future.wait()
    except Exception as exc:
        return type(exc).__name__

def started():
    # no call has a timeout: none may be lost without an error
    futures = [rpc.rpc_async("w1", work, args=(number,), timeout=0) for number in range(CALLS)]
    wait_for(lambda: rpc.rpc_sync("w1", count) % CALLS == 0)
    return futures

rank, transport = int(sys.argv[1]), os.environ["RAYRPC_TRANSPORT"]
options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=CALLS + 2)
rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
"""

RESTARTS = (
    ATTACHED
    + """
if rank == 0:
    assert rpc.rpc_sync("w1", count) == 0
    futures = started()
    kill_relay("w1")
    found = [outcome(future) for future in futures]
    lost = found.count("CallLostError")
    assert lost == (12 if transport == "ray" else 0), found  # those that the relay held
    assert all(each in (number, "CallLostError") for number, each in enumerate(found)), found
    assert rpc.rpc_sync("w1", count) == CALLS  # none ran twice

    futures = started()
    kill_relay("w0")
    found = [outcome(future) for future in futures]
    assert found.count("CallLostError") <= (CALLS - 12 if transport == "ray" else 0), found
    assert all(each in (number, "CallLostError") for number, each in enumerate(found)), found
    assert rpc.rpc_sync("w1", count) == 2 * CALLS
    assert [outcome(future) for future in started()] == list(range(CALLS))
    print("called", flush=True)
    w1 = rpc.rpc_sync("w1", os.getpid)
    pending = rpc.rpc_async("w1", time.sleep, args=(60,), timeout=0)
    begin = time.monotonic()
    os.kill(w1, signal.SIGKILL)
    assert outcome(pending) == "WorkerDiedError"
    print("noticed", time.monotonic() - begin, flush=True)
else:
    threading.Event().wait(120)
rpc.shutdown(graceful=False)
"""
)


@pytest.mark.parametrize("transport", ["auto", "ray"])
def test_a_worker_lives_whose_relay_dies(ray_cluster, start, script, transport):
    path = script(RESTARTS)
    environ = {
        "RAY_ADDRESS": ray_cluster,
        "RAYRPC_TRANSPORT": transport,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "29693",
    }
    callers = [start(path, str(rank), **environ) for rank in range(2)]
    assert callers[0].end(120) == 0, "\n".join(run.output for run in callers)
    assert "the relay of this worker died, and was started again" in callers[1].output
    callers[1].end(30)


WAITS = """
import rayrpc as rpc
rpc.init_rpc("w0", rank=0, world_size=2)
"""


def test_a_worker_that_dies_while_it_waits_for_its_group_is_not_waited_for(
    ray_cluster, start, script
):
    """It has no relay yet that could be watched."""
    environ = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29694"}
    run = start(script(WAITS), RAY_ADDRESS=ray_cluster, **environ)
    assert eventually(lambda: joining("29694") == ["w0"], 60)
    run.process.kill()
    assert eventually(lambda: joining("29694") == [], 10)


def joining(key: str) -> list[str]:
    """Return who waits for a group."""
    namespace = rpc.settings().namespace
    for each in ray.util.list_named_actors(all_namespaces=True):
        if each["name"].startswith(DIRECTORY_NAME) and key in each["name"]:
            found = describe(each["name"].removeprefix(DIRECTORY_NAME), namespace)
            return [member.name for member, _ in found.joining] if found is not None else []
    return []


class TestDeferring:
    """A relay without Ray; this process exchanges with it."""

    def test_a_call_is_deferred_once_the_process_has_its_frame(self):
        relay: Any = Relay("alice", False)
        with ThreadPoolExecutor(RELAY_GROUPS["rpc"]) as threads:
            held = [threads.submit(relay.handle, b"%d" % number) for number in range(MAX_HELD)]
            assert eventually(lambda: relay._busy == MAX_HELD)
            late = threads.submit(relay.handle, b"late")
            assert eventually(lambda: relay._incoming.qsize() == MAX_HELD + 1)
            items = relay.exchange(1, [], [])
            assert [each for each in items if each[1] is None] == [("call", None, b"late")]
            assert not late.done()
            relay.note_arrived([1])
            assert late.result(20) is DEFERRED
            relay.give([(number, b"reply") for _, number, _ in items if number is not None])
            assert [each.result(20) for each in held] == [b"reply"] * MAX_HELD

    def test_a_result_for_a_relay_that_has_died_completes_no_call(self):
        relays: list[Any] = [Relay("alice", False) for _ in range(2)]
        before, after = relays
        numbers = []
        threads = []
        for relay in relays:
            threads.append(threading.Thread(target=relay.handle, args=(b"x",), daemon=True))
            threads[-1].start()
            [(_, number, _)] = relay.exchange(1, [], [])
            numbers.append(number)
        after.give([(numbers[0], b"of another")])
        assert after._busy == before._busy == 1
        for relay, number in zip(relays, numbers, strict=True):
            relay.give([(number, b"own")])
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
