"""What can be seen of a group on several hosts, from any of them."""

import json
import sys

import pytest
from host_cluster import on_two_hosts
from host_maker import why_impossible
from host_ranks import started_ranks

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible"),
]

FILE = "/tmp/ray/trace.json"  # each host has a /tmp/ray of its own
CALLS = """
import torch
import torch.distributed.rpc as rpc, torch.multiprocessing as mp

def run(rank):
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2)
    if rank == 0:
        for _ in range(20):
            rpc.rpc_sync("w1", torch.add, args=(torch.ones(2), 1))
    print("called", flush=True)
    rpc.shutdown()

if __name__ == "__main__":
    mp.spawn(run, nprocs=2)
"""


@pytest.fixture
def cluster(hosts_cluster):
    return hosts_cluster


def rayrpc(cluster, number, *words, timeout=60):
    hosts, environ = cluster
    command = [sys.executable, "-m", "rayrpc", *words]
    return hosts.run(number, *command, timeout=timeout, environ=environ)


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_any_host_shows_the_workers_and_calls_of_all(cluster, number):
    hosts, environ = cluster
    with started_ranks(hosts, environ, [1, 2]) as (first, second):
        first.tell("nap w1 60")
        first.wait_for("napping")
        (group,) = json.loads(rayrpc(cluster, number, "status", "--json"))
        places = {each["name"]: each["node"] for each in group["workers"]}
        assert places == {"w0": hosts.address(1), "w1": hosts.address(2)}
        assert [(each["host"], each["hosted"]) for each in group["workers"]] == [
            ("host1", False),
            ("host2", False),
        ]
        (call,) = group["calls"]
        assert (call["from"], call["to"], call["state"]) == ("w0", "w1", "running")
        text = rayrpc(cluster, number, "stack")
        assert "w0 waits for w1 (nap, " in text and ", which is at " in text
        assert f"-- w1 (node {hosts.address(2)}, " in text
        for each in (first, second):
            each.close()


@pytest.mark.slow
def test_ranks_of_two_hosts_are_traced_and_their_lines_have_their_hosts(cluster):
    hosts, environ = cluster
    write = "import sys; open('/tmp/ray/calls.py', 'w').write(sys.argv[1])"
    hosts.run(1, sys.executable, "-c", write, CALLS)
    settings = [*on_two_hosts(hosts), "--set", "prefix_output=always"]
    words = ["run", *settings, "--trace", FILE, "/tmp/ray/calls.py"]
    more = hosts, {**environ, "MASTER_PORT": "29501"}
    output = rayrpc(more, 1, *words, timeout=150)
    assert sorted(output.splitlines()) == [
        "(rank0 on host1) called",
        "(rank1 on host2) called",
    ]
    events = json.loads(hosts.run(1, "cat", FILE))["traceEvents"]
    names = sorted(e["args"]["name"] for e in events if e["name"] == "process_name")
    assert [name.partition(",")[0] for name in names] == [
        f"w0 ({hosts.address(1)}",
        f"w1 ({hosts.address(2)}",
    ]
    made = [e for e in events if e.get("ph") == "X" and e["name"].endswith("add -> w1")]
    ran = [e for e in events if e.get("ph") == "X" and e["name"] == "torch.add"]
    assert len(made) == len(ran) == 20
    assert {e["pid"] for e in made} == {0} and {e["pid"] for e in ran} == {1}
