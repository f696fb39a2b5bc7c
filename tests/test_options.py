"""Options of backends: torch's names, defaults, checks and texts."""

from __future__ import annotations

import inspect

import pytest
import torch

from rayrpc import options
from rayrpc.options import (
    RpcBackendOptions,
    TensorPipeRpcBackendOptions,
    validate_device_maps,
)

# not there where torch was built without RPC
torch_registry = pytest.importorskip("torch.distributed.rpc.backend_registry", exc_type=ImportError)
TorchOptions = torch.distributed.rpc.TensorPipeRpcBackendOptions
TorchBaseOptions = torch.distributed.rpc.RpcBackendOptions
torch_constants = torch.distributed.rpc.constants

CUDA0, CUDA1, CUDA2 = (torch.device("cuda", i) for i in range(3))


def test_the_defaults_are_torchs():
    ours, torchs = TensorPipeRpcBackendOptions(), TorchOptions()
    for name in ("num_worker_threads", "rpc_timeout", "init_method", "device_maps", "devices"):
        assert getattr(ours, name) == getattr(torchs, name), name
    plain, base = RpcBackendOptions(), TorchBaseOptions()
    assert (plain.rpc_timeout, plain.init_method) == (base.rpc_timeout, base.init_method)


def test_the_signature_is_torchs():
    ours, torchs = (
        {
            name: (parameter.kind, parameter.default)
            for name, parameter in inspect.signature(kind).parameters.items()
        }
        for kind in (TensorPipeRpcBackendOptions, TorchOptions)
    )
    assert ours == torchs


@pytest.mark.parametrize("name", [n for n in options.__all__ if n.isupper()])
def test_constants_are_torchs(name):
    assert getattr(options, name) == getattr(torch_constants, name)


def test_what_is_given_is_kept():
    made = TensorPipeRpcBackendOptions(
        num_worker_threads=3,
        rpc_timeout=7,
        init_method="tcp://h:1",
        device_maps={"b": {"cuda:0": "cuda:1"}},
        devices=["cuda:0"],
        _transports=["shm"],
        _channels=["basic"],
    )
    assert (made.num_worker_threads, made.rpc_timeout, made.init_method) == (3, 7.0, "tcp://h:1")
    assert made.device_maps == {"b": {CUDA0: CUDA1}}
    assert made.devices == [CUDA0]


def test_the_timeout_can_be_set_later():
    made = TensorPipeRpcBackendOptions()
    made.rpc_timeout = 3
    assert made.rpc_timeout == 3.0
    made.rpc_timeout = 0  # none


@pytest.mark.parametrize("timeout", ["1", None, [1]])
def test_a_timeout_is_a_number(timeout):
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        RpcBackendOptions(rpc_timeout=timeout)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        RpcBackendOptions().rpc_timeout = timeout


def test_a_timeout_is_not_negative():
    with pytest.raises(ValueError, match="rpc_timeout must be non-negative"):
        RpcBackendOptions(rpc_timeout=-1)


@pytest.mark.parametrize("threads", ["1", 1.5, True])
def test_the_number_of_threads_is_an_int(threads):
    with pytest.raises(TypeError, match="incompatible constructor arguments"):
        TensorPipeRpcBackendOptions(num_worker_threads=threads)


def test_there_is_at_least_one_thread():
    with pytest.raises(ValueError, match="num_worker_threads must be positive, got 0"):
        TensorPipeRpcBackendOptions(num_worker_threads=0)


# Device maps


def test_device_maps_add_up():
    made = TensorPipeRpcBackendOptions(device_maps={"b": {"cuda:0": "cuda:1"}})
    made.set_device_map("b", {"cuda:1": "cuda:2"})
    made.set_device_map("c", {"cuda:0": "cpu"})
    assert made.device_maps == {
        "b": {CUDA0: CUDA1, CUDA1: CUDA2},
        "c": {CUDA0: torch.device("cpu")},
    }


def test_devices_can_be_set():
    made = TensorPipeRpcBackendOptions()
    made.set_devices(["cuda:1", CUDA0])
    assert made.devices == [CUDA1, CUDA0]


@pytest.mark.parametrize(
    "act",
    [
        lambda kind: kind(devices=["cpu"]),
        lambda kind: kind().set_devices(["cpu"]),
        lambda kind: kind(device_maps={"b": {"cuda:0": "cuda:1", "cuda:1": "cuda:1"}}),
        lambda kind: kind().set_device_map("b", {"cuda:0": "cuda:1", "cuda:1": "cuda:1"}),
        lambda kind: kind(device_maps={"b": {"cuda:0": "cuda:1"}}).set_device_map(
            "b", {"cuda:0": "cuda:2"}
        ),
    ],
)
def test_wrong_devices_are_refused_in_torchs_words(act):
    with pytest.raises(ValueError) as torchs:
        act(TorchOptions)
    with pytest.raises(ValueError) as ours:
        act(TensorPipeRpcBackendOptions)
    assert str(ours.value) == str(torchs.value)


def peers(**more):
    """Two workers with two devices each; ``more`` by name."""
    both = {n: {"device_maps": {}, "devices": [], "device_count": 2} for n in "ab"}
    for name, changes in more.items():
        both[name] |= changes
    return both


@pytest.mark.parametrize(
    "group",
    [
        peers(),
        peers(a={"device_maps": {"b": {CUDA0: CUDA1}}}),
        peers(a={"device_maps": {"b": {CUDA0: torch.device("cpu")}}, "devices": [CUDA0]}),
        peers(a={"devices": [CUDA0, CUDA0]}),
        peers(a={"devices": [CUDA2]}),
        peers(a={"device_maps": {"nobody": {CUDA0: CUDA1}}}),
        peers(a={"device_maps": {"b": {CUDA0: CUDA1, CUDA1: CUDA1}}}),
        peers(a={"device_maps": {"b": {CUDA0: CUDA1}}, "devices": [CUDA1]}),
        peers(a={"device_maps": {"b": {CUDA2: CUDA1}}}),
        peers(a={"device_maps": {"b": {CUDA0: CUDA1}}}, b={"devices": [CUDA0]}),
        peers(a={"device_maps": {"b": {CUDA0: CUDA2}}}),
    ],
)
@pytest.mark.parametrize("is_static", [True, False])
def test_the_maps_of_a_group_are_checked_as_by_torch(group, is_static):
    fields = [{n: p[f] for n, p in group.items()} for f in ("device_count", "device_maps")]
    devices = {n: p["devices"] for n, p in group.items()}
    torchs = ours = None
    try:
        torch_registry._validate_device_maps(list(group), *fields, devices, is_static)
    except ValueError as exc:
        torchs = str(exc)
    try:
        validate_device_maps(group, is_static)
    except ValueError as exc:
        ours = str(exc)
    assert ours == torchs


def test_a_map_to_a_worker_that_has_not_joined_yet_is_fine_in_a_dynamic_group():
    group = peers(a={"device_maps": {"later": {CUDA0: CUDA1}}})
    validate_device_maps(group, is_static=False)
    with pytest.raises(ValueError, match="invalid target node names"):
        validate_device_maps(group, is_static=True)
