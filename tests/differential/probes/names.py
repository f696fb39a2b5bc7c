"""Names that torch's modules have, private ones included, and what is of which class."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import torch
from probe import probe
from torch.distributed import rpc

FILES = {
    "torch.distributed.rpc": "rpc/__init__.py",
    "torch.distributed.rpc.api": "rpc/api.py",
    "torch.distributed.rpc.backend_registry": "rpc/backend_registry.py",
    "torch.distributed.rpc.constants": "rpc/constants.py",
    "torch.distributed.rpc.functions": "rpc/functions.py",
    "torch.distributed.rpc.internal": "rpc/internal.py",
    "torch.distributed.rpc.options": "rpc/options.py",
    "torch.distributed.rpc.rref_proxy": "rpc/rref_proxy.py",
    "torch.distributed.autograd": "autograd/__init__.py",
    "torch.distributed.optim.optimizer": "optim/optimizer.py",
    "torch.distributed.nn.api.remote_module": "nn/api/remote_module.py",
}
OTHERS = ("typing", "typing_extensions", "collections", "contextlib", "__future__")


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (each.id for each in targets if isinstance(each, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            if node.level or (node.module or "").split(".")[0] == "torch":
                yield from (each.asname or each.name for each in node.names)
        elif isinstance(node, ast.If):
            yield from _defined(node.body)


def _names() -> dict[str, tuple[str, str]]:
    folder = Path(torch.__file__).parent / "distributed"
    found = {}
    for module, file in FILES.items():
        for name in _defined(ast.parse((folder / file).read_text()).body):
            if not name.startswith("__"):
                found[f"{module}.{name}"] = (module, name)
    return found


@probe(cases=_names())
def has(place):
    return hasattr(importlib.import_module(place[0]), place[1])


@probe(
    cases={name: name for name in ("rpc", "autograd", "nn", "nn.api", "optim", "optim.optimizer")}
)
def reached_from_its_parent(name):
    import torch.distributed.nn
    import torch.distributed.optim

    found = torch.distributed
    for part in name.split("."):
        found = getattr(found, part)
    return found.__name__


AGENT = (
    "get_worker_info",
    "get_worker_infos",
    "get_debug_info",
    "get_metrics",
    "join",
    "shutdown",
    "sync",
    "store",
    "_get_device_map",
    "_get_backend_options",
    "is_static_group",
    "add_gil_wait_time",
    "enable_gil_profiling",
)


@probe(cases={name: name for name in AGENT})
def agent_has(name):
    return hasattr(rpc.api._get_current_rpc_agent(), name)


@probe()
def agent_class():
    agent = rpc.api._get_current_rpc_agent()
    return isinstance(agent, rpc.RpcAgent), isinstance(agent, rpc.TensorPipeAgent)


@probe()
def native_agent_class():
    from torch._C import _distributed_rpc

    agent = rpc.api._get_current_rpc_agent()
    return isinstance(agent, _distributed_rpc.RpcAgent)


@probe()
def native_agent():
    from torch._C import _distributed_rpc

    return _distributed_rpc._get_current_rpc_agent() is not None


@probe()
def native_agent_is_set():
    from torch._C import _distributed_rpc

    return _distributed_rpc._is_current_rpc_agent_set()


@probe()
def native_worker_info():
    from torch._C import _distributed_rpc

    return isinstance(rpc.get_worker_info(), _distributed_rpc.WorkerInfo)


@probe()
def native_options():
    from torch._C import _distributed_rpc

    made = rpc.TensorPipeRpcBackendOptions()
    base = _distributed_rpc._TensorPipeRpcBackendOptionsBase
    return isinstance(made, base), isinstance(made, rpc.RpcBackendOptions)


@probe()
def native_timeout():
    from torch._C import _distributed_rpc

    return _distributed_rpc.get_rpc_timeout()


@probe()
def worker_info():
    info = rpc.get_worker_info()
    return info.name, info.id, repr(info), info == rpc.get_worker_info("worker0")


@probe("attribute", cases={"name": "name", "id": "id"})
def worker_info_is_fixed(name):
    setattr(rpc.get_worker_info(), name, 5)


@probe("incompatible function arguments", cases={"none": (), "one": ("a",), "text": ("a", "b")})
def worker_info_of(arguments):
    return rpc.WorkerInfo(*arguments)


@probe("unknown", cases={"name": "nobody", "empty": "", "int": 1, "none": None, "float": 1.5})
def get_worker_info(name):
    return rpc.get_worker_info(name).name


@probe()
def debug_info():
    return sorted(
        name.rpartition(".")[2]
        for name in rpc.api._get_current_rpc_agent().get_debug_info()
        if not name.startswith("agent.gil")
    )


@probe()
def rref_debug_info():
    return sorted(rpc._rref_context_get_debug_info())


@probe()
def to_worker_info():
    return [rpc.api._to_worker_info(each).name for each in ("worker1", 1, rpc.get_worker_info())]


@probe()
def mode():
    kinds = rpc.api.RPCExecMode if hasattr(rpc.api, "RPCExecMode") else rpc.internal.RPCExecMode
    return [(each.name, each.value) for each in kinds]


@probe()
def run_function():
    from torch.distributed.rpc import internal

    return internal._run_function(internal.PythonUDF(torch.add, (1, 1), {}))


@probe("expected error")
def handle_exception():
    from torch.distributed.rpc import internal

    result = internal._run_function(internal.PythonUDF(int, ("expected error",), {}))
    return internal._handle_exception(result)


@probe()
def functional_map():
    from torch.distributed.optim import utils

    return sorted(each.__name__ for each in utils.functional_optim_map)


@probe()
def gil_profiling():
    agent = rpc.api._get_current_rpc_agent()
    rpc.enable_gil_profiling(True)
    names = sorted(each for each in agent.get_debug_info() if "gil" in each)
    rpc.enable_gil_profiling(False)
    return names


@probe()
def type_of_an_rref_there():
    rref = rpc.remote("worker1", torch.ones, (2,))
    return rpc.api._rref_typeof_on_user(rref)


@probe()
def type_of_an_rref_here():
    return rpc.api._rref_typeof_on_owner(rpc.RRef(5))
