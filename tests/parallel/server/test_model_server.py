"""Model servers: parameters in strict order of versions."""

import pytest
import torch
from server_group import Model, here, server_group, servers

import rayrpc as rpc
from rayrpc.parallel.server import PushPullModelServer, PushPullModelServerImpl


@pytest.fixture
def group(workers):
    with server_group() as group:
        yield group


def serve_model():
    servers["model"] = PushPullModelServerImpl("models", here())


def test_without_an_ordered_server_push_and_pull_are_refused():
    for call in (PushPullModelServer("model").push, PushPullModelServer("model").pull):
        with pytest.raises(RuntimeError, match="has no ordered server"):
            call(Model())


def test_a_client_pulls_what_another_has_pushed(group):
    rpc.rpc_sync("alice", serve_model)
    server = group.get_paired("models").to_here()
    mine, other = Model(), Model()
    assert not server.pull(other)
    for version in range(1, 4):
        with torch.no_grad():
            mine.one.weight += 1
        assert server.push(mine) and mine.pp_version == version
    assert server.pull(other) and other.weights() == (4, 2) and other.pp_version == 3


def test_a_stale_push_is_refused_and_loads_the_newest_version(group):
    rpc.rpc_sync("alice", serve_model)
    server = group.get_paired("models").to_here()
    mine, other = Model(), Model()
    assert server.push(mine) and server.push(mine)
    with torch.no_grad():
        other.one.weight.fill_(9)
    assert not server.push(other, pull_on_fail=False) and other.weights() == (9, 2)
    assert not server.push(other) and other.weights() == (1, 2) and other.pp_version == 2
    assert server.push(other)
