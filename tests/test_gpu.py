"""Device maps and pools with real devices; skipped where there is none."""

import pytest
import torch
from conftest import ROOT, python_path

import rayrpc as rpc
from rayrpc.parallel.pool import Pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRIPT = """
import os, sys
import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

def add(x, y):
    assert x.device == y.device == torch.device("cuda:0"), (x.device, y.device)
    return {"sum": x + y, "host": torch.ones(2)}

def make(device):
    return torch.full((1000, 1000), 2.0, device=device)

def rank(number):
    options = rpc.TensorPipeRpcBackendOptions()
    if number == 0:
        options.set_device_map("mapped", {0: 0})
    names = ["caller", "mapped", "plain"]
    rpc.init_rpc(names[number], rank=number, world_size=3, rpc_backend_options=options)
    if number == 0:
        x = torch.ones(1000, 1000, device="cuda:0")
        got = rpc.rpc_sync("mapped", add, args=(x, x))
        assert got["sum"].device == x.device and got["host"].device.type == "cpu"
        assert torch.equal(got["sum"], 2 * x)
        rref = rpc.remote("mapped", make, args=("cuda:0",))
        assert torch.equal(rref.to_here(), 2 * x) and rref.to_here().device == x.device
        got = [f.wait() for f in [rpc.rpc_async("mapped", add, args=(x, x)) for _ in range(20)]]
        assert all(torch.equal(each["sum"], 2 * x) for each in got)
        for call in (lambda: rpc.rpc_sync("plain", add, args=(x, x)),
                     lambda: rpc.rpc_sync("plain", make, args=("cuda:0",))):
            try:
                call()
            except RuntimeError as error:
                assert "set_device_map" in str(error), error
            else:
                raise AssertionError("no error")
        print("all is well")
    rpc.shutdown()

if __name__ == "__main__":
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=sys.argv[1])
    ranks = [mp.get_context("spawn").Process(target=rank, args=(i,)) for i in range(3)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(max(each.exitcode for each in ranks))
"""


def test_tensors_go_from_device_to_device(start, script):
    run = start("-m", "rayrpc", "run", script(SCRIPT), "29791")
    assert run.end() == 0, run.output
    assert "all is well" in run.output


OBJECTS = """
import ray, torch
import rayrpc as rpc

def told(x):
    assert x.device == torch.device("cuda:0"), x.device
    return x.sum().item()

rpc.init_rpc("alone", rank=0, world_size=1)
x = torch.arange(1000.0, device="cuda:0")
future = torch.futures.Future(devices=["cuda:0"])
ref = rpc.object_ref(future)
future.set_result({"x": x, "y": torch.ones(3)})
got = ray.get(ref)
assert torch.equal(got["x"], x) and got["x"].device == x.device and got["y"].device.type == "cpu"
assert rpc.rpc_sync("alone", told, args=(rpc.RRef(x).object_ref(),)) == x.sum().item()
assert torch.equal(rpc.rref(rpc.RRef(x).object_ref()).to_here(), x)
rpc.shutdown()
print("all is well")
"""


def test_tensors_in_objects_arrive_on_the_same_device(start, script):
    run = start(
        "-m", "rayrpc", "run", script(OBJECTS), MASTER_ADDR="localhost", MASTER_PORT="29793"
    )
    assert run.end() == 0, run.output
    assert "all is well" in run.output


def test_random_programs_of_both_devices_do_what_they_do_in_one_process(start):
    tests = ROOT / "tests"
    path = python_path(ROOT, tests, tests / "autograd")
    program = str(tests / "autograd" / "device_programs.py")
    run = start("-m", "rayrpc", "run", program, "29792", "100", PYTHONPATH=path)
    assert run.end(600) == 0, run.output
    assert "programs do what they do in one process" in run.output


def fill(tensor, value):
    tensor.fill_(value)
    return tensor.device


def test_a_pool_shares_the_memory_of_a_device():
    rpc.configure(workers={"worker-*": {"num_gpus": 0.25}})
    try:
        with Pool(1, is_copy_tensor=False, share_method="cuda") as pool:
            tensor = torch.zeros(4, device="cuda:0")
            assert pool.apply(fill, (tensor, 3)) == tensor.device
            assert float(tensor.sum()) == 12
    finally:
        rpc.configure()
