"""Ctrl-C at any moment: the program goes on, and no later call is lost."""

import pytest

STRUCK = """
import os, queue, random, signal, sys, threading, time

import torch

import rayrpc as rpc
from rayrpc import autograd
from rayrpc.optim import DistributedOptimizer

STRIKES = int(sys.argv[1])
rpc.start_workers(["a", "b"])
param = rpc.remote("a", torch.ones, args=(2,), kwargs={"requires_grad": True})
optimizer = DistributedOptimizer(torch.optim.SGD, [param], lr=0.1)
tensor = torch.arange(50_000)  # goes by shared memory
random.seed(int(sys.argv[2]))

def step():
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("a", torch.mul, args=(param.to_here(), 2.0)).sum()
        autograd.backward(context_id, [loss])
        optimizer.step(context_id)

def call(number):
    worker = "ab"[number % 2]
    assert rpc.rpc_sync(worker, max, args=(number, 1)) == max(number, 1)
    assert rpc.rpc_async(worker, min, args=(number, 1)).wait() == min(number, 1)
    assert rpc.rpc_sync(worker, torch.add, args=(tensor, number)).equal(tensor + number)
    assert rpc.remote(worker, abs, args=(-number,)).to_here() == number
    if number % 4 == 0:
        step()

armed = queue.SimpleQueue()  # in C: the strikes are for rayrpc

def strike():
    for number in range(STRIKES):
        armed.get()
        time.sleep(random.random() * 0.05)
        while count == number:  # Python ignores it in a finalizer
            os.kill(os.getpid(), signal.SIGINT)
            end = time.monotonic() + 1.0
            while count == number and time.monotonic() < end:
                time.sleep(0.005)

def check(numbers):  # without being struck
    for number in numbers:
        call(number)

count = 0
striker = threading.Thread(target=strike, daemon=True)
striker.start()
while count < STRIKES:
    if count % 4 == 3:
        check([0, 1])
    try:
        armed.put(None)
        for number in range(1_000_000):
            call(number)
    except KeyboardInterrupt:
        count += 1
striker.join(60)
check(range(20))
print("calls go on after", count, "interrupts", flush=True)
rpc.api._ignore_rref_leak = True  # of a call that was interrupted as it began
rpc.shutdown()
print("shut down", flush=True)
"""


def test_calls_go_on_after_ctrl_c_at_any_moment(ray_cluster, start, script):
    run = start(script(STRUCK), "30", "1")
    assert run.end() == 0, run.output
    assert "calls go on after 30 interrupts" in run.output and "shut down" in run.output


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_calls_go_on_after_very_many(ray_cluster, start, script):
    path = script(STRUCK)
    for run in [start(path, "600", str(seed)) for seed in (1, 2, 3)]:
        assert run.end(200) == 0, run.output
        assert "calls go on after 600 interrupts" in run.output and "shut down" in run.output
