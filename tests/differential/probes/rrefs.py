"""RRefs, their proxies and their futures."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from probe import probe
from torch.distributed import rpc
from torch.distributed.rpc import RRef

PEER = "worker1"


class Counter:
    def __init__(self, value=0):
        self.value = value

    def add(self, number):
        self.value += number
        return self.value

    def fail(self):
        raise ValueError("expected error")


def add_by_rref(rref, number):
    return rref.to_here() + number


def call(function, *arguments):
    return function(*arguments)


def counter():
    return rpc.remote(PEER, Counter, (3,))


@probe()
def owner():
    rref = counter()
    return rref.is_owner(), rref.owner().name, rref.owner_name(), rref.owner() == rref.owner()


@probe()
def confirmed():
    rref = counter()
    rref.to_here()
    return rref.confirmed_by_owner()


@probe()
def proxies():
    rref = counter()
    return rref.rpc_sync().add(1), rref.rpc_async().add(1).wait(), rref.remote().add(1).to_here()


@probe("expected error", cases={"rpc_sync": 0, "rpc_async": 1, "remote": 2})
def failing_proxy(kind):
    rref = counter()
    if kind == 0:
        return rref.rpc_sync().fail()
    return rref.rpc_async().fail().wait() if kind == 1 else rref.remote().fail().to_here()


@probe("attribute", cases={"rpc_sync": "rpc_sync", "remote": "remote"})
def missing_method(kind):
    return getattr(counter(), kind)().nothing()


@probe()
def method_of_a_proxy_in_a_call():
    rref = counter()
    return rpc.rpc_sync(rref.owner(), rref.rpc_sync().add, args=(1,))


@probe()
def method_of_a_proxy_as_an_argument():
    rref = counter()
    return rpc.rpc_sync(PEER, call, (rref.rpc_sync().add, 2))


@probe()
def proxy_as_an_argument():
    rref = counter()
    return rpc.rpc_sync(PEER, isinstance, (rref.rpc_sync(), object))


@probe("rpc", cases={"pickle": pickle.dumps, "copy": copy.copy, "deepcopy": copy.deepcopy})
def outside_of_a_call(function):
    return type(function(counter())).__name__


@probe()
def attributes():
    rref = counter()
    rref.note = 5
    return rref.note


@probe()
def attributes_of_a_local_one():
    rref: Any = RRef(5)
    rref.note = 6
    return rref.note


@probe("local value", "user")
def local_value_of_a_user():
    return counter().local_value()


@probe()
def local_value():
    return RRef(torch.ones(2)).local_value()


@probe()
def type_hint():
    return RRef(5, type_hint=int).to_here()


@probe("type", cases={"int": 5, "text": "int"})
def odd_type_hint(hint):
    return RRef(5, hint).to_here()


@probe("argument")
def without_a_value():
    make: Any = RRef
    return make()


@probe()
def text():
    return str(RRef(5)).startswith("OwnerRRef(GloballyUniqueId("), str(counter())[:9]


@probe()
def of_an_rref():
    return rpc.rpc_sync(PEER, add_by_rref, (RRef(torch.ones(2)), 1))


@probe()
def sent_to_its_owner():
    return rpc.rpc_sync(PEER, add_by_rref, (rpc.remote(PEER, torch.ones, ([2],)), 1))


@probe()
def returned():
    return rpc.rpc_sync(PEER, rpc.remote, ("worker0", torch.ones, ([2],))).to_here()


@probe()
def future():
    rref = counter()
    return type(rref._get_future().wait())


@probe()
def creating_future_of_a_local_one():
    return RRef(5)._get_future().wait()


@probe("expected error")
def local_failure():
    rref = rpc.remote("worker0", Counter(1).fail)
    return rref.local_value()


@probe("backward", "autograd", "dist_autograd")
def backward_of_no_tensor():
    rref: Any = RRef(5)
    return rref.backward()


@probe()
def backward():
    leaf = torch.ones(2, requires_grad=True)
    rref: Any = RRef((leaf * 3).sum())
    rref.backward()
    return leaf.grad


@probe()
def equal():
    rref = counter()
    return rref == rref, rref == counter(), hash(rref) == hash(rref)


@probe()
def compared_type():
    return isinstance(counter(), RRef), type(counter()) is RRef, isinstance(RRef(1), RRef)


@probe()
def native_type():
    from torch._C._distributed_rpc import PyRRef

    return isinstance(counter(), PyRRef), isinstance(RRef(1), PyRRef), issubclass(RRef, PyRRef)


@probe()
def in_a_list():
    rrefs = [counter() for _ in range(3)]
    return rpc.rpc_sync(PEER, len, (rrefs,))


@torch.jit.script
def add_one(value: torch.distributed.rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return value.to_here() + 1


@probe()
def scripted_function_called_here():
    return add_one(RRef(torch.ones(1)))


@probe()
def scripted_function_called_there():
    return rpc.rpc_sync(PEER, add_one, (RRef(torch.ones(1)),))


@probe()
def is_owner_there():
    return rpc.rpc_sync(PEER, RRef.is_owner, (counter(),))


@probe(cases={"text": "x", "negative": -5})
def to_here_of_a_local_one(timeout):
    return RRef(5).to_here(timeout)
