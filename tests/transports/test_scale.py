"""Many workers: one that calls few pays for few, and each may call each."""

import os
import threading

import pytest
import targets
from conftest import eventually

import rayrpc as rpc
from rayrpc import config

SCALE = os.environ.get("TEST_SCALE") == "1"
SIZES = [
    12,
    pytest.param(
        32,
        marks=[
            pytest.mark.timeout(900),
            pytest.mark.skipif(not SCALE, reason="takes minutes; set TEST_SCALE=1"),
        ],
    ),
]
THREADS_AT_REST = 19
# More than before the calls: the one for all idle connections, and those of the last calls.
MORE_THREADS = 4

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=SIZES)
def names(request, ray_cluster):
    names = [f"w{number}" for number in range(request.param)]
    before = rpc.settings()
    rpc.configure(init_timeout=300.0, placement_timeout=300.0)
    try:
        rpc.start_workers(names)
        yield names
    finally:
        config.use(before)
        if rpc._is_current_rpc_agent_set():
            rpc.shutdown()


def look_at(name):
    """Return a worker's peers by connection, its number of incoming ones, and of threads."""

    def look():
        transport = rpc._get_current_rpc_agent().transport
        connections = [
            route.connection.peer.name
            for route in transport.routes().values()
            if route.connection.connected_socket
        ]
        return sorted(connections), len(transport._server.connections), threading.active_count()

    return rpc.rpc_sync(name, look)


def let_call(name, peers):
    """Have a worker call each peer, all at once and then one by one."""

    def call_each():
        me = targets.whoami()
        futures = [rpc.rpc_async(peer, targets.add, args=(peer, me)) for peer in peers]
        answers = [future.wait() for future in futures]
        return answers, [rpc.rpc_sync(peer, targets.whoami) for peer in peers]

    return rpc.rpc_async(name, call_each)


def is_at_rest(name, before):
    return look_at(name)[2] <= before + MORE_THREADS


@pytest.mark.parametrize("called", [1, 5])
def test_a_worker_has_connections_for_the_peers_it_calls_only_and_no_threads(names, called):
    caller, peers = names[called], sorted(names[-called:])
    connections, _, before = look_at(caller)
    assert connections == [] and before <= THREADS_AT_REST
    answers, who = let_call(caller, peers).wait()
    assert answers == [peer + caller for peer in peers] and who == peers
    connections, callers, _ = look_at(caller)
    assert connections == peers
    assert callers == 1  # this process
    assert eventually(lambda: is_at_rest(caller, before)), f"{look_at(caller)[2]}, {before} before"
    for peer in peers:
        assert look_at(peer)[0] == []


def test_each_calls_each(names):
    others = {name: [other for other in names if other != name] for name in names}
    before = {name: look_at(name)[2] for name in names}
    calls = {name: let_call(name, peers) for name, peers in others.items()}
    for name, call in calls.items():
        answers, who = call.wait()
        assert who == others[name]
        assert answers == [peer + name for peer in others[name]]
    for name in names:
        connections, callers, _ = look_at(name)
        assert connections == sorted(others[name]) and callers == len(names)
    for name in names:
        assert eventually(lambda: is_at_rest(name, before[name])), name  # noqa: B023
