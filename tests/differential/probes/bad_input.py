"""Arguments and environments that cannot be right; each in a process that is in no group."""

from __future__ import annotations

import os
from typing import Any

import torch
from probe import probe
from torch.distributed import rpc

METHODS = {
    "int": 5,
    "empty": "",
    "no scheme": "localhost:29500",
    "unknown scheme": "http://localhost:1",
    "no port": "tcp://localhost",
    "port of letters": "tcp://localhost:abc",
    "rank of letters": "tcp://localhost:29511?rank=x&world_size=1",
    "bytes": b"env://",
}


@probe("url", "init_method", "rank", cases=METHODS, alone=True)
def init_method(given):
    options = rpc.TensorPipeRpcBackendOptions(init_method=given)
    rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options)


@probe("MASTER_PORT", cases={"letters": "abc", "negative": "-5", "large": "99999999"}, alone=True)
def master_port(given):
    os.environ["MASTER_PORT"] = given
    rpc.init_rpc("a", rank=0, world_size=1)


@probe("MASTER_ADDR", alone=True)
def no_master_addr():
    del os.environ["MASTER_ADDR"]
    rpc.init_rpc("a", rank=0, world_size=1)


@probe("rank", cases={"letters": "x", "negative": "-1", "empty": ""}, alone=True)
def rank_of_the_environment(given):
    os.environ.update(RANK=given, WORLD_SIZE="1")
    rpc.init_rpc("a")


@probe(
    "rank",
    "world",
    "incompatible function arguments",
    cases={
        "negative rank": (-2, 1),
        "rank of text": ("0", 1),
        "rank of float": (0.5, 1),
        "rank too large": (1, 1),
        "size of zero": (0, 0),
        "negative size": (0, -2),
        "size of text": (0, "1"),
    },
    alone=True,
)
def rank_and_size(given):
    rank, size = given
    options = rpc.TensorPipeRpcBackendOptions(init_method="tcp://localhost:29513", rpc_timeout=3)
    rpc.init_rpc("a", rank=rank, world_size=size, rpc_backend_options=options)


@probe(
    "name",
    "incompatible function arguments",
    cases={"empty": "", "int": 5, "space": "a b", "none": None, "long": "a" * 200, "dot": "a.b"},
    alone=True,
)
def name(given):
    rpc.init_rpc(given, rank=0, world_size=1)
    rpc.shutdown(graceful=False)


@probe("backend", cases={"text": "tensorpipe", "int": 5}, alone=True)
def backend(given):
    rpc.init_rpc("a", backend=given, rank=0, world_size=1)


@probe("options", cases={"dict": {}, "base": rpc.RpcBackendOptions, "int": 5}, alone=True)
def backend_options(given):
    options = given() if isinstance(given, type) else given
    rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options)


@probe("already initialized", "initialized", alone=True)
def twice():
    rpc.init_rpc("a", rank=0, world_size=1)
    rpc.init_rpc("a", rank=0, world_size=1)


CALLS = {
    "rpc_sync": lambda: rpc.rpc_sync("a", torch.add, (1, 1)),
    "rpc_async": lambda: rpc.rpc_async("a", torch.add, (1, 1)),
    "remote": lambda: rpc.remote("a", torch.add, (1, 1)),
    "get_worker_info": lambda: rpc.get_worker_info(),
    "shutdown": lambda: rpc.shutdown(),
    "shutdown at once": lambda: rpc.shutdown(graceful=False),
    "RRef": lambda: rpc.RRef(5),
    "agent": lambda: rpc.api._get_current_rpc_agent(),
    "timeout": lambda: rpc.get_rpc_timeout(),
    "context": lambda: torch.distributed.autograd.context().__enter__(),
    "is set": lambda: rpc.api._is_current_rpc_agent_set(),
}


in_no_group = probe(
    "current rpc agent is not set",
    "rpc has not been initialized",
    "init_rpc",
    cases=CALLS,
    alone=True,
)


@in_no_group
def before_init(function):
    return function()


@in_no_group
def after_shutdown(function):
    rpc.init_rpc("a", rank=0, world_size=1)
    rpc.shutdown()
    return function()


OPTIONS = {
    "threads of zero": {"num_worker_threads": 0},
    "negative threads": {"num_worker_threads": -1},
    "threads of text": {"num_worker_threads": "4"},
    "threads of float": {"num_worker_threads": 4.5},
    "timeout of text": {"rpc_timeout": "5"},
    "negative timeout": {"rpc_timeout": -5},
    "timeout of nan": {"rpc_timeout": float("nan")},
    "infinite timeout": {"rpc_timeout": float("inf")},
    "zero timeout": {"rpc_timeout": 0},
    "timeout of tensor": {"rpc_timeout": torch.tensor(5.0)},
    "maps of int": {"device_maps": 5},
    "maps of text": {"device_maps": {"a": "cuda"}},
    "map of cpu": {"device_maps": {"a": {"cpu": "cpu"}}},
    "empty map": {"device_maps": {}},
    "map of duplicates": {"device_maps": {"a": {0: 1, 1: 1}}},
    "devices of int": {"devices": 5},
    "cpu": {"devices": ["cpu"]},
    "cpu and cuda": {"devices": ["cpu", "cuda:0"]},
    "cuda": {"devices": ["cuda:0"]},
    "transports": {"_transports": ["nothing"]},
    "channels": {"_channels": ["basic"]},
    "unknown": {"nothing": 1},
}


@probe("incompatible", "must be positive", "non-negative", cases=OPTIONS, alone=True)
def options(given):
    made = rpc.TensorPipeRpcBackendOptions(**given)
    return made.num_worker_threads, made.rpc_timeout, made.init_method, made.device_maps


@probe("incompatible", "must be positive", "non-negative", cases=OPTIONS, alone=True)
def use_of_options(given):
    made = rpc.TensorPipeRpcBackendOptions(**given)
    rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=made)
    return rpc.get_rpc_timeout()


@probe(alone=True)
def device_maps_are_a_copy():
    made = rpc.TensorPipeRpcBackendOptions()
    made.device_maps["a"] = {torch.device("cuda:0"): torch.device("cuda:0")}
    return list(made.device_maps)


@probe("map", "cuda", "device", cases={"ints": {0: 1}, "text": "x", "int": 5}, alone=True)
def set_device_map(given):
    made = rpc.TensorPipeRpcBackendOptions()
    made.set_device_map("a", given)
    return made.device_maps


ATTRIBUTES = {
    "rpc_timeout": ("rpc_timeout", 7),
    "init_method": ("init_method", "tcp://localhost:1"),
    "num_worker_threads": ("num_worker_threads", 4),
    "devices": ("devices", []),
    "new": ("nothing", 5),
    "timeout of text": ("rpc_timeout", "x"),
}


@probe("attribute", "incompatible function arguments", cases=ATTRIBUTES, alone=True)
def set_attribute(given):
    made = rpc.TensorPipeRpcBackendOptions()
    setattr(made, *given)
    return getattr(made, given[0])


@probe("callable", "attribute", cases={"int": 5, "none": None}, alone=True)
def async_execution(given):
    return callable(rpc.functions.async_execution(given))


@probe(alone=True)
def unused_options():
    rpc.init_rpc("a", rank=0, world_size=1)
    agent: Any = rpc.api._get_current_rpc_agent()
    found = agent._get_backend_options()
    return found.num_worker_threads, found.rpc_timeout, found.init_method


@probe(
    cases={"context": "context", "backward": "backward", "gradients": "get_gradients"}, alone=True
)
def autograd(name):
    rpc.init_rpc("a", rank=0, world_size=1)
    if name == "context":
        with torch.distributed.autograd.context() as one:
            return one > 0
    if name == "backward":
        return torch.distributed.autograd.backward(123, [torch.ones(1, requires_grad=True)])
    return torch.distributed.autograd.get_gradients(123)
