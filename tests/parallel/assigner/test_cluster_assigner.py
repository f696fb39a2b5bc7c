"""Models on the devices of the workers of a group."""

from typing import Any

import pytest
import torch
from torch import nn

import rayrpc as rpc
from rayrpc.parallel.assigner import ClusterModelAssigner, cluster_assigner

MB = 1024**2


def models(megabytes, count=2):
    return [nn.Linear(1, megabytes * MB // 4, bias=False) for _ in range(count)]


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
    return cluster_assigner._Place(worker, device, node, card, memory, load)


def test_models_that_exchange_data_stay_near(monkeypatch):
    gpus = [
        place("a", "cuda:0", "one", "one/x"),
        place("a", "cuda:1", "one", "one/y"),
        place("b", "cuda:0", "two", "two/z"),
    ]
    monkeypatch.setattr(cluster_assigner, "_find_places", lambda workers: gpus)
    options: Any = {"workers": ["a", "b"], "model_size_multiplier": 1, "move_models": False}
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


def test_workers_share_the_memory_of_the_same_gpu(monkeypatch):
    same = [place("a", "cuda:0", "n", "n/x", 100.0), place("b", "cuda:0", "n", "n/x", 100.0)]
    monkeypatch.setattr(cluster_assigner, "_find_places", lambda workers: same)
    options: Any = {"workers": ["a", "b"], "model_size_multiplier": 1, "move_models": False}
    with pytest.raises(RuntimeError, match=r"only have 50\.00 MB"):
        ClusterModelAssigner(models(60, 1), {}, **options)


def test_a_worker_with_gpus_is_not_given_models_on_its_cpu():
    gpu, cpu = ("cuda:0", "n", "n/x", 1.0, 0.0), ("cpu", "n", "n", 1.0, 0.0)
    select = cluster_assigner._select_usable
    assert select([gpu, cpu]) == [gpu] and select([cpu]) == [cpu]
