"""Models on devices: sizes, and placements on machines that are described, not there."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import rayrpc as rpc
from rayrpc.parallel import assigner
from rayrpc.parallel.assigner import ClusterModelAssigner, ModelAssigner, ModelSizeEstimator

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


# -- over the workers of a group ------------------------------------------------------------------


def forward(rref, x):
    model = rref.local_value()
    return model(x), rpc.get_worker_info().name


def test_models_go_to_the_workers_of_a_group(ray_cluster):
    options = rpc.TensorPipeRpcBackendOptions(init_method="ray://assigned")
    rpc.init_rpc("driver", rpc_backend_options=options)
    rpc.start_workers(["left", "right"])
    try:
        torch.manual_seed(0)
        four = [nn.Linear(4, 4) for _ in range(4)]
        made = ClusterModelAssigner(four, {(0, 1): 1, (2, 3): 1}, complexity_match_weight=10)
        assert set(made.assignment) == {"left/cpu", "right/cpu"}, "the work is shared"
        for model, place, rref in zip(four, made.assignment, made.models, strict=True):
            result, worker = rpc.rpc_sync(rref.owner(), forward, (rref, torch.ones(4)))
            assert torch.equal(result, model(torch.ones(4)))
            assert place == f"{worker}/cpu"
        together = ClusterModelAssigner(four[:2], {(0, 1): 1}, ["left"], move_models=False)
        assert together.assignment == ["left/cpu"] * 2 and together.models == []
        with pytest.raises(
            RuntimeError, match=r"allowed memory in total on \['left/cpu', 'right/cpu'"
        ):
            ClusterModelAssigner(four, {}, max_mem_ratio=1e-12)
    finally:
        rpc.shutdown()


def place(worker, device, node, card, memory=1000.0, load=0.0):
    return assigner._Place(worker, device, node, card, memory, load)


def test_models_that_talk_stay_near(monkeypatch):
    gpus = [
        place("a", "cuda:0", "one", "one/x"),
        place("a", "cuda:1", "one", "one/y"),
        place("b", "cuda:0", "two", "two/z"),
    ]
    monkeypatch.setattr(assigner, "_places_of", lambda workers: gpus)
    options = {"workers": ["a", "b"], "model_size_multiplier": 1, "move_models": False}
    connected = {(0, 1): 1}
    for seed in range(3):
        torch.manual_seed(seed)
        near = ClusterModelAssigner(
            models(1), connected, connection_weight=20, complexity_match_weight=0.1, **options
        )
        assert len({each.split("/")[0] for each in near.assignment}) == 1, "on one worker"
        torch.manual_seed(seed)
        apart = ClusterModelAssigner(
            models(1, 3), {}, connection_weight=0, complexity_match_weight=50, **options
        )
        assert len(set(apart.assignment)) == 3


def test_what_two_workers_see_is_shared(monkeypatch):
    same = [place("a", "cuda:0", "n", "n/x", 100.0), place("b", "cuda:0", "n", "n/x", 100.0)]
    monkeypatch.setattr(assigner, "_places_of", lambda workers: same)
    options = {"workers": ["a", "b"], "model_size_multiplier": 1, "move_models": False}
    with pytest.raises(RuntimeError, match=r"only have 50\.00 MB"):
        ClusterModelAssigner(models(60, 1), {}, **options)


def test_a_worker_with_gpus_is_not_given_models_on_its_cpu():
    gpu, cpu = ("cuda:0", "n", "n/x", 1.0, 0.0), ("cpu", "n", "n", 1.0, 0.0)
    assert assigner._usable([gpu, cpu]) == [gpu] and assigner._usable([cpu]) == [cpu]
