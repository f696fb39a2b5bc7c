"""Functions of a program that workers do not run have its globals on each of them."""

import pytest

pytestmark = pytest.mark.usefixtures("ray_cluster")

MAIN = """
import signal
import sys
import time
import types

import torch

import rayrpc as rpc

server, seen, step = None, [], 0


def load():
    global server
    server = "loaded"


def start(value):
    global server
    server = value


def use():
    seen.append(step)
    return server, list(seen)


def pass_on(to):
    return rpc.rpc_sync(to, use)


class Holder:
    made = 0

    def __init__(self):
        Holder.made += 1

    def use(self):
        return use()


def made():
    return Holder.made


def wait_and_use(seconds):
    time.sleep(seconds)
    return step


def count_sets():
    from rayrpc._runtime.serialization import shared_globals

    return len(shared_globals._all)


def send_of_its_own(to):
    module = sys.modules["its_own"] = types.ModuleType("its_own")
    exec("f = lambda: 'own'", module.__dict__)
    return rpc.rpc_sync(to, module.f)


rpc.start_workers(["alice", "bob"], on_start=load)
assert rpc.rpc_sync("alice", use) == ("loaded", [0])
rpc.rpc_sync("alice", start, args=("a server",))
step = 1
assert rpc.rpc_sync("alice", use) == ("a server", [0, 1])
assert rpc.rpc_sync("bob", pass_on, args=("alice",)) == ("a server", [0, 1, 1])
assert rpc.rpc_sync("bob", use) == ("loaded", [1])
assert (server, seen) == (None, [])

holder = rpc.remote("alice", Holder)
assert holder.rpc_sync().use() == ("a server", [0, 1, 1, 1])
rpc.remote("alice", Holder).to_here()
assert rpc.rpc_sync("alice", made) == 2
rpc.rpc_sync("alice", start, args=("another",))
assert holder.rpc_sync().use()[0] == "another"

futures = []
for step in range(5):  # each sees its own
    futures.append(rpc.rpc_async("bob", lambda: wait_and_use(0.3)))
assert torch.futures.wait_all(futures) == [0, 1, 2, 3, 4]

assert rpc.rpc_sync("alice", send_of_its_own, args=("bob",)) == "own"
assert rpc.rpc_sync("bob", count_sets) == 2
rpc.rpc_async("alice", signal.raise_signal, args=(signal.SIGKILL,))
deadline = time.monotonic() + 30
while rpc.rpc_sync("bob", count_sets) != 1:
    assert time.monotonic() < deadline
    time.sleep(0.1)
rpc.shutdown()
print("done")
"""


def test_functions_of_a_script_have_its_globals_on_each_worker(start, script):
    run = start(script(MAIN))
    assert run.end() == 0, run.output
    assert "done" in run.output
