"""Ctrl-C at each point of each kind of call: later calls go on, and no RRef is kept.

Two whole workers in this process, on direct connections; only the thread that calls is struck.
"""

from __future__ import annotations

import gc
from pathlib import Path

import memory_workers
import pytest
import torch
from conftest import RUNS_ALL, eventually
from interrupting import strikes

import rayrpc
from rayrpc._runtime import agent, caller
from rayrpc._transports import memory
from rayrpc._transports.direct.transport import DirectTransport
from rayrpc._transports.memory import MemoryTransport

FILES = {str(path) for path in Path(rayrpc.__file__).parent.rglob("*.py")} - {memory.__file__}
CALLER = {module.__file__ for module in (agent, caller)}
SECONDS = 30.0
# The gate strikes at every fourth point.
STEP = 1 if RUNS_ALL else 4
CHECK_STEP = 8 * STEP
TENSOR = torch.ones(50_000)  # goes by shared memory


@pytest.fixture
def lost():
    """Why connections were lost."""
    return []


@pytest.fixture
def workers(monkeypatch, lost):
    class Transport(DirectTransport):
        def on_connection_lost(self, connection, reason):
            lost.append(reason)
            super().on_connection_lost(connection, reason)

    def transport(hub, token):
        return Transport(MemoryTransport(hub, token), token)

    monkeypatch.setattr(memory_workers, "MemoryTransport", transport)
    with memory_workers.memory_group() as start:
        yield start("a"), start("b")


def make():
    return torch.ones(3)


def same(value):
    return value


def take(value):
    return None


#: by name: what a, which uses an RRef of b, and owns another one, does
CALLS = {
    "rpc_sync": lambda a, b, used, owned: a.sync(b, abs, -1),
    "rpc_sync to oneself": lambda a, b, used, owned: a.sync(a, abs, -1),
    "rpc_async": lambda a, b, used, owned: a.future(b, abs, -1).wait(),
    "rpc_async to oneself": lambda a, b, used, owned: a.future(a, abs, -1).wait(),
    "remote": lambda a, b, used, owned: a.remote(b, make),
    "remote to oneself": lambda a, b, used, owned: a.remote(a, make),
    "to_here": lambda a, b, used, owned: used.to_here(),
    "an RRef that is lent": lambda a, b, used, owned: a.sync(b, take, used),
    "an RRef that is used": lambda a, b, used, owned: a.sync(a, take, used),
    "an RRef that is owned": lambda a, b, used, owned: a.sync(b, take, owned),
    "an RRef that returns": lambda a, b, used, owned: a.sync(b, same, owned),
    "an RRef that returns, by rpc_async": lambda a, b, used, owned: a.future(b, same, owned).wait(),
    "an RRef, by rpc_async": lambda a, b, used, owned: a.future(a, take, used).wait(),
    "a tensor": lambda a, b, used, owned: a.sync(b, take, TENSOR),
    "a tensor that returns": lambda a, b, used, owned: a.sync(b, torch.neg, TENSOR),
}


#: of those that differ most; each takes seconds
QUICK = [
    "rpc_async to oneself",
    "remote",
    "an RRef that returns, by rpc_async",
    "a tensor that returns",
]


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CALLS],
)
def test_a_call_may_be_struck_at_any_point(workers, lost, name):
    a, b = workers
    strike_each_point(a, b, CALLS[name])
    # the memory of a reply comes into use once
    assert not lost or name == "a tensor that returns"
    gc.collect()
    assert eventually(lambda: a.is_empty() and b.is_empty())


@pytest.mark.parametrize("way", ["rpc_sync", "rpc_async"])
def test_an_rref_in_the_reply_to_a_struck_call_is_released(workers, way):
    a, b = workers
    call = a.sync if way == "rpc_sync" else a.future
    strike_each_point(a, b, lambda a, b, used, owned: call(b, same, owned), CALLER)
    gc.collect()
    assert eventually(lambda: a.is_empty() and b.is_empty())


def strike_each_point(a, b, call, files=FILES):
    used, owned = a.remote(b, make), a.remote(a, make)
    assert used.to_here().equal(owned.to_here())

    def counts():
        tables = a.table, b.table
        forks = [sum(len(o.forks) for o in table.owned.values()) for table in tables]
        return forks, [(len(t.owned), len(t.used), len(t._children)) for t in tables]

    assert eventually(lambda: a.table.is_settled() and b.table.is_settled())
    before = counts()
    for strike in strikes(files, finalizers=False, step=STEP):
        strike(lambda: call(a, b, used, owned))
        for to in (a, b):
            assert a.sync(to, max, strike.number, 0, timeout=SECONDS) == strike.number, (
                f"at point {strike.number}"
            )
        if strike.number % CHECK_STEP == 1 or strike.missed:
            gc.collect()  # an interrupt may leave cycles
            settled = eventually(lambda: counts() == before and not a.agent.caller.active)
            assert settled, (
                f"at point {strike.number}, or one of {CHECK_STEP} before: {counts()}, not {before}"
            )
    assert strike.number > 10
