"""Models on the devices of one process, which are faked."""

from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from rayrpc.parallel.assigner import GPUtil, ModelAssigner, ModelSizeEstimator

MB = 1024**2


def test_sizes_are_in_megabytes():
    model = nn.Module()
    for number, dtype in enumerate((torch.int8, torch.int16, torch.int32, torch.double)):
        values = nn.Parameter(torch.zeros(10, dtype=dtype), requires_grad=False)
        model.register_parameter(f"p{number}", values)
    model.register_buffer("b", torch.zeros(10))
    estimator = ModelSizeEstimator(model, size_multiplier=1)
    assert estimator.get_parameter_sizes() == (10 + 20 + 40 + 80) / MB
    assert estimator.get_buffer_sizes() == 40 / MB
    assert estimator.estimate_size() == 190 / MB
    assert ModelSizeEstimator(model).estimate_size() == 380 / MB


@pytest.fixture
def machine(monkeypatch):
    """Fake the GPUs and the memory of this machine, in MB."""

    def describe(gpus, cpu=1000, sizes=None):
        cards = [SimpleNamespace(memoryFree=memory, load=0) for memory in gpus]
        monkeypatch.setattr(GPUtil, "getGPUs", staticmethod(lambda: cards))
        memory = SimpleNamespace(available=cpu * MB)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        torch.manual_seed(0)

    return describe


def models(megabytes, count=2):
    return [nn.Linear(1, megabytes * MB // 4, bias=False) for _ in range(count)]


OPTIONS = {
    "model_connection": {(0, 1): 1},
    "devices": ["cuda:0", "cuda:1", "cpu"],
    "model_size_multiplier": 1,
    "max_mem_ratio": 0.7,
    "cpu_weight": 0.1,
    "connection_weight": 1,
    "complexity_match_weight": 10,
    "move_models": False,
}


def assign(megabytes=1, **changes):
    found = ModelAssigner(models(megabytes), **{**OPTIONS, **changes}).assignment
    return [str(device) for device in found]


def test_computation_is_spread(machine):
    machine([1000, 1000])
    assert set(assign()) == {"cuda:0", "cuda:1"}


def test_models_that_exchange_much_data_stay_together(machine):
    machine([1000, 1000])
    found = assign(connection_weight=10, complexity_match_weight=1)
    assert len(set(found)) == 1 and found[0].startswith("cuda")


def test_no_device_gets_more_than_it_holds(machine):
    machine([20, 20])
    found = assign(12, connection_weight=10, size_match_weight=10, cpu_weight=0)
    assert set(found) == {"cuda:0", "cuda:1"}


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1", "cpu"], ["cuda:3"], None])
def test_devices_that_do_not_exist_are_left_out(machine, devices, caplog):
    machine([])
    assert assign(devices=devices) == ["cpu", "cpu"]
    assert ("does not exist" in caplog.text) == (devices is not None)


def test_the_default_is_all_gpus(machine):
    machine([1000])
    assert assign(devices=None) == ["cuda:0", "cuda:0"]


def test_models_that_do_not_fit_are_an_error(machine):
    machine([10], cpu=10)
    with pytest.raises(RuntimeError, match=r"Estimated model will use 80\.00 MB, but only"):
        assign(40)


def test_models_are_moved(machine):
    machine([], cpu=1000)
    (model,) = models(1, count=1)
    moved = []
    model.to = moved.append
    ModelAssigner([model], {}, move_models=True)
    assert moved == [torch.device("cpu")]
