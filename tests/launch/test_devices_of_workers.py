"""The devices that Ray assigns to workers, by what it names them in: no GPU is needed for that."""

import pytest
from conftest import ROOT, python_path

SEES = """
import os

import ray

import rayrpc as rpc

os.environ["CUDA_VISIBLE_DEVICES"] = "0,1,2,3"
ray.init(address="local", num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False)
rpc.start_workers(["a", "b"], resources={"num_gpus": 1})
rpc.start_workers(["without"])
for name in ("a", "b", "without"):
    print(name, "sees", rpc.rpc_sync(name, os.getenv, args=("CUDA_VISIBLE_DEVICES",)))
rpc.shutdown()
ray.shutdown()
"""


@pytest.mark.process
def test_a_worker_sees_the_devices_that_it_was_assigned_and_not_those_of_the_program(start, script):
    run = start(script(SEES), RAY_ADDRESS=None, PYTHONPATH=python_path(ROOT))
    assert run.end() == 0, run.output
    found = dict(line.split(" sees ") for line in run.output.splitlines() if " sees " in line)
    assert {found["a"], found["b"]} < {"0", "1", "2", "3"} and found["a"] != found["b"]
    assert found["without"] == "0,1,2,3"  # as in a process that the program starts
