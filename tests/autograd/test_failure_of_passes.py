"""Workers that die while distributed autograd needs them: errors at once, and no leak.

At once: the passes wait for functions that never end.
"""

import concurrent.futures
import os
import signal
import threading

import pytest
import targets
import torch
from conftest import ROOT, eventually, python_path

import rayrpc as rpc
from rayrpc import autograd, errors


def contexts_at(name):
    """Ask in a thread without a context: a call carries its thread's."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        info = pool.submit(rpc.rpc_sync, name, autograd._get_debug_info).result()
    return int(info["num_autograd_contexts"])


class Hangs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        hangs.set()
        threading.Event().wait()
        return gradient


hangs = threading.Event()


def is_hanging():
    return hangs.is_set()


def hang_later(x):
    return Hangs.apply(x)


def hang_here(to, x, w):
    return Hangs.apply(rpc.rpc_sync(to, targets.step, args=(x, w)))


def hang_alone():
    return Hangs.apply(torch.ones(3, 3, requires_grad=True))


@pytest.fixture
def doomed(ray_cluster):
    """Workers to kill: their pids, by name."""
    rpc.start_workers(["carol", "dave"])
    yield {name: rpc.rpc_sync(name, os.getpid) for name in ("carol", "dave")}
    rpc.shutdown(graceful=False)


def kill_when_hanging(pid, name):
    """Kill a process as soon as a backward pass hangs at a worker."""

    def kill():
        if eventually(lambda: rpc.rpc_sync(name, is_hanging)):
            os.kill(pid, signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()  # without the context of this one


class TestDeaths:
    def test_a_worker_that_dies_in_a_pass_is_an_error_at_once(self, doomed, leaves):
        x, _ = leaves
        with autograd.context() as context_id:
            y = rpc.rpc_sync("carol", targets.call_on, args=("dave", hang_later, x))
            kill_when_hanging(doomed["dave"], "dave")
            with pytest.raises(errors.WorkerDiedError, match="dave"):
                autograd.backward(context_id, [y.sum()])
        assert eventually(lambda: contexts_at("carol") == 0)

    def test_a_worker_that_dies_while_another_takes_long_is_an_error_at_once(self, doomed, leaves):
        """The pass reaches dave after carol, for whose part the leader waits."""
        x, w = leaves
        with autograd.context() as context_id:
            y = rpc.rpc_sync("carol", hang_here, args=("dave", x, w))
            kill_when_hanging(doomed["dave"], "carol")
            with pytest.raises(errors.WorkerDiedError, match="dave"):
                autograd.backward(context_id, [y.sum()])

    def test_a_death_keeps_its_type_when_a_worker_that_is_done_reports_it(self, doomed):
        with autograd.context() as context_id:
            y = rpc.rpc_sync("carol", targets.call_on, args=("dave", hang_alone))
            kill_when_hanging(doomed["dave"], "dave")
            with pytest.raises(errors.WorkerDiedError, match="dave"):
                autograd.backward(context_id, [y.sum()])

    def test_a_pass_that_needs_a_dead_worker_fails(self, doomed, leaves):
        x, w = leaves
        with autograd.context() as context_id:
            y = rpc.rpc_sync("carol", targets.step, args=(x, w))
            os.kill(doomed["carol"], signal.SIGKILL)
            agent = rpc._get_current_rpc_agent()
            assert eventually(lambda: "carol" not in [i.name for i in agent.get_worker_infos()])
            with pytest.raises(RuntimeError, match=r"carol|could not find destination"):
                autograd.backward(context_id, [y.sum()])
        assert autograd._get_debug_info()["num_current_backward_passes"] == "0"

    def test_contexts_end_with_the_worker_that_opened_them(self, doomed, leaves):
        x, w = leaves
        opened = rpc.remote("carol", open_and_wait, args=(x, w))
        assert eventually(lambda: contexts_at("dave") == 1)
        os.kill(doomed["carol"], signal.SIGKILL)
        assert eventually(lambda: contexts_at("dave") == 0)
        del opened

    def test_contexts_end_with_the_only_worker_that_called_in_them(self, doomed, leaves):
        x, w = leaves
        with autograd.context():
            rpc.rpc_async("carol", relay_and_wait, args=(x, w))
            assert eventually(lambda: contexts_at("dave") == 1)
            os.kill(doomed["carol"], signal.SIGKILL)
            assert eventually(lambda: contexts_at("dave") == 0)


def open_and_wait(x, w):
    with autograd.context():
        rpc.rpc_sync("dave", targets.step, args=(x, w))
        threading.Event().wait()


def relay_and_wait(x, w):
    rpc.rpc_sync("dave", targets.step, args=(x, w))
    threading.Event().wait()


INTERRUPTED = """
import os, signal, threading, torch
import rayrpc as rpc
from conftest import eventually
from rayrpc import autograd
from test_failure_of_passes import hang_later, is_hanging

def interrupt():
    assert eventually(lambda: rpc.rpc_sync("carol", is_hanging))
    os.kill(os.getpid(), signal.SIGINT)

rpc.start_workers(["carol"])
with autograd.context() as context_id:
    y = rpc.rpc_sync("carol", hang_later, args=(torch.ones(3, requires_grad=True),))
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        autograd.backward(context_id, [y.sum()])
    except KeyboardInterrupt:
        print("interrupted", flush=True)
print(autograd._get_debug_info()["num_current_backward_passes"], "passes", flush=True)
rpc.shutdown(graceful=False)
"""


def test_an_interrupt_ends_a_pass(ray_cluster, start, script):
    tests = ROOT / "tests"
    run = start(script(INTERRUPTED), PYTHONPATH=python_path(ROOT, tests, tests / "autograd"))
    assert run.end() == 0, run.output
    assert "interrupted" in run.output and "0 passes" in run.output
