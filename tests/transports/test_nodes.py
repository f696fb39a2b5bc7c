"""Workers on several nodes, each with an address of its own; the cluster is simulated here."""

import os

import pytest
from conftest import ROOT, python_path

HEAD = """
import socket, statistics, time
from nodes import simulated_cluster
import ray
import torch
import rayrpc as rpc
import targets
from rayrpc._transports.ray.directory_client import RayDirectory
"""

TAIL = """
if __name__ == "__main__":
    with simulated_cluster() as cluster:
        main(cluster)
        print("done", flush=True)
"""

THREE = """
def connections():
    '''Return my node's address, where I listen, and the families and ends of my connections.'''
    transport = rpc._get_current_rpc_agent().transport
    server = transport._server
    listening = [s.getsockname() for s in server.listeners if s.family == socket.AF_INET]
    made = {}
    for route in transport.routes().values():
        connection = route.connection.connected_socket
        made[route.connection.peer.name] = connection.family.name, connection.getpeername()
    return transport.node, listening, made


def main(cluster):
    for i in (2, 3):
        cluster.add_node(
            num_cpus=2, resources={f"n{i}": 2}, node_ip_address=f"127.0.0.{i}",
            object_store_memory=100 << 20,
        )
    rpc.configure(address=cluster.address, transport="direct")
    where = {"left": "127.0.0.2", "right": "127.0.0.3", "near": "127.0.0.3"}
    for name, host in where.items():
        rpc.start_workers([name], resources={"resources": {"n" + host[-1]: 1}})

    # connection by connection: small values and tensors
    for name in where:
        for peer in where:
            if peer != name:
                args = (peer, targets.identity, name + peer)
                assert rpc.rpc_sync(name, targets.call_on, args=args) == name + peer
    small = torch.rand(10)
    args = ("right", torch.neg, small)
    assert torch.equal(rpc.rpc_sync("left", targets.call_on, args=args), -small)
    for name, host in where.items():
        node, listening, made = rpc.rpc_sync(name, connections)
        assert node == host, (node, host)
        ((address, port),) = listening
        assert address == host and port, listening
        for peer, (family, end) in made.items():
            if where.get(peer) == host:
                assert family == "AF_UNIX", (name, peer, family)
            elif peer in where:
                assert family == "AF_INET" and end[0] == where[peer], (name, peer, family, end)
        assert {"left", "right", "near"} - {name} <= set(made), made
    _, _, made = connections()
    assert {name: (f, e[0]) for name, (f, e) in made.items()} == {
        name: ("AF_INET", host) for name, host in where.items()
    }
    print("small ones go by TCP", flush=True)

    # large ones have a connection of their own, in both directions
    def count_by_ray():
        fallback = rpc._get_current_rpc_agent().transport._fallback
        calls, replies = targets.shared["by ray"] = [], []
        call, send_reply = fallback.call, fallback.send_reply
        fallback.call = lambda *a: (calls.append(1), call(*a))[1]
        fallback.send_reply = lambda *a: (replies.append(1), send_reply(*a))[1]

    def has_bulk(peer):
        routes = rpc._get_current_rpc_agent().transport.routes().values()
        (connection,) = (r.connection for r in routes if r.connection.peer.name == peer)
        return connection.bulk is not None and not connection.bulk.is_broken

    for name in ("left", "right", "near"):
        rpc.rpc_sync(name, count_by_ray)
    large = torch.rand(1 << 20)
    for number in range(3):
        got = rpc.rpc_sync("left", targets.call_on, args=("right", torch.neg, large + number))
        assert torch.equal(got, -(large + number))
        got += 1  # writable
    assert rpc.rpc_sync("left", has_bulk, args=("right",))
    args = ("near", torch.neg, large)
    assert torch.equal(rpc.rpc_sync("right", targets.call_on, args=args), -large)
    assert not rpc.rpc_sync("right", has_bulk, args=("near",)), "within a node memory is shared"
    made = rpc.rpc_async("near", torch.ones, args=(1 << 20,)).wait()  # to a small request
    assert made.sum() == 1 << 20
    assert has_bulk("near")
    for name in ("left", "right", "near"):
        by_ray = rpc.rpc_sync(name, targets.kept, args=("by ray",))
        assert by_ray == ([], []), (name, by_ray)
    print("large ones have connections of their own", flush=True)

    # RRefs
    rref = rpc.remote("left", targets.Point, args=(5,))
    assert rref.rpc_sync().moved(1).x == 6
    assert rpc.rpc_sync("right", targets.read, args=(rref,)).x == 5
    made = rpc.rpc_sync("right", targets.make_rrefs, args=([large, "b"],))
    assert torch.equal(made[0].to_here(), large) and made[1].to_here() == "b"
    assert rpc.rpc_sync("left", targets.read, args=(made[1],)) == "b"
    assert torch.equal(rpc.rpc_sync("left", targets.read, args=(made[0],)), large)
    print("RRefs cross nodes", flush=True)

    # objects of the store
    ref = rpc.remote("left", torch.neg, args=(large,)).object_ref()
    assert torch.equal(rpc.rpc_sync("right", targets.identity, args=(ref,)), -large)
    args = ("right", targets.identity, [ref])
    (same,) = rpc.rpc_sync("left", targets.call_on, args=args)
    assert same == ref and torch.equal(rpc.as_future(same).wait(), -large)
    assert torch.equal(rpc.rref(ref, to="near").to_here(), -large)
    print("objects cross nodes", flush=True)

    # directories run beside the control service
    for number in range(6):
        directory = RayDirectory(f"key {number}", "rayrpc", 10.0)
        directory.reach(60)
        assert directory._host == ray.util.get_node_ip_address(), (number, directory._host)
    print("directories are on the head", flush=True)
    rpc.shutdown()
"""


@pytest.fixture
def start_nodes(start, script):
    """Run a program on a cluster of its own."""

    def run(program):
        return start(
            script(HEAD + program + TAIL),
            PYTHONPATH=python_path(ROOT, ROOT / "tests"),
            RAY_ADDRESS=None,
            RAY_TMPDIR=None,
        )

    return run


def test_workers_on_different_nodes_call_each_other(start_nodes):
    run = start_nodes(THREE)
    for stage in (
        "small ones go by TCP",
        "large ones have connections of their own",
        "RRefs cross nodes",
        "objects cross nodes",
        "directories are on the head",
        "done",
    ):
        run.wait_for(stage)
    assert run.end() == 0, run.output


POOL = """
from rayrpc.parallel.pool import Pool
from rayrpc.parallel.queue import SimpleQueue


def main(cluster):
    for i in (2, 3):
        cluster.add_node(
            num_cpus=1, resources={f"n{i}": 1}, node_ip_address=f"127.0.0.{i}",
            object_store_memory=100 << 20,
        )
    print("nodes are up", flush=True)
    rpc.configure(address=cluster.address, workers={
        "worker-0": {"resources": {"n2": 1}}, "worker-1": {"resources": {"n3": 1}},
    })
    queue = SimpleQueue(copy_tensor=True)
    tensor = torch.arange(3.0)

    def put(number):
        import ray

        queue.put((number, tensor + number))
        time.sleep(0.05)
        return ray.util.get_node_ip_address()

    with Pool(2) as pool:
        nodes, end = set(), time.monotonic() + 90
        while len(nodes) < 2 and time.monotonic() < end:  # one may take long to connect
            nodes |= set(pool.map(put, range(16), 1))
            got = dict(queue.get(60) for _ in range(16))
            assert all(torch.equal(got[n], tensor + n) for n in range(16)), got
        assert nodes == {"127.0.0.2", "127.0.0.3"}, nodes
        import ray

        here = ray.util.get_node_ip_address()
    print("a pool spans them", flush=True)
    with Pool(2, is_copy_tensor=False, share_method="cpu") as pool:
        assert set(pool.map(lambda _: ray.util.get_node_ip_address(), range(16), 1)) == {here}
"""


@pytest.mark.slow
def test_pools_and_queues_span_nodes(start_nodes):
    run = start_nodes(POOL)
    for stage in ("nodes are up", "a pool spans them", "done"):
        run.wait_for(stage)
    assert run.end() == 0, run.output


EIGHT = """
NODES = {f"w{i}": f"127.0.0.{i}" for i in range(2, 10)}


def ends():
    '''Return the addresses that my connections go to, by peer.'''
    routes = rpc._get_current_rpc_agent().transport.routes().values()
    connections = [route.connection for route in routes]
    return {c.peer.name: c.connected_socket.getpeername()[0] for c in connections}


def call_all():
    me = rpc.get_worker_info().name
    others = [name for name in NODES if name != me]
    futures = [rpc.rpc_async(name, targets.add, args=(name, me)) for name in others]
    assert [future.wait() for future in futures] == [name + me for name in others]


def p50(name):
    times = []
    for _ in range(300):
        start = time.perf_counter()
        rpc.rpc_sync(name, targets.whoami)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main(cluster):
    rpc.configure(
        address=cluster.address, transport="direct", init_timeout=200.0, placement_timeout=200.0
    )
    first = None
    for name, host in NODES.items():
        cluster.add_node(
            num_cpus=1, resources={name: 1}, node_ip_address=host, object_store_memory=80 << 20
        )
        rpc.start_workers([name], resources={"resources": {name: 1}})
        first = first or p50("w2")
    calls = [rpc.rpc_async(name, call_all, timeout=200) for name in NODES]
    for call in calls:
        call.wait()
    for name in NODES:
        found = {peer: end for peer, end in rpc.rpc_sync(name, ends).items() if peer in NODES}
        assert found == {peer: host for peer, host in NODES.items() if peer != name}, (name, found)
    print(f"p50 of a call on the first of 1: {first:.0f} us, of 8: {p50('w2'):.0f} us", flush=True)
    rpc.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.environ.get("TEST_SCALE") != "1", reason="takes minutes; set TEST_SCALE=1")
def test_eight_nodes_call_one_another(start_nodes):
    run = start_nodes(EIGHT)
    print(run.wait_for("p50 of a call", timeout=600))
    run.wait_for("done")
    assert run.end() == 0, run.output
