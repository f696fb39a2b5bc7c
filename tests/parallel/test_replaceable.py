"""Names of machin's modules can be replaced where machin has them, with effect."""

import importlib
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from rayrpc.parallel.assigner import ModelAssigner

MB = 1024**2

# What programs find in each of machin's modules, and rayrpc has, too.
NAMES = {
    "assigner": ["GPUtil", "ModelAssigner", "ModelSizeEstimator", "psutil"],
    "distributed": [
        "CollectiveGroup",
        "RpcGroup",
        "World",
        "get_cur_name",
        "get_cur_rank",
        "get_world",
        "is_world_initialized",
    ],
    "pickle": ["Pickler", "dumps", "loads", "mark_static_module"],
    "pool": [
        "CtxPool",
        "CtxPoolStorage",
        "CtxThreadPool",
        "P2PPool",
        "Pool",
        "ThreadPool",
        "dumps",
        "loads",
        "proxy_ctx_caller",
    ],
    "queue": ["SimpleQueue", "dumps", "loads"],
    "server": [
        "OrderedServerBase",
        "OrderedServerSimple",
        "OrderedServerSimpleImpl",
        "PushPullGradServer",
        "PushPullGradServerImpl",
        "PushPullModelServer",
        "PushPullModelServerImpl",
    ],
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in NAMES.items() for name in names]
)
def test_a_name_that_is_replaced_is_replaced_in_all_files_that_use_it(module, name):
    package = f"rayrpc.parallel.{module}"
    original = getattr(importlib.import_module(package), name)
    users = [
        each
        for key, each in sys.modules.items()
        if (key == package or key.startswith(f"{package}.")) and vars(each).get(name) is original
    ]
    replacement = object()
    with mock.patch(f"{package}.{name}", replacement):
        assert all(vars(each)[name] is replacement for each in users)
    assert all(vars(each)[name] is original for each in users)


def test_what_an_assigner_learns_of_models_and_devices_can_be_replaced():
    """As machin's own tests do."""
    gpus = [SimpleNamespace(memoryFree=1000, load=0), SimpleNamespace(memoryFree=10, load=0)]
    models: list[Any] = [SimpleNamespace(size=size, to=lambda device: None) for size in (600, 5)]
    assigner = "rayrpc.parallel.assigner"
    with (
        mock.patch(f"{assigner}.GPUtil.getAvailable", lambda order: [0, 1]),
        mock.patch(f"{assigner}.GPUtil.getGPUs", lambda: gpus),
        mock.patch(
            f"{assigner}.psutil.virtual_memory", lambda: SimpleNamespace(available=100 * MB)
        ),
        mock.patch(
            f"{assigner}.ModelSizeEstimator",
            lambda model, by: SimpleNamespace(estimate_size=lambda: model.size * by),
        ),
    ):
        torch.manual_seed(0)
        options: dict[str, Any] = {"model_size_multiplier": 1, "max_mem_ratio": 1}
        made = ModelAssigner(models, {(0, 1): 1}, size_match_weight=1, **options)
        assert made.assignment[0] == torch.device("cuda:0")
        with pytest.raises(RuntimeError, match=r"will use 605\.00 MB.*only have 100\.00 MB"):
            ModelAssigner(models, {(0, 1): 1}, ["cpu"], **options)
