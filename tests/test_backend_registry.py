"""Backends under torch's names, and those that libraries add."""

from __future__ import annotations

import pytest

from rayrpc import backend_registry as registry
from rayrpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions

# not there where torch was built without RPC
torch_registry = pytest.importorskip("torch.distributed.rpc.backend_registry", exc_type=ImportError)


@pytest.fixture
def restored(monkeypatch):
    """Forget backends that the test adds."""
    for module in (registry, torch_registry):
        monkeypatch.setattr(module, "BackendType", module.BackendType)


def test_tensorpipe_and_ray_are_two_names_of_ours():
    assert list(registry.BackendType.__members__) == ["TENSORPIPE", "RAY"]
    assert registry.backend_registered("TENSORPIPE")
    assert registry.backend_registered("RAY")
    assert not registry.backend_registered("tensorpipe")
    assert all(b.value.init_backend_handler is None for b in registry.BackendType)


def test_a_backend_prints_as_in_torch():
    assert repr(registry.BackendType.TENSORPIPE) == "BackendType.TENSORPIPE"
    assert repr(registry.BackendType.TENSORPIPE) == repr(torch_registry.BackendType.TENSORPIPE)


def test_a_value_has_torchs_fields():
    assert registry.BackendValue._fields == torch_registry.BackendValue._fields


@pytest.mark.parametrize("name", ["TENSORPIPE", "RAY"])
def test_options_are_made_as_by_torch(name):
    make = registry.construct_rpc_backend_options
    options = make(registry.BackendType[name])
    torchs = torch_registry.construct_rpc_backend_options(torch_registry.BackendType.TENSORPIPE)
    assert type(options) is TensorPipeRpcBackendOptions
    for field in ("num_worker_threads", "rpc_timeout", "init_method"):
        assert getattr(options, field) == getattr(torchs, field)
    options = make(
        registry.BackendType[name],
        rpc_timeout=3,
        init_method="tcp://h:1",
        num_worker_threads=2,
        _transports=["shm"],
        anything="else",
    )
    assert (options.rpc_timeout, options.init_method, options.num_worker_threads) == (
        3,
        "tcp://h:1",
        2,
    )


@pytest.mark.parametrize("module", [registry, torch_registry], ids=["ours", "torch's"])
def test_a_library_adds_a_backend_with_its_handlers(restored, module):
    made = []

    def options(rpc_timeout, init_method, **kwargs):
        return "options", rpc_timeout, init_method, kwargs

    def init(*args, **kwargs):
        made.append((args, kwargs))
        return "agent"

    old = module.BackendType
    backend = module.register_backend("MINE", options, init)
    assert backend is module.BackendType.MINE
    assert module.BackendType is not old
    assert module.backend_registered("MINE")
    assert module.backend_registered("TENSORPIPE")
    assert repr(backend) == "BackendType.MINE"
    assert module.construct_rpc_backend_options(backend, 1, "x", a=2) == (
        "options",
        1,
        "x",
        {"a": 2},
    )
    assert module.init_backend(backend, store=None, name="w") == "agent"
    assert made == [((), {"store": None, "name": "w"})]


def test_a_taken_name_is_refused_in_torchs_words(restored):
    texts = []
    for module in (registry, torch_registry):
        with pytest.raises(RuntimeError) as caught:
            module.register_backend("TENSORPIPE", RpcBackendOptions, print)
        texts.append(str(caught.value))
    assert texts[0] == texts[1] == "RPC backend TENSORPIPE: already registered"
