"""Remote modules."""

from __future__ import annotations

import torch
from probe import probe
from torch.distributed import rpc
from torch.distributed.nn import RemoteModule

PEER = "worker1"


def linear():
    return RemoteModule(PEER, torch.nn.Linear, (2, 2))


class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = linear()

    def forward(self, value):
        return self.inner(value) + 1


@probe()
def call():
    return linear()(torch.ones(1, 2)).shape


@probe()
def forward_async():
    return linear().forward_async(torch.ones(1, 2)).wait().shape


@probe()
def traced():
    graph = torch.fx.symbolic_trace(Outer()).graph
    return [node.op for node in graph.nodes]


@probe()
def forward_hooks():
    seen = []
    module = linear()
    return _try(lambda: module.register_forward_hook(lambda *_: seen.append(1))), seen


@probe()
def is_a_module():
    module = linear()
    return isinstance(module, torch.nn.Module), list(module.children()), module.training


NAMES = (
    "parameters",
    "buffers",
    "children",
    "modules",
    "named_parameters",
    "state_dict",
    "zero_grad",
    "requires_grad_",
    "cpu",
    "float",
    "half",
    "share_memory",
    "extra_repr",
    "named_modules",
    "type",
)


def _try(function):
    try:
        return str(type(function()).__name__)
    except Exception as exc:
        return type(exc).__name__


@probe(cases={name: name for name in NAMES})
def method(name):
    getattr(linear(), name)()


@probe()
def train():
    module = linear()
    return type(module.train()).__name__, type(module.eval()).__name__, module.training


@probe()
def in_a_list_of_modules():
    return len(torch.nn.ModuleList([linear(), linear()]))


@probe()
def text():
    return repr(linear())[:12]


@probe()
def remote_parameters():
    parameters = linear().remote_parameters()
    return len(parameters), parameters[0].to_here().shape


@probe()
def module_rref():
    return type(linear().get_module_rref()).__name__


@probe("device", cases={"name": "worker1", "device": "worker1/cpu", "rank": "rank:1/cpu"})
def place(text):
    return RemoteModule(text, torch.nn.Linear, (2, 2)).device


@probe(cases={"none": None, "empty": "", "slash": "/cpu", "two": "a/b/c", "unknown": "nobody/cpu"})
def odd_place(text):
    return RemoteModule(text, torch.nn.Linear, (2, 2)).device


@probe(cases={"function": torch.add, "int": 5, "module": torch.nn.Linear(1, 1)})
def odd_class(given):
    return RemoteModule(PEER, given)


@probe()
def sent():
    return rpc.rpc_sync(PEER, torch.nn.Module.__call__, (linear(), torch.ones(1, 2))).shape


@probe("pickle", "rpc")
def pickled_outside():
    import pickle

    return pickle.dumps(linear())
