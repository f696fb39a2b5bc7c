"""Models on devices: sizes, and placements on machines that are described, not there."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rayrpc.parallel import assigner
from rayrpc.parallel.assigner import ModelAssigner, ModelSizeEstimator

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
    """Describe the GPUs and the memory that there are."""

    def describe(gpus, cpu=1000, sizes=None):
        cards = [SimpleNamespace(memoryFree=memory, load=0) for memory in gpus]
        monkeypatch.setattr(assigner.GPUtil, "getGPUs", staticmethod(lambda: cards))
        memory = SimpleNamespace(available=cpu * MB)
        monkeypatch.setattr(assigner.psutil, "virtual_memory", lambda: memory)
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


class TestPlacements:
    def test_computation_is_spread(self, machine):
        machine([1000, 1000])
        assert set(assign()) == {"cuda:0", "cuda:1"}

    def test_models_that_talk_much_stay_together(self, machine):
        machine([1000, 1000])
        found = assign(connection_weight=10, complexity_match_weight=1)
        assert len(set(found)) == 1 and found[0].startswith("cuda")

    def test_no_device_gets_more_than_it_holds(self, machine):
        machine([20, 20])
        found = assign(12, connection_weight=10, size_match_weight=10, cpu_weight=0)
        assert set(found) == {"cuda:0", "cuda:1"}

    @pytest.mark.parametrize("devices", [["cuda:0", "cuda:1", "cpu"], ["cuda:3"], None])
    def test_devices_that_are_not_there_are_left_out(self, machine, devices, caplog):
        machine([])
        assert assign(devices=devices) == ["cpu", "cpu"]
        assert ("is not there" in caplog.text) == (devices is not None)

    def test_the_default_is_all_gpus(self, machine):
        machine([1000])
        assert assign(devices=None) == ["cuda:0", "cuda:0"]

    def test_models_that_do_not_fit_are_an_error(self, machine):
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


def test_one_step_lowers_the_cost_of_a_bad_placement():
    placement = torch.tensor([[2.0, -2.0], [2.0, -2.0]], requires_grad=True)
    optimizer = torch.optim.SGD([placement], lr=1.0)
    ones = torch.ones(1, 2)
    before = placement.softmax(-1)[:, 0].sum().item()
    ModelAssigner.optimize_placement(
        optimizer,
        placement,
        ones,
        ones * 10,
        ones,
        ones,
        torch.zeros(2, 2),
        torch.zeros(2, 2),
        *(0.0, 0.0, 1.0, 0.0),
    )
    assert placement.softmax(-1)[:, 0].sum().item() < before
