"""Workers that outlive their program are found, and stopped, from another host."""

import sys

import pytest
from host_maker import why_impossible

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible"),
]

START = """
import rayrpc as rpc
for name, address in (("near", "10.88.0.1"), ("far", "10.88.0.3")):
    place = {"resources": {f"node:{address}": 0.01}}
    rpc.start_workers([name], resources=place, group="samplers", detached=True)
rpc.get_group("samplers").shutdown()
"""
CALL = """
import socket
import rayrpc as rpc
samplers = rpc.connect("samplers")
found = samplers.rpc_all("*", socket.gethostname).wait()
print(*sorted(found.items()))
samplers.shutdown()
"""


def test_they_are_called_and_stopped_from_another_host(hosts_cluster):
    hosts, environ = hosts_cluster

    def run(number, *words):
        return hosts.run(number, sys.executable, *words, timeout=100, environ=environ)

    run(1, "-c", START)
    try:
        assert run(2, "-c", CALL) == "('far', 'host3') ('near', 'host1')\n"
    finally:
        stopped = run(2, "-m", "rayrpc", "stop", "samplers")
    assert stopped == "group 'samplers': ended far, near\n"
