"""The distributed optimizer, beside torch's functional ones."""

from __future__ import annotations

import torch
from probe import probe
from torch import optim
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer

PEER = "worker1"

KINDS = {
    each.__name__: (each, options)
    for each, options in (
        (optim.Adadelta, {}),
        (optim.Adagrad, {}),
        (optim.Adam, {}),
        (optim.AdamW, {}),
        (optim.Adamax, {}),
        (optim.RMSprop, {}),
        (optim.Rprop, {}),
        (optim.SGD, {"lr": 0.1}),
        (optim.ASGD, {}),
        (optim.NAdam, {}),
        (optim.RAdam, {}),
    )
}
OPTIONS = {
    "SGD of negative lr": (optim.SGD, {"lr": -1}),
    "SGD of no lr": (optim.SGD, {}),
    "SGD with momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "SGD of nesterov alone": (optim.SGD, {"lr": 0.1, "nesterov": True}),
    "SGD with decay": (optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    "Adam of negative lr": (optim.Adam, {"lr": -1}),
    "Adam with amsgrad": (optim.Adam, {"amsgrad": True}),
    "Adam of large beta": (optim.Adam, {"betas": (1.5, 0.9)}),
    "Adamax with lr": (optim.Adamax, {"lr": 0.1}),
    "AdamW with decay": (optim.AdamW, {"weight_decay": 0.5}),
    "RMSprop centered": (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "unknown option": (optim.SGD, {"lr": 0.1, "nothing": 1}),
    "foreach": (optim.SGD, {"lr": 0.1, "foreach": False}),
}


class Model:
    def __init__(self):
        self.weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))

    def forward(self, value):
        return self.weight @ value

    def parameters(self):
        return [rpc.RRef(self.weight)]

    def value(self):
        return self.weight.detach()


def train(kind, options, steps=3):
    model = rpc.remote(PEER, Model)
    optimizer = DistributedOptimizer(kind, model.rpc_sync().parameters(), **options)
    for step in range(steps):
        with autograd.context() as context:
            loss = model.rpc_sync().forward(torch.tensor([1.0, 2.0 + step])).pow(2).sum()
            autograd.backward(context, [loss])
            optimizer.step(context)
    weight = model.rpc_sync().value()
    return [round(each, 5) for each in weight.flatten().tolist()]


@probe("invalid", cases=KINDS)
def steps(given):
    return train(*given)


@probe("invalid", "unexpected", cases=OPTIONS)
def options(given):
    return train(*given)


@probe(cases=KINDS)
def is_functional(given):
    model = rpc.remote(PEER, Model)
    made = DistributedOptimizer(given[0], model.rpc_sync().parameters(), **given[1])
    return made.is_functional_optim


@probe()
def no_parameters():
    return DistributedOptimizer(optim.SGD, [], lr=0.1).is_functional_optim


@probe()
def attributes():
    model = rpc.remote(PEER, Model)
    made = DistributedOptimizer(optim.SGD, model.rpc_sync().parameters(), lr=0.1)
    return sorted(name for name in vars(made))


@probe("context", "autograd")
def step_of_an_unknown_context():
    model = rpc.remote(PEER, Model)
    DistributedOptimizer(optim.SGD, model.rpc_sync().parameters(), lr=0.1).step(12345)
