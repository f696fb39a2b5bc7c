"""What may be a time-out, and what an odd one does."""

from __future__ import annotations

import fractions
import math
import time

import numpy
import torch
from probe import probe
from torch.distributed import rpc

PEER = "worker1"

REAL = {
    "int": 20,
    "bool": True,
    "numpy float": numpy.float32(20),
    "numpy int": numpy.int64(20),
    "tensor": torch.tensor(20.0),
    "int tensor": torch.tensor(20),
    "fraction": fractions.Fraction(20),
    "zero": 0,
    "unset": -1.0,
}
ODD = {
    "negative": -5.0,
    "nan": math.nan,
    "infinite": math.inf,
    "text": "x",
    "none": None,
    "list": [1],
    "complex": 1j,
}
TINY = {"tiny": 1e-9, "small": 1e-4}


def late(value, seconds=0.5):
    time.sleep(seconds)
    return value


@probe(cases={**REAL, **ODD})
def rpc_sync(timeout):
    return rpc.rpc_sync(PEER, torch.add, (torch.ones(1), 1), timeout=timeout)


@probe(cases={**REAL, **ODD})
def rpc_async(timeout):
    return rpc.rpc_async(PEER, torch.add, (torch.ones(1), 1), timeout=timeout).wait()


@probe(cases={**REAL, **ODD})
def remote(timeout):
    return rpc.remote(PEER, torch.add, (torch.ones(1), 1), timeout=timeout).to_here()


@probe(cases={**REAL, **ODD})
def to_here(timeout):
    return rpc.remote(PEER, torch.add, (torch.ones(1), 1)).to_here(timeout=timeout)


@probe(cases={**REAL, **ODD, **TINY})
def to_here_of_the_owner(timeout):
    return rpc.remote("worker0", torch.add, (torch.ones(1), 1)).to_here(timeout=timeout)


@probe(cases={**REAL, **ODD})
def proxy(timeout):
    rref = rpc.remote(PEER, torch.ones, ([2],))
    return rref.rpc_sync(timeout=timeout).size()


@probe("rpc ran for more than", "timeout", cases={**TINY, "negative": -0.5})
def slow_call(timeout):
    return rpc.rpc_sync(PEER, late, (1,), timeout=timeout)


@probe("rpc ran for more than", "timeout", cases={**TINY, "tenth": 0.1})
def slow_to_here(timeout):
    return rpc.remote(PEER, late, (1,)).to_here(timeout=timeout)


@probe()
def value_after_a_late_remote():
    rref = rpc.remote(PEER, late, (1, 1.0), timeout=0.2)
    time.sleep(2.0)
    return rref.to_here()


@probe()
def default():
    return rpc.get_rpc_timeout()


@probe(cases={**REAL, **ODD})
def set_default(timeout):
    before = rpc.get_rpc_timeout()
    try:
        rpc._set_rpc_timeout(timeout)
        return rpc.get_rpc_timeout()
    finally:
        rpc._set_rpc_timeout(before)
