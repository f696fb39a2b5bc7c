"""Ordered servers: values in strict order of versions."""

import pytest
import torch
from server_group import MEMBERS, here, server_group, servers

import rayrpc as rpc
from rayrpc.parallel.server import OrderedServerSimpleImpl


@pytest.fixture
def group(workers):
    with server_group() as group:
        yield group


def serve_ordered(depth):
    servers["ordered"] = OrderedServerSimpleImpl("ordered", here(), version_depth=depth)


def count_up(times):
    """Add to a counter so many times; return the versions that the server accepted."""
    server = here().get_paired("ordered").to_here()
    server.push("counter", 0, 0, None)
    accepted = []
    while len(accepted) < times:
        value, version = server.pull("counter")
        if server.push("counter", value + 1, version + 1, version):
            accepted.append(version + 1)
    return accepted


def test_each_version_follows_the_one_before(group):
    rpc.rpc_sync("alice", serve_ordered, args=(1,))
    server = group.get_paired("ordered").to_here()
    assert server.push("a", "value", 1, None)
    assert not server.push("a", "stale", 2, 0)
    assert server.push("a", "value 2", 2, 1)
    assert server.push("a", "value 3", -1, 2)
    assert server.pull("a") == ("value 3", -1)
    assert server.pull("a", 2) == ("value 2", 2)
    assert server.pull("a", 1) is None and server.pull("b") is None


@pytest.mark.parametrize("depth", [2, 4])
def test_version_depth_old_versions_are_stored(group, depth):
    rpc.rpc_sync("bob", serve_ordered, args=(depth,))
    server = group.get_paired("ordered").to_here()
    for version in range(8):
        assert server.push("a", f"value {version}", version, version - 1)
    stored = [v for v in range(8) if server.pull("a", v) is not None]
    assert stored == list(range(7 - depth, 8))


def test_a_pulled_value_is_a_copy(group):
    servers["ordered"] = OrderedServerSimpleImpl("ordered", group)
    server = group.get_paired("ordered").to_here()
    sent = torch.ones(2)
    assert server.push("a", sent, 1, None)
    sent += 1
    server.pull("a")[0].add_(5)
    assert torch.equal(server.pull("a")[0], torch.ones(2))


def test_no_update_of_many_clients_is_lost(group):
    rpc.rpc_sync("alice", serve_ordered, args=(1,))
    calls = [rpc.rpc_async(MEMBERS[n % 3], count_up, args=(20,), timeout=60) for n in range(8)]
    accepted = sorted(version for call in calls for version in call.wait())
    assert accepted == list(range(1, 161))
    assert group.get_paired("ordered").to_here().pull("counter") == (160, 160)


def test_a_version_depth_of_zero_is_refused(group):
    with pytest.raises(ValueError, match="version_depth must be"):
        OrderedServerSimpleImpl("ordered", group, version_depth=0)
