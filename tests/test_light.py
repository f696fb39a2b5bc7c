"""Modules and actors that never load torch, and the life of relays and directories."""

import os
import subprocess
import sys
from typing import Any

import pytest
import ray
import targets
from conftest import ROOT, eventually

import rayrpc as rpc
from rayrpc._protocol.group import Group
from rayrpc._protocol.membership import Member
from rayrpc._protocol.rendezvous import owned_key
from rayrpc._transports import open_transport
from rayrpc._transports.process_origin import this_origin
from rayrpc._transports.ray import directory as ray_directory
from rayrpc._transports.ray.directory import DirectoryActor

LIGHT = [
    "rayrpc",
    "rayrpc._protocol.group",
    "rayrpc._protocol.membership",
    "rayrpc._protocol.messages",
    "rayrpc._transports.process_origin",
    "rayrpc._transports.ray.directory",
    "rayrpc._transports.ray.endpoint",
    "rayrpc._transports.ray.fork_server",
    "rayrpc._transports.ray.local_cluster",
    "rayrpc._transports.ray.relay",
    "rayrpc._transports.ray.worker_forks",
    "rayrpc.config",
    "rayrpc.errors",
    "rayrpc.launch.hosted",
    "rayrpc.launch.output",
    "rayrpc.launch.output_relay",
    "rayrpc.launch.program",
]


@pytest.fixture(scope="module")
def loaded():
    """Return by module whether torch is loaded once it is, each seen in a process that forked."""
    code = (
        "import importlib, os, sys\n"
        "import ray\n"  # once: it takes long, and has no torch
        "for name in sys.argv[1:]:\n"
        "    if os.fork() == 0:\n"
        "        importlib.import_module(name)\n"
        "        print(name, 'torch' in sys.modules, flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *LIGHT], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == len(LIGHT), done.stderr
    return dict(lines)


@pytest.mark.parametrize("name", LIGHT)
def test_a_module_loads_without_torch(loaded, name):
    assert loaded[name] == "False"


def has_torch(actor) -> bool:
    return ray.get(actor.__ray_call__.remote(lambda self: "torch" in sys.modules), timeout=60)


def test_the_actors_beside_the_workers_do_not_load_torch(ray_cluster):
    options = rpc.TensorPipeRpcBackendOptions(init_method="ray://light")
    rpc.init_rpc("driver", rpc_backend_options=options)
    try:
        assert rpc.rpc_sync("driver", targets.add, args=(1, 1)) == 2
        me = rpc._get_current_rpc_agent().member
        name = f"rayrpc-directory:{owned_key('light', this_origin())}"
        directory = ray.get_actor(name, namespace=rpc.settings().namespace)
        assert not has_torch(directory)
        assert not has_torch(me.address.find())
    finally:
        rpc.shutdown()


def test_a_relay_starts_when_its_worker_has_joined(ray_cluster):
    transport, directory = open_transport(rpc.settings(), "light-gate", "early", "gate-token")
    try:
        member = Member("gate-token", "early", -1, address=transport.address, pid=os.getpid())
        assert directory.join(member, timeout=60).me.name == "early"
        with pytest.raises(ValueError, match="Failed to look up actor"):
            transport.address.find()
        transport.start(lambda frame, may_block=True: frame, lambda worker_id: None)
        assert ray.get(transport.address.find().give.remote([]), timeout=60) is None
    finally:
        directory.close()
        directory.leave()
        transport.close()


def test_a_worker_that_is_refused_is_not_waited_for(ray_cluster):
    settings = rpc.settings()
    opened = [open_transport(settings, "light-refused", "twin", f"twin-{i}") for i in range(2)]
    try:
        first, second = (
            Member(f"twin-{i}", "twin", -1, address=transport.address, pid=os.getpid())
            for i, (transport, _) in enumerate(opened)
        )
        opened[0][1].join(first, timeout=60)
        with pytest.raises(RuntimeError, match="twin"):
            opened[1][1].join(second, timeout=60)
        directory: Any = opened[1][1]
        ask = directory._actor.__ray_call__.remote
        assert eventually(
            lambda: ray.get(ask(lambda self: self._watch.tokens), timeout=60) == {"twin-0"}
        )
    finally:
        for transport, directory in opened:
            directory.close()
            directory.leave()
            transport.close()


def test_a_directory_stays_longer_after_a_death():
    directory = DirectoryActor.__new__(DirectoryActor)  # its tasks need an actor
    directory._group, directory._any_died = Group("key"), False
    assert directory._linger_seconds() == ray_directory.LINGER_AT_FIRST_SECONDS
    directory._group.join(Member("token", "w", 0, 1))
    assert directory._linger_seconds() == ray_directory.LINGER_SECONDS
    directory._any_died = True
    assert directory._linger_seconds() == ray_directory.LINGER_AFTER_DEATH_SECONDS
